"""What policies share that reduce a worker to one number: the least wins, or a softmax draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random

from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.choose import choose, probabilities


class LeastCost(ABC):
    """At temperature 0 the least cost, exact ties uniformly at random; above, softmax over range-normalised costs."""

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        return choose(costs, candidates.settings.router_temperature, rng)

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        temperature = candidates.settings.router_temperature
        return probabilities(costs, temperature) if temperature > 0 else [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        what = self.describe(candidates, costs, index)
        if candidates.settings.router_temperature > 0:
            return f"drawn at temperature {candidates.settings.router_temperature:g}: {what}"
        ties = costs.count(costs[index])
        return f"least cost: {what}" if ties == 1 else f"drawn among {ties} workers of equal least cost: {what}"

    @abstractmethod
    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """What a candidate's cost is made of."""
