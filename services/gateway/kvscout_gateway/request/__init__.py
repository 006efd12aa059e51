"""A request from its begin to its end, whichever front it came through."""
