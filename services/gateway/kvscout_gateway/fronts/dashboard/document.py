"""Documents of the page, as JSON: state, last decisions, findings of doctor. Pure.

Whatever comes from outside (names of workers and models, what engines say) is text here and on the page: cut, with
nothing invisible in it, and never markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.doctor.diagnosis import Finding
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import Overview, SourceRow, overview, seen_by_gateways
from kvscout_common.doctor.shadow import Shadow, sentences, shadow_of
from kvscout_common.doctor.snapshot import RankName, WorkerName
from kvscout_common.doctor.worker_health import health_of, load_healths, worst
from kvscout_common.enum_words import word_of
from kvscout_common.plain_text import printable
from kvscout_common.registry.worker_proto import role_from_proto
from kvscout_gateway.request.failures import Failure

MAX_WORKERS: Final = 1_000
"""Worker ranks that are shown, those in trouble first; of more, the number."""
MAX_SERVICES: Final = 200
MAX_SHADOW_HOURS: Final = 48
MAX_CANDIDATES: Final = 12
"""Candidates of a decision that are shown: the chosen one, and the cheapest of the others."""
_DEAR: Final = float("inf")


def state(now: Moment, before: Moment | None, decisions: Iterable[scheduler_pb2.WatchDecisionsResponse]) -> Any:
    """Return what is known now.

    Args:
        now: What is known.
        before: What was known a moment ago; None = rates are not known.
        decisions: The last ones, the newest first.
    """
    shown = overview(now.snapshot)
    workers = _workers(now, shown)
    in_trouble = sum(not (one["well"] and not one["problem"]) for one in workers)
    return {
        "totals": {
            "requests": now.requests,
            "rate": now.requests_per_second(before),
            "in_flight": now.in_flight,
            "failures": now.failures,
            "failed": dict(shown.failed),
            "answered": shown.answered,
            "queued": now.queued,
            "hit": now.hit_rate(None),
            "trouble": in_trouble + sum(not row.well for row in shown.services) + len(shown.troubles),
        },
        "troubles": [printable(one, 500) for one in shown.troubles],
        "services": [
            {
                "kind": row.kind or "service",
                "address": printable(row.address),
                "version": printable(row.version),
                "uptime": _number(row.uptime_seconds),
                "state": printable(row.state, 500),
                "well": row.well,
                "warnings": [printable(one, 500) for one in row.warnings[:20]],
            }
            for row in shown.services[:MAX_SERVICES]
        ],
        "workers": workers[:MAX_WORKERS],
        "more_workers": max(0, len(workers) - MAX_WORKERS),
        "decisions": [_decision(one) for one in decisions],
        "shadow": _shadow(shadow_of(now.snapshot)),
    }


def failures(failed: Iterable[Failure], answered: Iterable[Failure]) -> Any:
    """Return the last failures.

    Args:
        failed: Requests that failed, the newest first.
        answered: Those that were answered all the same, the newest first.
    """
    return {"failed": [_failure(one) for one in failed], "answered": [_failure(one) for one in answered]}


def _failure(one: Failure) -> dict[str, Any]:
    return {
        "number": one.number,
        "at": one.at,
        "request": one.asked.request_id,
        "tenant": one.asked.tenant,
        "model": one.asked.model,
        "front": one.asked.front,
        "status": one.status,
        "cause": one.kind.cause.value,
        "owner": one.owner.value,
        "workers": list(one.worker_ids),
        "message": one.detail,
        "trace": one.trace_id,
    }


def findings(found: Sequence[Finding]) -> Any:
    """Return what doctor says."""
    return [
        {
            "id": one.id,
            "severity": one.severity.value,
            "what": one.what,
            "evidence": list(one.evidence),
            "remedy": one.remedy,
        }
        for one in found
    ]


def _shadow(shadow: Shadow) -> Any:
    """Return the shadow reports; None where no gateway shadows."""
    if not shadow.balancers:
        return None
    return {
        "summary": " ".join(sentences(shadow)),
        "hours": [
            {
                "begin": row.begin_unix_seconds,
                "tenant": printable(row.tenant),
                "model": printable(row.model),
                "requests": row.requests,
                "compared": row.compared,
                "actual": row.hit_rate,
                "policy": row.policy_hit_rate,
                "same": row.same_share,
            }
            for row in shadow.hours[:MAX_SHADOW_HOURS]
        ],
    }


def _workers(now: Moment, shown: Overview) -> list[dict[str, Any]]:
    seen, specs = seen_by_gateways(now.snapshot), now.snapshot.workers
    by_rank: dict[RankName, list[SourceRow]] = {}
    for row in shown.sources:
        by_rank.setdefault(RankName(row.tenant, row.worker_id, row.dp_rank), []).append(row)
    found = []
    for name, rows in by_rank.items():
        load, one, worker = now.loads.get(name), seen.get(name), specs.get(WorkerName(name.tenant, name.worker_id))
        health = rows[0].health
        if load is not None:
            health = worst(health, *map(health_of, load_healths(load)))
        found.append(
            {
                "tenant": printable(name.tenant),
                "worker": printable(name.worker_id, 300),
                "rank": name.dp_rank,
                "model": printable(rows[0].model, 300),
                "role": role_from_proto(worker.role).value if worker is not None else "",
                "endpoint": printable(worker.http_endpoint, 300) if worker is not None else "",
                "cached": max(row.blocks for row in rows),
                "requests": one.requests if one is not None else 0,
                "failures": one.failures if one is not None else 0,
                "hit": one.cached_tokens / one.prompt_tokens if one is not None and one.prompt_tokens else None,
                "error": rows[0].prediction_error,
                "load": _load(load) if load is not None else None,
                "well": all(row.well for row in rows),
                "state": health.state,
                "cause": printable(health.cause, 500),
                "since": _number(health.age_seconds),
                "gateway": printable(health.gateway),
                "problem": "" if health.well else printable(health.why, 500),
                "events": [
                    {
                        "indexer": printable(row.indexer),
                        "state": printable(row.state),
                        "reason": printable(row.reason, 500),
                        "well": row.well,
                        "age": _number(row.last_event_age_seconds),
                    }
                    for row in rows
                ],
            }
        )
    if len(found) > MAX_WORKERS:
        found.sort(key=lambda row: (row["well"], not row["problem"]))
    return found


def _load(load: scheduler_pb2.WorkerLoad) -> dict[str, Any]:
    return {
        "requests": load.active_requests,
        "prefill": load.active_prefill_tokens,
        "decode": load.active_decode_blocks,
        "blocks": load.total_kv_blocks,
        "busy": load.busy,
        "draining": load.draining,
        "cooldown": _number(load.cooldown_seconds),
    }


def _decision(event: scheduler_pb2.WatchDecisionsResponse) -> dict[str, Any]:
    request, decision = event.request, event.decision
    found: dict[str, Any] = {
        "id": f"{event.decided_unix_seconds}/{request.request_id}/{request.attempt_id}",
        "at": _number(event.decided_unix_seconds),
        "request": printable(request.request_id),
        "tenant": printable(request.tenant),
        "model": printable(request.model),
        "tokens": event.isl_tokens,
        "error": printable(event.message, 500) if event.code else "",
    }
    if event.code:
        return found
    why = decision.explanation
    chosen = (decision.worker.worker_id, decision.worker.dp_rank)
    ranked = sorted(why.candidates, key=lambda one: (_rank(one) != chosen, one.cost if one.eligible else _DEAR))
    return found | {
        "worker": _name(decision.worker),
        "overlap": decision.overlap_blocks,
        "blocks": event.isl_tokens // decision.block_size if decision.block_size else 0,
        "uncached": decision.uncached_tokens,
        "cost": _number(decision.cost),
        "policy": printable(why.policy),
        "reason": printable(why.reason, 500),
        "candidates": [_candidate(one, chosen) for one in ranked[:MAX_CANDIDATES]],
        "more_candidates": max(0, len(ranked) - MAX_CANDIDATES),
    }


def _candidate(one: scheduler_pb2.Candidate, chosen: tuple[str, int]) -> dict[str, Any]:
    return {
        "worker": _name(one.worker),
        "chosen": _rank(one) == chosen,
        "why_not": "" if one.eligible else word_of(scheduler_pb2.IneligibleReason, one.ineligible_reason),
        "device": one.device_blocks,
        # Those of a slower tier are shown together with those of the faster ones.
        "slower": max(0, max(one.host_blocks, one.disk_blocks, one.external_blocks) - one.device_blocks),
        "prefill": _number(one.prefill_blocks),
        "decode": _number(one.decode_blocks),
        "cost": _number(one.cost),
    }


def _number(value: float | None) -> float | None:
    """Return a number as JSON has it; None for infinity and NaN."""
    return value if value is not None and math.isfinite(value) else None


def _rank(one: scheduler_pb2.Candidate) -> tuple[str, int]:
    return one.worker.worker_id, one.worker.dp_rank


def _name(worker: types_pb2.WorkerRank) -> str:
    return printable(f"{worker.worker_id}/{worker.dp_rank}", 300)
