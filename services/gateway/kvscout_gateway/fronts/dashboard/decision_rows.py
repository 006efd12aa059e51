"""Decisions as the page shows them: what was cached, what others had, and why they were not chosen. Pure."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.enum_words import word_of
from kvscout_common.plain_text import printable
from kvscout_gateway.fronts.dashboard.numbers import finite, rounded

MAX_CANDIDATES: Final = 12
"""Candidates of a decision that are shown: the chosen one, and the cheapest of the others."""
_DEAR: Final = float("inf")


class _Unit(NamedTuple):
    name: str
    per_cost: float


_UNITS: Final = {"kv-time": _Unit("ms", 1000.0), "kv": _Unit("blocks", 1.0)}
"""Units in which costs are shown, by policy; those of other policies have none."""
_NO_UNIT: Final = _Unit("", 1.0)


def decision_row(event: scheduler_pb2.WatchDecisionsResponse) -> dict[str, Any]:
    """Return a decision, or why there was none."""
    request, decision = event.request, event.decision
    row: dict[str, Any] = {
        "id": f"{event.decided_unix_seconds}/{request.request_id}/{request.attempt_id}",
        "at": finite(event.decided_unix_seconds),
        "request": printable(request.request_id),
        "model": printable(request.model),
        "tokens": event.isl_tokens,
        "error": printable(event.message, 500) if event.code else "",
    }
    if event.code:
        return row
    why, chosen = decision.explanation, _rank(decision.worker)
    ranked = sorted(why.candidates, key=lambda one: (_rank(one.worker) != chosen, one.cost if one.eligible else _DEAR))
    richest = max(why.candidates, key=reach, default=None)
    unit = _UNITS.get(why.policy, _NO_UNIT)
    blocks = event.isl_tokens // decision.block_size if decision.block_size else 0
    return row | {
        "worker": _name(decision.worker),
        "overlap": decision.overlap_blocks,
        "best": max(decision.overlap_blocks, reach(richest) if richest is not None else 0),
        "blocks": blocks,
        "uncached": decision.uncached_tokens,
        "policy": printable(why.policy),
        "unit": unit.name,
        "reason": printable(why.summary or why.reason, 1_000),
        "not_richest": _why_not(richest, ranked[0], decision, unit) if richest is not None else "",
        "candidates": [_candidate(one, chosen, unit) for one in ranked[:MAX_CANDIDATES]],
        "more_candidates": max(0, len(ranked) - MAX_CANDIDATES),
    }


def reach(one: scheduler_pb2.Candidate) -> int:
    """Return how many leading blocks of the prompt a candidate has, on whatever tier."""
    return max(one.device_blocks, one.host_blocks, one.disk_blocks, one.external_blocks)


def _why_not(
    richest: scheduler_pb2.Candidate,
    chosen: scheduler_pb2.Candidate,
    decision: scheduler_pb2.SelectResponse,
    unit: _Unit,
) -> str:
    """Return why the worker that has most of the prompt was not chosen; "" = it was, or has no more than that one."""
    more = reach(richest) - decision.overlap_blocks
    if more <= 0 or _rank(richest.worker) == _rank(decision.worker):
        return ""
    begin = f"{_name(richest.worker)} has {more} {'block' if more == 1 else 'blocks'} more"
    if not richest.eligible:
        return f"{begin}, but is {word_of(scheduler_pb2.IneligibleReason, richest.ineligible_reason)}"
    dearer = unit.per_cost * (richest.cost - chosen.cost)
    if finite(dearer) is None or dearer <= 0:
        return f"{begin}, but was not drawn"
    return f"{begin}, but costs {rounded(dearer)} {unit.name}".rstrip() + " more"


def _candidate(one: scheduler_pb2.Candidate, chosen: tuple[str, int], unit: _Unit) -> dict[str, Any]:
    return {
        "worker": _name(one.worker),
        "chosen": _rank(one.worker) == chosen,
        "why_not": "" if one.eligible else word_of(scheduler_pb2.IneligibleReason, one.ineligible_reason),
        "device": one.device_blocks,
        # Those of a slower tier are shown together with those of the faster ones.
        "slower": reach(one) - one.device_blocks,
        "prefill": finite(one.prefill_blocks),
        "decode": finite(one.decode_blocks),
        "cost": finite(unit.per_cost * one.cost),
    }


def _rank(worker: types_pb2.WorkerRank) -> tuple[str, int]:
    return worker.worker_id, worker.dp_rank


def _name(worker: types_pb2.WorkerRank) -> str:
    return printable(f"{worker.worker_id}/{worker.dp_rank}", 300)
