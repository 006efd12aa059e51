"""Handshakes between prefill and decode engines."""
