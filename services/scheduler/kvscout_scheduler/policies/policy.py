"""What a policy is: it says what each candidate costs, and picks one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random

from kvscout_scheduler.costs.choose import choose, probabilities
from kvscout_scheduler.policies.candidates import Candidates


class Policy(ABC):
    """Picks one of the candidates; not asked who may be one. A subclass says what a candidate costs, the rest is here.

    At temperature 0 the least cost wins, exact ties uniformly at random; above, softmax over range-normalised costs.

    Every pool has an instance of its own, which may keep state and must not block. One that has methods of
    `facts.Observer` is told by them what becomes of requests, so that it can learn how fast workers are.
    """

    @abstractmethod
    def costs(self, candidates: Candidates) -> Sequence[float]:
        """What it minimises, one value a candidate, none NaN; changes nothing."""

    def temperature(self, candidates: Candidates) -> float:
        """Of its draws; 0 where a policy knows none."""
        return candidates.settings.router_temperature

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        """Index of the candidate it picks.

        Args:
            candidates: At least one.
            costs: What `costs` said of them.
            rng: The only source of chance.
        """
        return choose(costs, self.temperature(candidates), rng)

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        """Probability of each candidate, where a temperature is used; else all 0."""
        temperature = self.temperature(candidates)
        return probabilities(costs, temperature) if temperature > 0 else [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """Why it picked this one, in one sentence."""
        what, temperature = self.describe(candidates, costs, index), self.temperature(candidates)
        if temperature > 0:
            return f"drawn at temperature {temperature:g}: {what}"
        ties = costs.count(costs[index])
        return f"least cost: {what}" if ties == 1 else f"drawn among {ties} workers of equal least cost: {what}"

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        """What a candidate's cost is made of."""
        return f"cost {costs[index]:g}"
