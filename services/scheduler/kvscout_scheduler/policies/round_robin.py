"""`round-robin`: the eligible workers of a pool in turn, in the order of (worker_id, dp_rank).

::

    next = the first eligible rank after the last one chosen, the first of all if there is none

The last rank is remembered by name, so that workers that come, go or are skipped disturb nobody else's turn. Queries
have a turn of their own: a client that asks before it books must not meet the same worker again and again.

Worked example: workers a, b, c: a, b, c, a. With b busy: a, c, a. When b is back after a: b.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from random import Random

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.candidates import Candidates


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last: dict[bool, WorkerRank] = {}

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return [0.0] * len(candidates)

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        ranks, books = candidates.ranks, candidates.settings.books
        last = self._last.get(books)
        index = bisect_right(ranks, last) % len(ranks) if last is not None else 0
        self._last[books] = ranks[index]
        return index

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"its turn among {len(costs)} workers"
