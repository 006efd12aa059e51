"""Ports for processes that must find their place again after a restart."""

from __future__ import annotations

import fcntl
import functools
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import BinaryIO

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
        if _is_free(port) and _claimed(port):
            found.append(port)
    raise AssertionError(f"{number} free ports are not to be had")


def first_of_free_ports(number: int) -> int:
    """Return the first of so many ports in a row that nobody has now, as `free_ports` gives them."""
    for first in random.SystemRandom().sample(RANGE[:-number], len(RANGE) - number):
        if all(_is_free(port) and _claimed(port) for port in range(first, first + number)):
            return first
    raise AssertionError(f"{number} free ports in a row are not to be had")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _claimed(port: int) -> bool:
    """Lock the port where all processes of this machine see it, until this process ends: whoever has it may not listen
    there yet, or not at the moment."""
    if port in _own:
        return False
    try:
        fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _own.add(port)
    return True


_own: set[int] = set()


@functools.cache
def _claims() -> BinaryIO:
    """Open the file whose bytes are locked, one a port; closing it would give all of them back."""
    return (Path(tempfile.gettempdir()) / f"kvscout-test-ports-{os.getuid()}").open("wb")
