"""The engine: its cache, its steps, its ranks, its events."""
