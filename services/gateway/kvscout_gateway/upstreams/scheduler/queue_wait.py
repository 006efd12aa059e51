"""How long a request waits in a scheduler's queue, and how often its overlaps are refreshed meanwhile."""

from __future__ import annotations

import time
from math import inf
from typing import Final

from kvscout_common.errors import KvscoutError, ResourceExhausted
from kvscout_gateway.upstreams.scheduler.link import RETRY_SECONDS
from kvscout_gateway.values.request import DeadlinePassed

REFRESH_SECONDS: Final = 1.0
"""Wait in the queue after which overlaps are refreshed; doubles each time, up to the next."""
MAX_REFRESH_SECONDS: Final = 8.0


class WaitedTooLong(ResourceExhausted):
    """A request stood in the queue until its time was over."""

    cause = "queue"


class QueueWait:
    """Wait of one request in the queue.

    Args:
        seconds: Longest wait.
        deadline: Of the request, on `time.monotonic`.
    """

    def __init__(self, seconds: float, deadline: float = inf) -> None:
        ends_at = time.monotonic() + seconds
        self._has_deadline = deadline < ends_at
        self._ends_at = min(ends_at, deadline)
        self._pause = REFRESH_SECONDS

    @property
    def seconds_left(self) -> float:
        """Return the time until it is taken out of the queue."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def pause(self) -> float:
        """Return the time until its overlaps are refreshed, or it is taken out of the queue."""
        return min(self._pause, self.seconds_left)

    def over(self) -> KvscoutError:
        """Return the error of a request that stood in the queue until its time was over."""
        if self._has_deadline:
            return DeadlinePassed("no worker had room for the request before its deadline")
        return WaitedTooLong("no worker had room for the request in time", retry_after_seconds=RETRY_SECONDS)

    def refreshed(self) -> None:
        """Record a refresh of its overlaps: the next one comes later."""
        self._pause = min(2 * self._pause, MAX_REFRESH_SECONDS)
