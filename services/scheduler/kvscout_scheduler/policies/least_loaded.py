"""`least-loaded`: the worker with the fewest active requests, ties uniformly at random; caches do not matter.

::

    cost = active requests

Worked example: workers with 3, 1 and 1 active requests; the second and the third are each chosen half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.choose import choose


class LeastLoaded:
    """Fewest active requests."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.active_requests

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        return choose(costs, 0.0, rng)

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"fewest active requests: {costs[index]:g}"
