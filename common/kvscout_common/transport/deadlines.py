"""Deadlines of many calls behind one timer of the loop: nearly all of them are taken back before they come.

A timer of the loop costs a call more than the rest of what is done for it here.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

SPARE = 256
"""Deadlines that were taken back stay in the heap until they outnumber the others by this."""


class Deadlines:
    """Deadlines of one core.

    Args:
        loop: The running one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int]] = []
        self._expire: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        """When it comes: uvloop's handle of a time that is over does not say."""

    def add(self, at: float, expire: Callable[[], None]) -> int:
        """Has a function called when the loop's clock says so; returns what `drop` takes."""
        self._number += 1
        self._expire[self._number] = expire
        heapq.heappush(self._heap, (at, self._number))
        if self._timer is None or at < self._timer_at:
            self._set_timer()
        return self._number

    def drop(self, number: int) -> None:
        """Cancel it; no effect if it was called."""
        self._expire.pop(number, None)
        if len(self._heap) > 2 * len(self._expire) + SPARE:
            self._heap = [entry for entry in self._heap if entry[1] in self._expire]
            heapq.heapify(self._heap)

    def close(self) -> None:
        """None is called any more."""
        self._expire.clear()
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self._heap[0][0]
        self._timer = self._loop.call_at(self._timer_at, self._come)

    def _come(self) -> None:
        self._timer = None
        # A loop may be early by the resolution of its clock.
        now = self._loop.time() + 0.001
        while self._heap and (self._heap[0][0] <= now or self._heap[0][1] not in self._expire):
            expire = self._expire.pop(heapq.heappop(self._heap)[1], None)
            if expire is not None:
                expire()
        if self._heap:
            self._set_timer()
