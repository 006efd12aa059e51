"""`direct`: the worker that the request names; the caller has decided.

::

    cost = active requests, among the ranks of the pinned worker

A request that pins no worker is refused. If it pins no rank either, the rank with the fewest active requests takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvscout_common.errors import InvalidArgument
from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.choose import choose


class Direct:
    """The pinned worker."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.active_requests

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        if not candidates.request.pinned_worker_id:
            raise InvalidArgument("policy direct takes no request without it", field="pinned_worker_id")
        return choose(costs, 0.0, rng)

    def probabilities(self, candidates: Candidates, costs: Sequence[float]) -> Sequence[float]:
        return [0.0] * len(costs)

    def reason(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return "the request names it"
