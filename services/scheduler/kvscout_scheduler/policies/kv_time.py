"""`kv-time`: the worker on which a request costs the least time, its own and that of others; see `time_cost`."""

from __future__ import annotations

from collections.abc import Sequence

from kvscout_scheduler.costs.time_cost import ahead_of, crowding_of, decode_of, fewest_waiting, own_of
from kvscout_scheduler.costs.words import SECONDS, milliseconds
from kvscout_scheduler.policies.policy import Candidates, Formula, Policy


class KvTime(Policy):
    """The formula is that of `time_cost`, what it takes is learned by `learned_times`."""

    formula = Formula.SECONDS
    unit = SECONDS

    def costs(self, candidates: Candidates) -> Sequence[float]:
        return candidates.seconds(candidates.time_cost_inputs())

    def describe(self, candidates: Candidates, costs: Sequence[float], index: int) -> str:
        isl, now, question = candidates.request.isl_tokens, candidates.now, candidates.time_cost_inputs()
        rows = [question.row(slot) for slot in candidates.slots]
        row = rows[index]
        cached = candidates.cached_tokens[index]
        evicts = " and of what it evicts" if isl - cached > row.room and question.empty + row.reuse else ""
        ahead, own = ahead_of(row, now), own_of(row, question, isl, cached)
        times = crowding_of(row, now) + fewest_waiting(rows)
        return (
            f"{milliseconds(ahead)} of prompts ahead, {milliseconds(own)} of its own{evicts} that count {times:.3g} "
            f"times, {milliseconds(decode_of(row, question, isl))} for decoding beside others, "
            f"cost {milliseconds(costs[index])}"
        )
