"""Attempts that are over: what makes a late, repeated or overtaking call harmless for a while."""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

from kvscout_scheduler.values.reservation import RequestKey


class Ended(Enum):
    """End of an attempt."""

    BY_CALLER = auto()
    """A Free came after its booking: a copy of the booking call that comes still later must not book again."""
    BEFORE_BOOKING = auto()
    """A Free came first: the booking it was meant for is cancelled when it arrives."""
    BY_US = auto()
    """Lease, owner, worker, or an answer that was lost: the caller may book again."""


class EndedAttempts:
    """Ended attempts, remembered for a fixed time, the oldest first to go; bounded.

    Args:
        seconds: How long.
        limit: How many; above it the oldest are forgotten early.
    """

    def __init__(self, seconds: float, limit: int) -> None:
        self._seconds = seconds
        self._limit = limit
        # A dict whose first entries are deleted one by one looks at all of the deleted ones for its first each time.
        self._ended: OrderedDict[tuple[RequestKey, int], tuple[Ended, float]] = OrderedDict()

    def add(self, key: RequestKey, attempt_id: int, how: Ended, now: float) -> None:
        """Remember an attempt from now on."""
        name = (key, attempt_id)
        self._ended[name] = (how, now + self._seconds)
        self._ended.move_to_end(name)
        if len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def get(self, key: RequestKey, attempt_id: int, now: float) -> Ended | None:
        """Return how an attempt ended, None if it did not or that is forgotten."""
        found = self._ended.get((key, attempt_id))
        return found[0] if found is not None and found[1] > now else None

    def forget(self, key: RequestKey, attempt_id: int) -> None:
        """Forget an attempt: it is active again."""
        self._ended.pop((key, attempt_id), None)

    def expire(self, now: float) -> None:
        """Forget what is old enough."""
        while self._ended:
            name = next(iter(self._ended))
            if self._ended[name][1] > now:
                break
            del self._ended[name]
