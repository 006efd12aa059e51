"""Ports for processes that must find their place again after a restart."""

from __future__ import annotations

import random
import socket

RANGE = range(20_000, 32_000)
"""Below those that the kernel gives away by itself: nobody takes one while its process is being restarted."""


def free_ports(number: int) -> list[int]:
    """Ports that nobody has now; all different.

    Drawn, and not in order: tests that run beside one another ask at once.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(RANGE, len(RANGE)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise AssertionError(f"{number} free ports are not to be had")
