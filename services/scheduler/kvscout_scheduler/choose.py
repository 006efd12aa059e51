"""One draw from costs: the cheapest, or a softmax over range-normalised costs.

Source: temperature scaling as in Dynamo's `softmax_sample`, normalised by the range so that a temperature means the
same at any load: p ∝ exp(-(c - cmin) / ((cmax - cmin) · T)).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random


class Ranked(Sequence[float], ABC):
    """Costs that find the least of them, and draw, by themselves."""

    @abstractmethod
    def least(self) -> Sequence[int]:
        """Indexes of the least cost, ascending."""

    @abstractmethod
    def draw(self, temperature: float, uniform: float) -> int:
        """Index of the cost that a number in 0 .. 1 draws at a temperature above 0."""


def choose(costs: Sequence[float], temperature: float, rng: Random) -> int:
    """Index of the chosen cost.

    Args:
        costs: At least one, none NaN. An infinite cost is chosen only if all are infinite.
        temperature: 0 = the minimum, exact ties uniformly at random; above, softmax.
        rng: Where the draw comes from; not asked when there is nothing to draw.
    """
    if temperature > 0:
        if isinstance(costs, Ranked):
            return costs.draw(temperature, rng.random())
        weights = probabilities(costs, temperature)
        return rng.choices(range(len(weights)), weights)[0]
    ties = costs.least() if isinstance(costs, Ranked) else least_of(costs)
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]


def least_of(costs: Sequence[float]) -> list[int]:
    """Indexes of the least cost, ascending."""
    least = min(costs)
    return [index for index, cost in enumerate(costs) if cost == least]


def probabilities(costs: Sequence[float], temperature: float) -> list[float]:
    """Probability of each cost being drawn at a temperature above 0; equal costs are equally likely.

    Args:
        costs: At least one, none NaN; any magnitude.
        temperature: Finite, above 0.
    """
    finite = [cost for cost in costs if math.isfinite(cost)]
    if not finite:
        return [1.0 / len(costs)] * len(costs)
    # Halved first: the range of two finite costs may be infinite, that of their halves is not.
    least, span = min(finite) / 2, max(finite) / 2 - min(finite) / 2
    weights = [
        (math.exp(-((cost / 2 - least) / span / temperature)) if span else 1.0) if math.isfinite(cost) else 0.0
        for cost in costs
    ]
    total = sum(weights)
    return [weight / total for weight in weights]
