"""Records → statistics → the comparison of two policies, pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kvscout_common.worker import WorkerRank
from kvscout_lab.real_time.record import Replay, RequestRecord
from kvscout_lab.statistics import percentile, variation


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of one policy on a workload. None: nothing to compute it from."""

    requests: int
    errors: int
    """Requests that failed, refused ones included."""
    delayed: int
    """Requests that waited for a place among the driver's outstanding ones."""
    refused: int
    """Requests the driver could not send."""
    abandoned_turns: int
    """Turns that were never due because an earlier one failed."""
    unreported: int
    """Served requests on workers that did not report cached tokens in the whole run; they are left out of the hit rate.
    Of one that did, a request without them had none: several engines leave a 0 out."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    token_hit_rate: float | None
    """Σ cached / Σ prompt tokens, both as the engines report them, over served requests."""
    ttft_mean_seconds: float | None
    """Time to first token, from when a request was due."""
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    itl_mean_seconds: float | None
    """Inter-token latency: Σ (last − first token) / Σ (tokens − 1), however tokens share messages."""
    itl_p99_seconds: float | None
    """99th percentile of the gaps between messages: what a reader of the stream sees."""
    request_balance: float | None
    """std / mean of served requests per worker rank; 0 = even."""
    compute_balance: float | None
    """std / mean of uncached prompt tokens + output tokens per worker rank: of the work actually done. Prompts
    whose cached tokens were not reported count in full."""
    send_lag_p99_seconds: float | None
    """Lateness of the driver in sending requests that had a place: large = the driver lacked CPU."""
    duration_seconds: float
    requests_per_second: float


def summarise(run: Replay, workers: Iterable[WorkerRank]) -> Summary:
    """Return the statistics of a run.

    Args:
        run: Records of the driver.
        workers: Every rank that could have been used: idle ones count in the balance.
    """
    served = [record for record in run.records if not record.error]
    reporting = {record.worker for record in served if record.cached_tokens is not None}
    reported = [record for record in served if record.cached_tokens is not None or record.worker in reporting]
    prompt_tokens = sum(record.prompt_tokens for record in reported)
    cached_tokens = sum(record.cached_tokens or 0 for record in reported)
    ttfts = sorted(record.ttft_seconds for record in served if record.ttft_seconds is not None)
    gaps = sorted(gap for record in served for gap in record.gaps_seconds)
    lags = sorted(record.sent - record.scheduled for record in run.records if not record.delayed and not record.refused)
    steps = sum(record.output_tokens - 1 for record in served)
    ranks = set(workers) | {record.worker for record in served if record.worker is not None}
    requests, compute = Counter(dict.fromkeys(ranks, 0)), Counter(dict.fromkeys(ranks, 0))
    for record in served:
        if record.worker is not None:
            requests[record.worker] += 1
            compute[record.worker] += record.prompt_tokens - (record.cached_tokens or 0) + record.output_tokens
    return Summary(
        requests=len(run.records),
        errors=len(run.records) - len(served),
        delayed=sum(record.delayed for record in run.records),
        refused=sum(record.refused for record in run.records),
        abandoned_turns=run.abandoned_turns,
        unreported=len(served) - len(reported),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=sum(record.output_tokens for record in served),
        token_hit_rate=cached_tokens / prompt_tokens if prompt_tokens else None,
        ttft_mean_seconds=statistics.fmean(ttfts) if ttfts else None,
        ttft_p50_seconds=percentile(ttfts, 50),
        ttft_p99_seconds=percentile(ttfts, 99),
        itl_mean_seconds=sum(gaps) / steps if steps else None,
        itl_p99_seconds=percentile(gaps, 99),
        request_balance=variation(list(requests.values())),
        compute_balance=variation(list(compute.values())),
        send_lag_p99_seconds=percentile(lags, 99),
        duration_seconds=run.duration_seconds,
        requests_per_second=len(served) / run.duration_seconds if run.duration_seconds else 0.0,
    )


class Row(NamedTuple):
    """One line of a comparison, as text."""

    label: str
    baseline: str
    candidate: str
    verdict: str
    """Comparison with the baseline: "2.7× better", "1.1× worse", or "" where that means nothing."""


_MEASURES: tuple[tuple[str, str, str, int], ...] = (
    # label, field, unit, +1: more is better, -1: less is, 0: neither
    ("requests", "requests", "count", 0),
    ("errors", "errors", "count", 0),
    ("token hit rate", "token_hit_rate", "%", 1),
    ("TTFT mean", "ttft_mean_seconds", "ms", -1),
    ("TTFT p50", "ttft_p50_seconds", "ms", -1),
    ("TTFT p99", "ttft_p99_seconds", "ms", -1),
    ("ITL mean", "itl_mean_seconds", "ms", -1),
    ("ITL p99", "itl_p99_seconds", "ms", -1),
    ("balance, requests (std/mean)", "request_balance", "", 0),
    ("balance, computed tokens (std/mean)", "compute_balance", "", 0),
)

_IRREGULARITIES = (
    ("delayed by the driver's limit", "delayed"),
    ("refused by the driver", "refused"),
    ("turns abandoned after an error", "abandoned_turns"),
    ("cached tokens not reported", "unreported"),
)
"""Shown only where one of the runs has any."""


def improvements(baseline: Summary, candidate: Summary) -> dict[str, float]:
    """By how much the candidate is better, by field: above 1 = better, below 1 = worse; undefined ones left out."""
    result: dict[str, float] = {}
    for _, name, _, direction in _MEASURES:
        before, after = getattr(baseline, name), getattr(candidate, name)
        if direction and before and after:
            result[name] = after / before if direction > 0 else before / after
    return result


def comparison(baseline: Summary, candidate: Summary) -> list[Row]:
    """Return the table of two runs of one workload."""
    factors = improvements(baseline, candidate)
    rows = [
        Row(
            label,
            _text(getattr(baseline, name), unit),
            _text(getattr(candidate, name), unit),
            _verdict(factors.get(name)),
        )
        for label, name, unit, _ in _MEASURES
    ]
    for label, name in _IRREGULARITIES:
        if getattr(baseline, name) or getattr(candidate, name):
            rows.append(Row(label, str(getattr(baseline, name)), str(getattr(candidate, name)), ""))
    return rows


def errors_by_text(records: Iterable[RequestRecord]) -> list[tuple[str, int]]:
    """Return the errors and their counts, most frequent first."""
    return Counter(record.error for record in records if record.error).most_common()


def as_json(summary: Summary) -> dict[str, Any]:
    """Return a summary as JSON fields."""
    return asdict(summary)


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    match unit:
        case "count":
            return f"{value:,.0f}"
        case "%":
            return f"{100 * value:.1f} %"
        case "ms":
            return f"{1000 * value:.1f} ms"
        case _:
            return f"{value:.2f}"


def _verdict(factor: float | None) -> str:
    if factor is None:
        return ""
    better, size = factor >= 1, factor if factor >= 1 else 1 / factor
    return "equal" if size < 1.005 else f"{size:.2f}× {'better' if better else 'worse'}"
