"""Replicas of the scheduler: claims, synchronisation, forwarding."""
