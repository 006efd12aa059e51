"""`fewest-tokens`: the worker that has the fewest prompt tokens to compute, whatever it generates meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvscout_scheduler.candidates import Candidates


class FewestTokens:
    """Least prefill work; the first of equals, so that idle workers fill up one after the other."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.prefill_tokens

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        return costs.index(min(costs))

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"fewest prompt tokens to compute: {costs[index]:g}"
