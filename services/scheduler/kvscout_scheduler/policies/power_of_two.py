"""`power-of-two`: two workers drawn at random, the one with fewer active requests takes the request.

::

    cost = active requests; drawn: two different candidates, uniformly

It needs no look at all workers and does not herd: of those with the least load not everyone picks the same. Source: M.
Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvscout_scheduler.candidates import Candidates


class PowerOfTwo:
    """The better of two."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.active_requests

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        if len(costs) == 1:
            return 0
        first, second = rng.sample(range(len(costs)), 2)
        return second if costs[second] < costs[first] else first

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        """Each of the n(n−1)/2 pairs is equally likely; a tie goes to either."""
        n = len(costs)
        if n == 1:
            return [1.0]
        wins = (
            sum(1.0 if cost < other else 0.5 if cost == other else 0.0 for at, other in enumerate(costs) if at != own)
            for own, cost in enumerate(costs)
        )
        return [won / (n * (n - 1) / 2) for won in wins]

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"{costs[index]:g} active requests, no more than the other of two drawn"
