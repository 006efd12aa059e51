"""`lmetric`: the prefill work in front of a request times the requests it shares the engine with.

::

    cost = prefill_blocks · (active_requests + 1)

`prefill_blocks` are the uncached blocks of the active requests and of this one. A product needs no weight between the
two: whatever the scale of either, doubling one counts as much as doubling the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.policies.least_cost import LeastCost


class LMetric(LeastCost):
    """Least product of prefill blocks and requests."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        columns = zip(candidates.prefill_blocks, candidates.active_requests, strict=True)
        return [blocks * (requests + 1) for blocks, requests in columns]

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        blocks, requests = candidates.prefill_blocks[index], candidates.active_requests[index]
        return f"{blocks:g} prefill blocks times {requests + 1} requests, cost {costs[index]:g}"
