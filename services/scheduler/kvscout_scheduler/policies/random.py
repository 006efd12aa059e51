"""`random`: any eligible worker, all equally likely.

::

    p = 1 / eligible workers

Worked example: three workers, whatever their load: each is chosen one time in three.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvscout_scheduler.candidates import Candidates


class UniformRandom:
    """Uniformly at random."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return [0.0] * len(candidates)

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        return rng.randrange(len(costs))

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [1.0 / len(costs)] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"drawn uniformly among {len(costs)} workers"
