"""Who calls: tokens, tenants, TLS and the audit log."""
