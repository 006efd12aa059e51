"""Rpc servicer, status and metrics."""
