"""Plain values of the scheduler: requests, overlaps, decisions, settings."""
