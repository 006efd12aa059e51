"""Counts since start, and within the last minutes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

RECENT_SECONDS: Final = 300
SPAN_SECONDS: Final = 10
"""Resolution of recent counts, in seconds."""
MAX_KEYS: Final = 1_000

Key = TypeVar("Key", bound=Hashable)


class RecentCounts(Generic[Key]):
    """Counts by key. Of keys above `MAX_KEYS`, nothing is counted.

    Args:
        clock: Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spans: deque[tuple[int, Counter[Key]]] = deque()
        """Number of each span that has counts, the oldest first."""
        self.total: Counter[Key] = Counter()
        """Since start."""

    def add(self, key: Key) -> None:
        """Count one."""
        if key not in self.total and len(self.total) >= MAX_KEYS:
            return
        self.total[key] += 1
        now = self._now()
        if not self._spans or self._spans[-1][0] != now:
            self._drop_old(now)
            self._spans.append((now, Counter()))
        self._spans[-1][1][key] += 1

    def recent(self) -> Counter[Key]:
        """Return the counts of the last `RECENT_SECONDS`."""
        self._drop_old(self._now())
        found: Counter[Key] = Counter()
        for _, counts in self._spans:
            found.update(counts)
        return found

    def _now(self) -> int:
        return int(self._clock() // SPAN_SECONDS)

    def _drop_old(self, now: int) -> None:
        while self._spans and self._spans[0][0] <= now - RECENT_SECONDS // SPAN_SECONDS:
            self._spans.popleft()
