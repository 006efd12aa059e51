"""`fewest-tokens`: the worker that has the fewest prompt tokens to compute, whatever it generates meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from kvscout_scheduler.policies import Candidates, Policy


class FewestTokens(Policy):
    """Least prefill work."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.prefill_tokens

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return f"{costs[index]:g} prompt tokens to compute"
