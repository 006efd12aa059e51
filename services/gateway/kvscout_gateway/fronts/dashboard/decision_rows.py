"""Decisions as the page shows them: what was cached, what others had, and why this worker. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.enum_words import word_of
from kvscout_common.plain_text import printable
from kvscout_gateway.fronts.dashboard.numbers import finite

MAX_CANDIDATES: Final = 12
"""Candidates of a decision that are shown: the chosen one, and the cheapest of the others."""
_DEAR: Final = float("inf")


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
    blocks = event.isl_tokens // decision.block_size if decision.block_size else 0
    return row | {
        "worker": _name(decision.worker),
        "overlap": decision.overlap_blocks,
        "best": max(decision.overlap_blocks, *map(reach, why.candidates), 0),
        "blocks": blocks,
        "uncached": decision.uncached_tokens,
        "policy": printable(why.policy),
        "summary": _without_name(printable(why.summary or why.reason, 1_000), decision.worker.worker_id),
        "reason": printable(why.reason, 500) if why.summary else "",
        "candidates": [_candidate(one, chosen) for one in ranked[:MAX_CANDIDATES]],
        "more_candidates": max(0, len(ranked) - MAX_CANDIDATES),
    }


def reach(one: scheduler_pb2.Candidate) -> int:
    """Return how many leading blocks of the prompt a candidate has, on whatever tier."""
    return max(one.device_blocks, one.host_blocks, one.disk_blocks, one.external_blocks)


def _without_name(summary: str, worker_id: str) -> str:
    """Return a sentence without the name of the worker, which stands beside it."""
    name, colon, rest = summary.partition(": ")
    return rest if colon and name.startswith(printable(worker_id, 300)) else summary


def _candidate(one: scheduler_pb2.Candidate, chosen: tuple[str, int]) -> dict[str, Any]:
    return {
        "worker": _name(one.worker),
        "chosen": _rank(one.worker) == chosen,
        "why_not": "" if one.eligible else word_of(scheduler_pb2.IneligibleReason, one.ineligible_reason),
        "device": one.device_blocks,
        # Those of a slower tier are shown together with those of the faster ones.
        "slower": reach(one) - one.device_blocks,
        "prefill": finite(one.prefill_blocks),
        "decode": finite(one.decode_blocks),
        "cost": printable(one.cost_text) or finite(one.cost),
    }


def _rank(worker: types_pb2.WorkerRank) -> tuple[str, int]:
    return worker.worker_id, worker.dp_rank


def _name(worker: types_pb2.WorkerRank) -> str:
    return printable(f"{worker.worker_id}/{worker.dp_rank}", 300)
