"""A policy as another package would bring it, found through an entry point."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvscout_scheduler.candidates import Candidates


class LastRank:
    """Always the last rank."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return [0.0] * len(candidates)

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        return len(costs) - 1

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return "the last"
