"""`kv-logit`: cached share of the prompt against what the engines report of themselves.

::

    logit = 2 · overlap_tokens / isl − gpu_cache_usage − waiting / max_waiting          cost = −logit

`gpu_cache_usage` and `waiting` are the engine's own (pushed or scraped); usage that was never reported is that of the
booked blocks where `total_kv_blocks` is known, else 0, as is `waiting`. `max_waiting` is the largest of the candidates.
The highest logit wins, exact ties uniformly at random. Source: the first cost function of NVIDIA Dynamo's router.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.policies.least_cost import LeastCost


class KvLogit(LeastCost):
    """Highest logit."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        isl = candidates.request.isl_tokens
        waiting = [metrics.waiting_requests or 0 for metrics in candidates.metrics]
        most = max(waiting) or 1
        columns = zip(candidates.cached_tokens, candidates.kv_usage, waiting, strict=True)
        return [usage + queued / most - 2 * cached / isl for cached, usage, queued in columns]

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        cached = candidates.cached_tokens[index] / candidates.request.isl_tokens
        return (
            f"{cached:.0%} of the prompt cached, cache {candidates.kv_usage[index]:.0%} full, logit {-costs[index]:g}"
        )
