"""File descriptors: as many as this process may have. Every connection takes one."""

from __future__ import annotations

import logging
import os
import resource
from pathlib import Path

log = logging.getLogger("kvscout.serving")

FEW = 16_384
"""Below this an operator is warned: ten thousand requests in flight have a connection to their engine each."""
UNLIMITED = 1 << 20
"""Limit where nothing else sets one: some systems refuse to lift a limit to infinity."""


_OPEN = Path("/proc/self/fd")


def descriptor_limit() -> int:
    """Return how many files this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return how many files it has open; 0 = unknown."""
    try:
        # Linux counts them there since 6.2; before, and on other systems, they are counted one by one.
        return _OPEN.stat().st_size or len(os.listdir(_OPEN))
    except OSError:
        return 0


def raise_descriptor_limit() -> int:
    """Lift the soft limit of open files, mostly 1,024, to the hard one; warn where that is small.

    Returns:
        The limit from now on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            log.warning("the limit of open files stays at %d: %s", soft, error)
    limit = descriptor_limit()
    if limit < FEW:
        log.warning("the limit of open files is only %d (ulimit -Hn): each connection uses one", limit)
    return limit
