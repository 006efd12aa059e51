"""The simulated cluster: engines, caches, index, schedulers, on one event loop of picoseconds."""
