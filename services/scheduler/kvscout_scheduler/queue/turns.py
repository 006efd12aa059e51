"""Turns: which of the requests that wait goes next, for one look at some groups of a pool; see rule 2 of `waiting`.

Accounts only grow meanwhile: the order of the groups is a heap whose first entry is looked at again before it counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from kvscout_scheduler.queue.waiting import Group, Line, PoolQueue, Waiter

Rank: TypeAlias = tuple[int, float, float, int]
"""Negated priority, accounts of the caller and of the fairness id, arrival: the least goes next."""


class Turn(NamedTuple):
    """A request that goes next, if a worker has room for it."""

    waiter: Waiter
    group: Group
    aged: bool
    """It goes before a higher priority, since it has waited for long."""


class Turns:
    """Turns of some groups.

    Args:
        queue: Of their pool.
        groups: The groups.
        now: On the scheduler's clock.
    """

    def __init__(self, queue: PoolQueue, groups: Iterable[Group], now: float) -> None:
        self._queue = queue
        self._now = now
        self._heads: list[tuple[Rank, int, Group]] = [
            (queue.head(group)[0], number, group) for number, group in enumerate(groups)
        ]
        heapify(self._heads)
        self._dropped: set[Group] = set()
        self._aged: list[tuple[int, int, Group, Line]] | None = None
        """Lines whose first has waited for long, by its arrival; a heap. None = nobody has asked yet."""

    def next(self) -> Turn | None:
        """Return whose turn it is; None = nobody's. The same again, unless it was taken out or its group dropped."""
        heads = self._heads
        while heads:
            rank, number, group = heads[0]
            if group in self._dropped or not group.lines:
                heappop(heads)
                continue
            current, waiter = self._queue.head(group)
            if current == rank:
                return self._aged_turn(-rank[0]) or Turn(waiter, group, aged=False)
            heapreplace(heads, (current, number, group))
        return None

    def drop(self, group: Group) -> None:
        """Pass over a group from now on."""
        self._dropped.add(group)

    def _aged_turn(self, top: int) -> Turn | None:
        """Return the turn of one that has waited for long, if it is due."""
        if self._queue.owed <= 0:
            return None
        if self._aged is None:
            self._aged = []
            for _, _, group in self._heads:
                for priority, line in group.lines.items():
                    self._await(priority, group, line)
        while self._aged:
            place, priority, group, line = self._aged[0]
            waiting = line.waiters and line.waiters[0].place == place
            if waiting and priority < top and group not in self._dropped:
                return Turn(line.waiters[0], group, aged=True)
            heappop(self._aged)
            if not waiting and line.waiters:
                self._await(priority, group, line)
        return None

    def _await(self, priority: int, group: Group, line: Line) -> None:
        if self._aged is not None and self._queue.is_aged(line, self._now):
            heappush(self._aged, (line.waiters[0].place, priority, group, line))
