"""File descriptors: as many as this process may have. Every connection takes one."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("kvscout.serving")

FEW = 16_384
"""Below this an operator is told: ten thousand requests in flight have a connection to their engine each."""
UNLIMITED = 1 << 20
"""Asked for where nothing else limits it: some systems refuse to lift a limit to infinity."""


def raise_descriptor_limit() -> int:
    """Lifts the soft limit of open files, mostly 1,024, to the hard one; says so where that is small.

    Returns:
        The limit from now on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if soft not in (resource.RLIM_INFINITY, wanted) and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (ValueError, OSError) as error:
            log.warning("the limit of open files stays at %d: %s", soft, error)
    limit = UNLIMITED if soft == resource.RLIM_INFINITY else soft
    if limit < FEW:
        log.warning("at most %d files may be open here (ulimit -Hn): each connection takes one", limit)
    return limit
