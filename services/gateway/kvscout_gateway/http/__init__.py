"""The HTTP port: one router, from paths to fronts."""
