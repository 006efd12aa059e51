"""What every service says of itself in GetStatus."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvscout.v1 import types_pb2
from kvscout_common import __version__
from kvscout_common.hashing import backend_name, native_available

SLOW_BACKEND = "the extension kvscout_native is not built: answers are the same, slower"


def service_info(started: float, *, draining: bool = False, warnings: Sequence[str] = ()) -> types_pb2.ServiceInfo:
    """The common part of every status.

    Args:
        started: `time.monotonic()` at start.
        draining: Whether the process finishes what it has.
        warnings: What an operator should know, one sentence each.
    """
    all_warnings = list(warnings) if native_available() else [SLOW_BACKEND, *warnings]
    return types_pb2.ServiceInfo(
        version=__version__,
        uptime_seconds=time.monotonic() - started,
        backend=backend_name(),
        draining=draining,
        warnings=all_warnings,
    )
