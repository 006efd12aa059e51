"""What `kvscout load` has measured: in the last seconds, and in total. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from rich.table import Table

from kvscout_cli.tables import columns
from kvscout_lab.real_time.record import RequestRecord
from kvscout_lab.statistics import percentile

WINDOW_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests of some time."""

    requests: int
    errors: int
    requests_per_second: float
    ttft_mean_seconds: float | None
    """From when a request was due; None = no token came."""
    ttft_p99_seconds: float | None
    hit_rate: float | None
    """Cached ÷ prompt tokens of requests whose engine reported them; None = none did."""
    output_tokens: int


class Measurements:
    """Records as they come."""

    def __init__(self) -> None:
        self._records: list[RequestRecord] = []
        self._recent: deque[RequestRecord] = deque()
        self.errors: dict[str, int] = {}
        """How often each text came, without what differs from request to request."""

    def add(self, record: RequestRecord) -> None:
        """Take in one more finished request; quick."""
        self._records.append(record)
        self._recent.append(record)
        if record.error:
            text = record.error[:200]
            if text in self.errors or len(self.errors) < 100:
                self.errors[text] = self.errors.get(text, 0) + 1

    def recent(self, now: float) -> Measured:
        """Return what ended in the last seconds; `now` in seconds from the start."""
        while self._recent and self._recent[0].finished < now - WINDOW_SECONDS:
            self._recent.popleft()
        return measured(tuple(self._recent), min(now, WINDOW_SECONDS))

    def all(self, now: float) -> Measured:
        """Return what ended since the start."""
        return measured(self._records, now)


def measured(records: Sequence[RequestRecord], seconds: float) -> Measured:
    """Return the sums of records that ended within some seconds."""
    ttfts = sorted(record.ttft_seconds for record in records if record.ttft_seconds is not None)
    reported = [record for record in records if record.cached_tokens is not None]
    prompt = sum(record.prompt_tokens for record in reported)
    return Measured(
        requests=len(records),
        errors=sum(bool(record.error) for record in records),
        requests_per_second=len(records) / seconds if seconds > 0 else 0.0,
        ttft_mean_seconds=fmean(ttfts) if ttfts else None,
        ttft_p99_seconds=percentile(ttfts, 99),
        hit_rate=sum(record.cached_tokens or 0 for record in reported) / prompt if prompt else None,
        output_tokens=sum(record.output_tokens for record in records),
    )


def table(measurements: Measurements, now: float) -> Table:
    """Return the live table."""
    names = ("requests", "req/s", "TTFT mean", "TTFT p99", "hit rate", "output tokens", "errors")
    shown = columns(f"{now:.0f} s", *names, right=names)
    for label, one in (("last 10 s", measurements.recent(now)), ("total", measurements.all(now))):
        shown.add_row(
            *(label, f"{one.requests:,}", f"{one.requests_per_second:.1f}"),
            *(_milliseconds(one.ttft_mean_seconds), _milliseconds(one.ttft_p99_seconds)),
            "–" if one.hit_rate is None else f"{100 * one.hit_rate:.0f} %",
            *(f"{one.output_tokens:,}", f"{one.errors:,}"),
        )
    return shown


def line(measurements: Measurements, now: float) -> str:
    """Return the same of the last seconds as one line."""
    one = measurements.recent(now)
    hit = "–" if one.hit_rate is None else f"{100 * one.hit_rate:.0f} %"
    ttft = f"TTFT {_milliseconds(one.ttft_mean_seconds)} (p99 {_milliseconds(one.ttft_p99_seconds)})"
    return f"{now:.0f} s: {one.requests_per_second:.1f} req/s, {ttft}, hit rate {hit}, {one.errors} errors"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:,.0f} ms"
