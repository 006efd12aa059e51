"""Observations of each worker: requests, failures, accuracy of cache predictions. Soft state."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.timeouts import STREAM_SECONDS, Liveness
from kvscout_gateway.engines.worker_state import WELL, Judgement, WorkerState
from kvscout_gateway.values.cache_reports import CacheReports

EVENTFUL_KEPT = 16
"""One would do to find that a worker's events never come; people want to see that it was no accident."""

_REPORTS = {
    "prompt_tokens": ("kvscout_reported_prompt_tokens", "Prompt tokens of requests whose engine reports cached ones"),
    "cached_tokens": ("kvscout_reported_cached_tokens", "Of those, tokens that the engine had cached"),
    "checked": ("kvscout_predictions_checked", "Requests whose predicted cached tokens were compared"),
    "mispredicted": ("kvscout_mispredictions", "Of those, requests that differed"),
    "prediction_error_tokens": ("kvscout_prediction_error_tokens", "Sum of |predicted - reported| cached tokens"),
}


@dataclass(slots=True)
class Reports:
    """Cached tokens as engines report them, and how they were predicted."""

    prompt_tokens: int = 0
    """Prompt tokens of the requests that count here."""
    cached_tokens: int = 0
    checked: int = 0
    """Requests whose prediction was compared with the engine's report."""
    mispredicted: int = 0
    predicted_tokens: int = 0
    """Cached tokens that were predicted for the checked requests."""
    prediction_error_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Cached / prompt tokens, 0..1; None = nothing was reported."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    def add(self, *, isl_tokens: int, cached: int, predicted: int | None) -> None:
        """Add one request; without a prediction nothing is compared."""
        self.prompt_tokens += isl_tokens
        self.cached_tokens += cached
        if predicted is not None:
            self.checked += 1
            self.mispredicted += predicted != cached
            self.predicted_tokens += predicted
            self.prediction_error_tokens += abs(predicted - cached)

    def merge(self, other: Reports) -> None:
        """Add all requests of another."""
        for each in fields(Reports):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Observation:
    """Totals of one worker rank since start."""

    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    """Dispatched."""
    first_tokens: int = 0
    """Requests of which an output came."""
    ttft_seconds: float = 0.0
    """Sum of their times to the first token."""
    reports: Reports = field(default_factory=Reports)
    unproven: Reports = field(default_factory=Reports)
    """Sums of requests whose usage has no cached tokens, counted as 0."""
    unreported: int = 0
    """Those of them of which a part was predicted to be cached."""
    eventful: deque[float] = field(default_factory=lambda: deque(maxlen=EVENTFUL_KEPT))
    """When the last requests were dispatched that ran to their end and computed a block of their prompt, in seconds on
    the clock of Generate: a subscriber to the worker's events has received each."""
    liveness: Liveness = field(default_factory=Liveness)


