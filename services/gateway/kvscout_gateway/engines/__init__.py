"""Engines that run requests: calls, answers, faults, health and timeouts."""
