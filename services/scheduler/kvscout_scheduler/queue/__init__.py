"""Requests that wait for a worker with room."""
