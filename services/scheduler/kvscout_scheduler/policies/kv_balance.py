"""`kv-balance`: cached prefixes while the loads are even, even loads while they are not.

::

    load(w) = kv_active / kv_total
    α       = 0.7 if std(load) > 0.1 · mean(load) else 0.3
    cost(w) = α · (load(w) − mean(load)) + (1 − α) · uncached(w) / isl + 0.1 · active_slots / total_slots

`load` is the higher of what is booked and what the engine reports; it is 0 where neither is known. Workers whose slots
are all taken are skipped; a worker that did not register `total_slots` has no such term. A booking counts as an active
slot at once. Mean and std are over the candidates that are not full.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random
from statistics import fmean, pstdev

from kvscout_common.errors import ResourceExhausted
from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.policies.least_cost import LeastCost

UNEVEN = 0.1
"""Loads are uneven when their standard deviation is above this share of their mean."""
ALPHA_UNEVEN = 0.7
ALPHA_EVEN = 0.3
SLOT_WEIGHT = 0.1


class KvBalance(LeastCost):
    """Least of imbalance, uncached share and taken slots."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        isl, loads = candidates.request.isl_tokens, candidates.kv_usage
        slots = [
            active / spec.total_slots if spec.total_slots else 0.0
            for active, spec in zip(candidates.active_requests, candidates.specs, strict=True)
        ]
        open_loads = [load for load, taken in zip(loads, slots, strict=True) if taken < 1]
        if not open_loads:
            return [inf] * len(loads)
        mean = fmean(open_loads)
        alpha = ALPHA_UNEVEN if pstdev(open_loads, mean) > UNEVEN * mean else ALPHA_EVEN
        columns = zip(loads, candidates.cached_tokens, slots, strict=True)
        return [
            alpha * (load - mean) + (1 - alpha) * max(0.0, 1 - cached / isl) + SLOT_WEIGHT * taken if taken < 1 else inf
            for load, cached, taken in columns
        ]

    def pick(self, candidates: Candidates, costs: Sequence[float], rng: Random) -> int:
        if min(costs) == inf:
            raise ResourceExhausted(f"all slots of {len(costs)} workers that could take the request are taken")
        return super().pick(candidates, costs, rng)

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        cached = candidates.cached_tokens[index] / candidates.request.isl_tokens
        return f"{cached:.0%} of the prompt cached, KV load {candidates.kv_usage[index]:.0%}, cost {costs[index]:g}"
