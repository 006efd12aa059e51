"""Requests of this gateway in the last hour, in spans of ten seconds. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from kvscout_gateway.values.tally import quantile

SPAN_SECONDS: Final = 10.0
KEPT: Final = 360
"""Spans: one hour."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters since start, at one time."""

    at: float
    """Seconds since the Unix epoch."""
    requests: int
    failed: int
    """Requests that failed by an engine's or the router's fault."""
    mistaken: int
    """Requests that failed by their callers'."""
    prompt_tokens: int
    """Prompt tokens of requests whose engine reports cached tokens."""
    cached_tokens: int
    ttft: tuple[int, ...]
    """Counts of a `Tally`."""
    itl: tuple[int, ...]


class History:
    """The spans, the oldest first."""

    def __init__(self, begin: Totals) -> None:
        self._last = begin
        self.points: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def add(self, now: Totals) -> None:
        """End a span."""
        self.points.append(point(self._last, now))
        self._last = now

    def unfinished(self, now: Totals) -> dict[str, Any]:
        """Return the span that runs, until now."""
        return point(self._last, now)


def point(before: Totals, after: Totals) -> dict[str, Any]:
    """Return what the page shows of one span; None where nothing was counted."""
    seconds = max(1e-3, after.at - before.at)
    prompt = after.prompt_tokens - before.prompt_tokens
    ttft = [new - old for new, old in zip(after.ttft, before.ttft, strict=True)]
    itl = [new - old for new, old in zip(after.itl, before.itl, strict=True)]
    return {
        "at": round(after.at, 1),
        "seconds": round(seconds, 1),
        "rate": round((after.requests - before.requests) / seconds, 3),
        "failed": after.failed - before.failed,
        "mistaken": after.mistaken - before.mistaken,
        "hit": round((after.cached_tokens - before.cached_tokens) / prompt, 4) if prompt > 0 else None,
        "ttft": [_milliseconds(ttft, 0.5), _milliseconds(ttft, 0.95)],
        "itl": [_milliseconds(itl, 0.5), _milliseconds(itl, 0.95)],
    }


def _milliseconds(counts: list[int], share: float) -> float | None:
    seconds = quantile(counts, share)
    return round(1000 * seconds, 3) if seconds is not None else None
