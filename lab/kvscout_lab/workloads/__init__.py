"""Workloads: sessions, traces and generated flows, and the settings of their clients."""
