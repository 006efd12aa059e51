"""Protocols that clients speak to the gateway."""
