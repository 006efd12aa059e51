"""Identity of callers: tokens, tenants, TLS and the audit log."""
