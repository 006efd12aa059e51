"""Requests as the page draws them: the steps of each attempt, in seconds since the request came. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvscout_common.plain_text import printable
from kvscout_gateway.request.recent import RecentRequests, Step, Timeline

SHOWN: Final = 16


def timelines(recent: RecentRequests) -> dict[str, Any]:
    """Return the last requests and the slowest ones."""
    last = list(recent.last)[: -SHOWN - 1 : -1]
    return {"last": [_timeline(one) for one in last], "slowest": [_timeline(one) for one in recent.slowest()[:SHOWN]]}


def _timeline(one: Timeline) -> dict[str, Any]:
    return {
        "at": round(one.at, 3),
        "request": printable(one.request_id),
        "model": printable(one.model),
        "outcome": printable(one.outcome),
        "seconds": round(one.seconds, 6),
        "ttft": round(one.ttft_seconds, 6),
        "attempts": [_attempt(step) for step in one.attempts],
    }


def _attempt(step: Step) -> dict[str, Any]:
    first = step.first_output or step.end
    ends = (step.begin, step.looked_up, step.placed, first, step.end)
    return {
        "worker": printable(f"{step.worker.worker_id}/{step.worker.dp_rank}", 300),
        # Each step begins where the one before it ends.
        "ends": [round(max(0.0, each), 6) for each in ends],
        "prompt": step.prompt_tokens,
        "cached": step.cached_tokens,
        "output": step.output_tokens,
    }
