"""Bodies of requests, read."""
