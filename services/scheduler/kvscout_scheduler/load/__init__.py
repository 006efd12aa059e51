"""Active load of workers, by pool and slot."""
