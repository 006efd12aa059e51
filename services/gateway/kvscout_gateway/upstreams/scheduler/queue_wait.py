"""How long a request waits in a scheduler's queue, and how often its overlaps are refreshed meanwhile."""

from __future__ import annotations

import time
from typing import Final

from kvscout_common.errors import ResourceExhausted
from kvscout_gateway.upstreams.scheduler.link import RETRY_SECONDS

REFRESH_SECONDS: Final = 1.0
"""Wait in the queue after which overlaps are refreshed; doubles each time, up to the next."""
MAX_REFRESH_SECONDS: Final = 8.0


class WaitedTooLong(ResourceExhausted):
    """A request stood in the queue until its time was over."""


class QueueWait:
    """Wait of one request in the queue.

    Args:
        seconds: Longest wait.
    """

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds
        self._pause = REFRESH_SECONDS

    @property
    def seconds_left(self) -> float:
        """Return the time until it is taken out of the queue."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def pause(self) -> float:
        """Return the time until its overlaps are refreshed, or it is taken out of the queue."""
        return min(self._pause, self.seconds_left)

    def refreshed(self) -> None:
        """Record a refresh of its overlaps: the next one comes later."""
        self._pause = min(2 * self._pause, MAX_REFRESH_SECONDS)


def waited_too_long() -> WaitedTooLong:
    """Return the error of a request that stood in the queue until its time was over."""
    return WaitedTooLong("no worker had room for the request in time", retry_after_seconds=RETRY_SECONDS)