def predicted_cached_tokens(overlap_blocks: int, isl_tokens: int, block_size: int) -> int:
    """Return what an engine will report as cached: it always recomputes the last prompt token.

    min(overlap, (isl - 1) // block_size) · block_size, in tokens.
    """
    if block_size <= 0 or isl_tokens <= 0:
        return 0
    return min(overlap_blocks, (isl_tokens - 1) // block_size) * block_size


def computes_a_block(isl_tokens: int, cached_tokens: int, block_size: int) -> bool:
    """Tell whether a prompt had a complete block that the engine did not have cached, and did not only recompute."""
    whole = predicted_cached_tokens(isl_tokens, isl_tokens, block_size)
    return cached_tokens < whole


class Observations(Collector):
    """Observations by worker rank: of those that are registered, no others.

    Several engines leave `cached_tokens` out where it is 0, others never report it; a usage without it looks the same.
    A worker that has reported it once does report it: from then on it counts as 0 where it is missing, also in the
    requests before. What a worker says nothing of, ever, counts nowhere.
    """

    def __init__(self, model_of: Callable[[str, str], str]) -> None:
        """Start with nothing seen.

        Args:
            model_of: Gives a worker's model by tenant and worker id; "" = it is not registered.
        """
        self._model_of = model_of
        self.by_rank: dict[tuple[str, WorkerRank], Observation] = {}
        self.total = Reports()
        """Sums of all workers since start."""
        self.caches = CacheReports()
        """What engines report as cached, request by request."""
        self._reporting: set[tuple[str, str]] = set()
        """Tenant and id of the workers that report cached tokens."""

    def of(self, tenant: str, worker: WorkerRank) -> Observation:
        """Return the totals of a worker rank; for one that is not registered, a record that is not kept."""
        seen = self.by_rank.get((tenant, worker))
        if seen is None:
            seen = Observation()
            if self._model_of(tenant, worker.worker_id):
                self.by_rank[tenant, worker] = seen
        return seen

    def reported(
        self, tenant: str, worker: WorkerRank, *, isl_tokens: int, cached: int | None, predicted: int | None
    ) -> None:
        """Record what the usage of a request says, in tokens.

        Args:
            tenant: Whose worker.
            worker: The worker rank.
            isl_tokens: Prompt length.
            cached: What the engine says it had cached; None = it says nothing of it.
            predicted: What we thought; None = nothing was known.
        """
        seen, who = self.of(tenant, worker), (tenant, worker.worker_id)
        if cached is not None and (tenant, worker) in self.by_rank and who not in self._reporting:
            self._reporting.add(who)
            for (owner, rank), other in self.by_rank.items():
                if (owner, rank.worker_id) == who:
                    other.reports.merge(other.unproven)
                    self.total.merge(other.unproven)
                    other.unproven, other.unreported = Reports(), 0
        if cached is None and who not in self._reporting:
            seen.unreported += bool(predicted)
            seen.unproven.add(isl_tokens=isl_tokens, cached=0, predicted=predicted)
            return
        for totals in (seen.reports, self.total):
            totals.add(isl_tokens=isl_tokens, cached=cached or 0, predicted=predicted)

    def reports(self, tenant: str, worker_id: str) -> bool:
        """Return whether a worker has ever reported cached tokens."""
        return (tenant, worker_id) in self._reporting

    def eventful(self, key: tuple[str, WorkerRank]) -> Iterable[float]:
        """Return when a rank was sent the requests that should have brought events, by tenant and rank."""
        seen = self.by_rank.get(key)
        return seen.eventful if seen is not None else ()

    def reports_cached_tokens(self, tenant: str, worker_id: str) -> bool:
        """Tell whether a worker has ever reported cached prompt tokens."""
        return (tenant, worker_id) in self._reporting

    def has_output_within(self, spec: WorkerSpec, seconds: float) -> bool:
        """Return whether one of a worker's ranks has put out something in the last seconds."""
        since = asyncio.get_running_loop().time() - seconds
        return any(liveness.last_beat() > since for liveness in self._liveness_of(spec))

    def silent(self, seconds: float) -> list[tuple[str, str]]:
        """Return the workers that have put out nothing for so long though requests wait, by tenant and worker id."""
        before = asyncio.get_running_loop().time() - seconds
        return [
            (tenant, rank.worker_id)
            for (tenant, rank), seen in self.by_rank.items()
            if seen.liveness.waits and seen.liveness.silent_since(whole_answers=True) < before
        ]

    def judge(self, key: tuple[str, WorkerRank]) -> Judgement:
        """Return the state of a worker rank as the outputs of its engine show it."""
        seen = self.by_rank.get(key)
        if seen is None or not seen.liveness.waits:
            return WELL
        seconds = seen.liveness.suspicious_seconds(time.monotonic())
        if seconds is None:
            return WELL
        return Judgement(WorkerState.SUSPECTED, "hangs: requests wait, and no output comes", seconds)

    def lose(self, spec: WorkerSpec, problem: str, asked_at: float, silent_seconds: float) -> None:
        """Fail what waits for a worker that does not answer health checks, if it has put out nothing since one.

        Args:
            spec: The worker.
            problem: What is wrong with it.
            asked_at: When it was checked, on the loop's clock.
            silent_seconds: For how long it has not answered its health checks.
        """
        ranks = self._liveness_of(spec)
        if all(liveness.last_beat() <= asked_at for liveness in ranks):
            for liveness in ranks:
                liveness.lose(problem, asked_at, began=silent_seconds >= STREAM_SECONDS)

    def _liveness_of(self, spec: WorkerSpec) -> list[Liveness]:
        seen = (self.by_rank.get((spec.tenant, rank)) for rank in spec.ranks)
        return [one.liveness for one in seen if one is not None]

    def collect(self) -> Iterator[Metric]:
        """Return samples of what was seen of the workers."""
        labels = ["tenant", "model", "worker", "dp_rank"]
        rows = [
            ([tenant, self._model_of(tenant, rank.worker_id), rank.worker_id, str(rank.dp_rank)], seen)
            for (tenant, rank), seen in self.by_rank.items()
        ]
        for counted, (name, help_text) in _REPORTS.items():
            reported = CounterMetricFamily(name, help_text, labels=labels)
            for values, seen in rows:
                reported.add_metric(values, getattr(seen.reports, counted))
            yield reported
        failures = CounterMetricFamily("kvscout_worker_failures", "Requests a worker failed", labels=labels)
        for values, seen in rows:
            failures.add_metric(values, seen.failures)
        yield failures

    def forget(self, tenant: str, worker_id: str) -> None:
        """Drop a removed worker's totals."""
        self._reporting.discard((tenant, worker_id))
        for key in [k for k in self.by_rank if k[0] == tenant and k[1].worker_id == worker_id]:
            del self.by_rank[key]
            self.caches.forget(key)
