"""One draw from costs: the cheapest, or a softmax over range-normalised costs.

Source: temperature scaling as in Dynamo's `softmax_sample`, normalised by the range so that a temperature means the
same at any load: p ∝ exp(-(c - cmin) / ((cmax - cmin) · T)). Where one cost is far beyond all others (a worker that
hangs), the range would be all its, and the others as good as equal: cmax is the largest cost that is no outlier. An
outlier is more than `OUTLIER` times as far from cmin as the median of the costs above cmin (the lower one of two).
Neither the unit of the costs nor where their zero is makes a difference.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from random import Random
from typing import Final, TypeGuard

OUTLIER: Final = 10.0
"""Times the median distance from the least cost: what is beyond does not count to the range. Of costs whose distances
are distributed exponentially it is one in a thousand."""


class RankedCosts(Sequence[float], ABC):
    """Costs that find the least of them, and draw, by themselves."""

    @abstractmethod
    def least(self) -> Sequence[int]:
        """Return the indexes of the least cost, ascending."""

    @abstractmethod
    def draw(self, temperature: float, uniform: float) -> int:
        """Return the index of the cost that a number in 0 .. 1 draws at a temperature above 0."""


def is_ranked(costs: Sequence[float]) -> TypeGuard[RankedCosts]:
    """Return whether costs find their least by themselves; what `isinstance` says, in a fifth of the time."""
    return hasattr(costs, "least")


def choose(
    costs: Sequence[float], temperature: float, rng: Random, prefers: Callable[[int], bool] | None = None
) -> int:
    """Return the index of the chosen cost.

    Args:
        costs: At least one, none NaN. An infinite cost is chosen only if all are infinite.
        temperature: 0 = the minimum, exact ties uniformly at random; above, softmax.
        rng: Where the draw comes from; not used when there is nothing to draw.
        prefers: Tells which of several minima is taken, by its index; None, or none of them = any.
    """
    if temperature > 0:
        if is_ranked(costs):
            return costs.draw(temperature, rng.random())
        weights = probabilities(costs, temperature)
        return rng.choices(range(len(weights)), weights)[0]
    ties = costs.least() if is_ranked(costs) else least_of(costs)
    if len(ties) == 1:
        return ties[0]
    if prefers is not None and (preferred := next(filter(prefers, ties), None)) is not None:
        return preferred
    return ties[rng.randrange(len(ties))]


def least_of(costs: Sequence[float]) -> list[int]:
    """Return the indexes of the least cost, ascending."""
    least = min(costs)
    return [index for index, cost in enumerate(costs) if cost == least]


def probabilities(costs: Sequence[float], temperature: float) -> list[float]:
    """Return the probability of each cost being drawn at a temperature above 0; equal costs are equally likely.

    Args:
        costs: At least one, none NaN; any magnitude.
        temperature: Finite, above 0.
    """
    finite = [cost for cost in costs if math.isfinite(cost)]
    if not finite:
        return [1.0 / len(costs)] * len(costs)
    # Halved first: the range of two finite costs may be infinite, that of their halves is not.
    least = min(finite) / 2
    span = _span(sorted(further for cost in finite if (further := cost / 2 - least) > 0))
    weights = [
        (math.exp(-((cost / 2 - least) / span / temperature)) if span else 1.0) if math.isfinite(cost) else 0.0
        for cost in costs
    ]
    total = sum(weights)
    return [weight / total for weight in weights]


def _span(distances: list[float]) -> float:
    """Return the largest of some distances that is no outlier; 0 of none.

    Args:
        distances: Above 0, ascending.
    """
    if not distances:
        return 0.0
    return distances[bisect_right(distances, OUTLIER * distances[(len(distances) - 1) // 2]) - 1]
