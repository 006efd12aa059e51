"""Plain data on the way of a request: what is asked, and where it goes."""
