"""The scheduler: which worker takes a request, given overlaps and load."""
