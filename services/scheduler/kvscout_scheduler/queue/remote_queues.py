"""Queues of other replicas: a vacancy here is left to their requests of a higher priority for a moment.

Each replica has a line of its own, and all see the same vacancies. One that several could fill is left, for a moment,
to the replica at which the highest priority waits; when that has not filled it by then, for whatever reason, whoever
waits or comes here goes, until there is no vacancy any more: nobody waits longer than that for a queue that has no use
for it. Only requests that can go anywhere in their pool are announced and yield: a group holds up no other.

Pure: the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvscout_scheduler.values.request import UNCONSTRAINED, SelectionRequest
from kvscout_scheduler.values.reservation import PoolId

YIELD_SECONDS: Final = 0.1
"""Seconds for which a vacancy is left to other replicas: a few messages and ticks."""


class RemoteQueues:
    """The vacancies that are left to others."""

    def __init__(self) -> None:
        self.highest: Callable[[PoolId], int | None] = lambda pool: None
        """Highest priority that waits for a pool at other replicas; None = nobody waits there."""
        self._since: dict[PoolId, float] = {}
        """Since when there has been a vacancy that is left to others, or was."""
        self._left: dict[PoolId, None] = {}
        """Those that are left to others now."""

    def come_first(self, request: SelectionRequest, now: float) -> bool:
        """Return whether a vacancy that a request could fill is left to others."""
        if request.constraints != UNCONSTRAINED:
            return False
        highest = self.highest(request.pool)
        if highest is None or request.priority >= highest:
            return False
        if now - self._since.setdefault(request.pool, now) >= YIELD_SECONDS:
            return False
        self._left[request.pool] = None
        return True

    def filled(self, pool: PoolId) -> None:
        """Note that there is no vacancy any more."""
        if self._since:
            self._since.pop(pool, None)
            self._left.pop(pool, None)

    def take_over(self, now: float) -> list[PoolId]:
        """Return pools whose vacancies are left to nobody any more: the time is over, or nobody waits there."""
        if not self._since:
            return []
        for pool in [pool for pool in self._since if self.highest(pool) is None]:
            del self._since[pool]
        over = [pool for pool in self._left if now - self._since.get(pool, 0.0) >= YIELD_SECONDS]
        for pool in over:
            del self._left[pool]
        return over
