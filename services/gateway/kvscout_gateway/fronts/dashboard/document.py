"""Documents of the page, as JSON: state and findings of doctor. Pure.

Whatever comes from outside (names of workers and models, what engines say) is text here and on the page: cut, with
nothing invisible in it, and never markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvscout.v1 import scheduler_pb2
from kvscout_common.doctor.diagnosis import Finding
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.overview import overview
from kvscout_common.doctor.shadow import Shadow, sentences, shadow_of
from kvscout_common.plain_text import printable
from kvscout_gateway.fronts.dashboard.decision_rows import decision_row
from kvscout_gateway.fronts.dashboard.numbers import finite
from kvscout_gateway.fronts.dashboard.savings import savings
from kvscout_gateway.fronts.dashboard.worker_rows import worker_table
from kvscout_gateway.request.failures import Failure

MAX_SERVICES: Final = 200
MAX_SHADOW_HOURS: Final = 48


def state(now: Moment, before: Moment | None, decisions: Iterable[scheduler_pb2.WatchDecisionsResponse]) -> Any:
    """Return what is known now.

    Args:
        now: What is known.
        before: What was known a moment ago; None = rates are not known.
        decisions: The last ones, the newest first.
    """
    shown = overview(now.snapshot)
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
            **savings(now),
        },
        "troubles": [printable(one, 500) for one in shown.troubles],
        "services": [
            {
                "kind": row.kind or "service",
                "address": printable(row.address),
                "version": printable(row.version),
                "uptime": finite(row.uptime_seconds),
                "state": printable(row.state, 500),
                "well": row.well,
                "warnings": [printable(one, 500) for one in row.warnings[:20]],
            }
            for row in shown.services[:MAX_SERVICES]
        ],
        "workers": worker_table(now, shown),
        "decisions": [decision_row(one) for one in decisions],
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
