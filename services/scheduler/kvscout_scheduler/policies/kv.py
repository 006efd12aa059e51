"""`kv`: the worker with the least work to do, its own and this request's.

::

    cost = overlap_score_weight · prefill_blocks + decode_blocks        (all of it: kvscout_scheduler.cost)

At temperature 0 the least cost wins, exact ties uniformly at random; above, softmax over range-normalised costs.

Worked example, weight 1, blocks of 16 tokens, a prompt of 160 tokens = 10 blocks, all workers otherwise idle: w0 has
2 of its blocks cached, w1 has 5 and 30 active blocks of others, w2 has none. Prefill blocks are 8, 5, 10, decode
blocks 10, 40, 10; costs 18, 45, 20: w0 wins.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.policies.least_cost import LeastCost


class Kv(LeastCost):
    """Least cost of prefill and decode blocks."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.kv_costs

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        return (
            f"{candidates.prefill_blocks[index]:g} prefill and {candidates.decode_blocks[index]:g} decode blocks, "
            f"cost {costs[index]:g}"
        )
