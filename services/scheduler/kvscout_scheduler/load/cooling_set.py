"""Slots that cool down, as a set that is made anew only when one comes or its time is over."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.values.slot_sets import slot_set, slots_in


class CoolingSet:
    """Set of slots that cool down.

    Args:
        until: By slot, for reading; changed here only. Those that are over stay until they are dropped.
        ranks: By slot.
    """

    def __init__(self, until: dict[int, float], ranks: Sequence[WorkerRank]) -> None:
        self._until = until
        self._ranks = ranks
        self._cooling = 0
        self._since, self._before = inf, -inf
        """When `_cooling` holds."""
        self._halves: dict[int, int] = {}
        """Slots left out of the last set of which too many cool down."""

    def put(self, slot: int, until: float) -> None:
        """Cool a slot down until a time."""
        self._until[slot] = until
        self._forget()

    def drop(self, slot: int) -> None:
        """End the cool-down of a slot."""
        if self._until.pop(slot, None) is not None:
            self._forget()

    def left_out(self, among: int, now: float) -> int:
        """Return slots that cool down, of a set: at most half of them, those whose cool-downs end last."""
        if not self._since <= now < self._before:
            until = [end for end in self._until.values() if end > now]
            self._cooling = slot_set(slot for slot, end in self._until.items() if end > now)
            self._since, self._before = now, min(until, default=inf)
            self._halves.clear()
        cooling = self._cooling & among
        most = among.bit_count() // 2
        if cooling.bit_count() <= most:
            return cooling
        last = self._halves.get(among)
        if last is None:
            by_end = sorted(slots_in(cooling), key=lambda slot: (self._until[slot], self._ranks[slot]))
            self._halves.clear()
            last = self._halves[among] = slot_set(by_end[len(by_end) - most :])
        return last

    def _forget(self) -> None:
        self._since, self._before = inf, -inf
