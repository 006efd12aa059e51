"""Workloads in real time: drivers, records, summaries, and the simulation beside real processes."""
