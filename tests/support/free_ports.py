"""Ports for processes that must find their place again after a restart."""

from __future__ import annotations

import random
import socket

RANGE = range(20_000, 32_000)
"""Below those that the kernel gives away by itself: nobody takes one while its process is being restarted."""


def free_ports(number: int) -> list[int]:
    """Ports that nobody has now; all different. No other test is given one of them as long as this process lives.

    Drawn, and not in order: tests that run beside one another ask at once.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(RANGE, len(RANGE)):
        if len(found) == number:
            return found
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if _claimed(port):
            found.append(port)
    raise AssertionError(f"{number} free ports are not to be had")


def _claimed(port: int) -> bool:
    """Notes, where all processes of this machine see it, that a port is given away: whoever has it may not listen there
    yet, or not at the moment."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        # An abstract name: it goes with the process.
        claim.bind(f"\0kvscout-test-port-{port}")
    except OSError:
        claim.close()
        return False
    claim.detach()
    return True
