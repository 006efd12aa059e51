"""Engine speeds out of a recording, by least squares over what each worker had to do at the time.

::

    TTFT of a request        ≈ route + (base + request · (requests that decode meanwhile, in the mean)) · steps
                                    + prefill · (its own uncached tokens + those before it at its worker)
    time between its tokens  ≈ base + prefill · (prompt tokens computed at its worker meanwhile) / (its tokens - 1)
                                    + request · (requests that decode beside it, in the mean)

Tokens before it are those of prompts that came to the worker earlier and had no output yet; `steps` is how many they
need, and half of the one that runs when it comes; `route` is what a replay adds for the way to the worker. `prefill`
follows from the first, where it dominates, `base` and `request` from the second; each needs the other, so they are
fitted in turns. What the first left out would be in `prefill`, and a replay would count it twice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from math import ceil
from operator import attrgetter, itemgetter
from statistics import median
from typing import NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_lab.simulation.cluster import Latencies
from kvscout_lab.simulation.timing import StepTime
from kvscout_lab.workloads.recording import RecordedRequest

MIN_REQUESTS = 20
"""Requests with an output, below which nothing is fitted."""
MIN_BASE_MS = 0.1
WAITED_STEPS = 0.5
"""Of the step that runs when a request comes, in the mean."""
ROUNDS = 4
ROUTE_SECONDS = Latencies().route_ms / 1e3
"""What a replay adds to a TTFT for the way to the worker."""


class EngineFit(NamedTuple):
    """Fitted speeds."""

    step: StepTime
    ttft_error: float
    """Median of |fitted - recorded| / recorded TTFT."""


def fit_engine(requests: Sequence[RecordedRequest], max_num_batched_tokens: int) -> EngineFit:
    """Return the speeds of the engines that ran some requests.

    Args:
        requests: In any order.
        max_num_batched_tokens: Tokens of a step.

    Raises:
        ConfigError: Too few of them say enough.
    """
    by_worker: dict[tuple[str, int], list[RecordedRequest]] = defaultdict(list)
    for request in requests:
        if request.worker_id and request.ttft_seconds > 0:
            by_worker[request.worker_id, request.dp_rank].append(request)
    first = [row for ran in by_worker.values() for row in _first_token_rows(ran)]
    if len(first) < MIN_REQUESTS:
        raise ConfigError(
            f"{len(first)} recorded requests have an output, and {MIN_REQUESTS} are needed to fit engine speeds",
            field="recording",
        )
    between = [row for ran in by_worker.values() for row in _between_rows(ran)]
    steps = [WAITED_STEPS + ceil(tokens / max_num_batched_tokens) for tokens, _, _ in first]
    base, prefill = _least_squares(
        [((count, tokens), seconds) for count, (tokens, _, seconds) in zip(steps, first, strict=True)]
    )
    per_request = 0.0
    for _ in range(ROUNDS if between else 0):
        base, per_request = _least_squares([((1.0, beside), took - prefill * mixed) for beside, mixed, took in between])
        _, prefill = _least_squares(
            [
                ((0.0, tokens), seconds - (base + per_request * beside) * count)
                for count, (tokens, beside, seconds) in zip(steps, first, strict=True)
            ]
        )
    step = StepTime(
        base_ms=max(MIN_BASE_MS, base * 1e3),
        prefill_us_per_token=prefill * 1e6,
        decode_us_per_request=per_request * 1e6,
        # The contexts of a recording grow with its requests: their part is in that of the requests.
        context_ns_per_token=0.0,
    )
    errors = (
        abs((base + per_request * beside) * count + prefill * tokens - seconds) / (seconds + ROUTE_SECONDS)
        for count, (tokens, beside, seconds) in zip(steps, first, strict=True)
    )
    return EngineFit(step, median(errors))


class _Decoding:
    """Times in which the requests of a worker decode."""

    def __init__(self, ran: Iterable[RecordedRequest]) -> None:
        self.times = sorted(
            ((one.arrived + one.ttft_seconds, one.arrived + one.seconds, one) for one in ran), key=itemgetter(0)
        )
        self._starts = [since for since, _, _ in self.times]
        self._longest = max((to - since for since, to, _ in self.times), default=0.0)

    def during(self, begin: float, end: float) -> list[tuple[float, float, RecordedRequest]]:
        """Return those that may decode in a time, with the begin and end of it."""
        return self.times[bisect_left(self._starts, begin - self._longest) : bisect_right(self._starts, end)]

    def beside(self, begin: float, end: float) -> float:
        """Return how many decode in a time, in the mean."""
        at_once = sum(max(0.0, min(end, to) - max(begin, since)) for since, to, _ in self.during(begin, end))
        return at_once / (end - begin)


def _first_token_rows(ran: Sequence[RecordedRequest]) -> Iterable[tuple[float, float, float]]:
    """Yield (tokens to compute until its first output, requests that decode meanwhile, TTFT without the way) of each
    request of a worker, which computes in order."""
    decoding = _Decoding(ran)
    queue: deque[RecordedRequest] = deque()
    begun = 0.0
    """When the first of them began to be computed, or came."""
    for request in sorted(ran, key=attrgetter("arrived")):
        while queue and queue[0].arrived + queue[0].ttft_seconds <= request.arrived:
            begun = max(begun, queue[0].arrived + queue[0].ttft_seconds)
            queue.popleft()
        ahead = sum(map(_uncached, queue))
        if queue:
            since = max(begun, queue[0].arrived)
            share = (request.arrived - since) / (queue[0].arrived + queue[0].ttft_seconds - since)
            ahead -= _uncached(queue[0]) * share
        end = request.arrived + request.ttft_seconds
        yield _uncached(request) + ahead, decoding.beside(request.arrived, end), request.ttft_seconds - ROUTE_SECONDS
        queue.append(request)


def _between_rows(ran: Sequence[RecordedRequest]) -> Iterable[tuple[float, float, float]]:
    """Yield (requests beside it, prompt tokens computed a token of its own, mean seconds between its tokens)."""
    decoding = _Decoding(ran)
    for begin, end, request in decoding.times:
        tokens = request.output_tokens - 1
        if tokens < 1 or not request.streamed or end <= begin:
            continue
        mixed = sum(_uncached(one) for since, _, one in decoding.during(begin, end) if since > begin)
        yield decoding.beside(begin, end), mixed / tokens, (end - begin) / tokens


def _uncached(request: RecordedRequest) -> float:
    cached = request.predicted_tokens if request.cached_tokens is None else request.cached_tokens
    return float(max(1, request.prompt_tokens - cached))


def _least_squares(rows: Sequence[tuple[tuple[float, float], float]]) -> tuple[float, float]:
    """Return a, b ≥ 0 with the least Σ (a · x0 + b · x1 - y)²; 0, 0 of no rows."""
    x00 = sum(x0 * x0 for (x0, _), _ in rows)
    x01 = sum(x0 * x1 for (x0, x1), _ in rows)
    x11 = sum(x1 * x1 for (_, x1), _ in rows)
    y0 = sum(x0 * y for (x0, _), y in rows)
    y1 = sum(x1 * y for (_, x1), y in rows)
    determinant = x00 * x11 - x01 * x01
    if determinant > 1e-12 * max(x00 * x11, 1e-300):
        a, b = (x11 * y0 - x01 * y1) / determinant, (x00 * y1 - x01 * y0) / determinant
        if a >= 0 and b >= 0:
            return a, b
    # Of two that are bounded below, one is at its bound.
    a, b = max(0.0, y0 / x00) if x00 else 0.0, max(0.0, y1 / x11) if x11 else 0.0
    rest_a = sum((a * x0 - y) ** 2 for (x0, _), y in rows)
    rest_b = sum((b * x1 - y) ** 2 for (_, x1), y in rows)
    return (a, 0.0) if rest_a <= rest_b else (0.0, b)
