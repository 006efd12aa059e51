"""A run → what the policy did, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, NamedTuple

from kvscout_common.errors import ConfigError
from kvscout_lab.cells.bound import Bound
from kvscout_lab.cells.pooled_bound import PooledBound
from kvscout_lab.simulation.records import Record, Run
from kvscout_lab.simulation.timing import PICOSECONDS
from kvscout_lab.statistics import percentile, variation


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective of served requests, and the share of requests that count."""

    ttft_seconds: float = 2.0
    itl_seconds: float = 0.075
    """Mean over a request's tokens."""
    warm_up: float = 0.1
    """Share of the requests, the first to arrive, that are left out: caches are cold as they are once in a cluster's
    life. Inter-token latencies and workers are of the whole run."""

    def validate(self) -> Objective:
        """Itself, if it is in range.

        Raises:
            ConfigError: Naming the field.
        """
        for name in ("ttft_seconds", "itl_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError("must be above 0", field=name)
        if not 0 <= self.warm_up < 1:
            raise ConfigError("must be at least 0 and below 1", field="warm_up")
        return self


class Spread(NamedTuple):
    """Mean and percentiles of a time."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Measures:
    """Measures of a policy on a workload. Times are seconds."""

    requests: int
    errors: int
    ttft: Spread
    """From a request's arrival at its gateway to its first token."""
    bound_ttft_mean: float
    """Lower bound of the same requests."""
    pooled_bound_ttft_mean: float
    """Lower bound of the same requests at the times at which they came in this run."""
    itl: Spread
    """Between two tokens of a request, over all tokens; percentiles to 1 %."""
    goodput: float
    """Requests a second that met the objective."""
    well_served: float
    """Share of the requests of priority 0 and above that met it: goodput without the time in which the last ones drain,
    which is chance in a short run."""
    sheddable_served: float
    """Share of the requests of a priority below 0 that were served at all; 1 where there are none."""
    request_rate: float
    """Requests a second that were served."""
    hit_rate: float
    """Prompt tokens that workers found in their caches."""
    bound_hit_rate: float
    """With one unlimited cache for all."""
    predicted_hit_rate: float
    """Prompt tokens that the scheduler believed to be there."""
    balance: float
    """std / mean of computed prompt and output tokens, over workers."""
    hottest: float
    """Mean batch of the fullest worker, in those of the mean worker."""
    hottest_share: float
    """Requests that the busiest worker got."""
    largest_batch: int
    busy: float
    """Share of the time in which workers computed."""
    preemptions: int
    queued: int
    """Requests that waited at the scheduler."""
    later_ttft: Spread
    """Of turns that are not the first of their flow; all 0 where there are none."""
    later_hit_rate: float
    """Of their prompt tokens."""

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value._asdict() if isinstance(value, Spread) else value for name, value in values.items()}


def measure(
    run: Run, bound: Bound, pooled: PooledBound, turns: Sequence[int], objective: Objective = Objective()
) -> Measures:
    """Return the measures of a run.

    Args:
        run: Records of the run.
        bound: Lower bound of its workload and engine.
        pooled: Bounds runs of its workload on its cluster.
        turns: Number of turns of each flow, in order.
        objective: Objective of served requests.
    """
    first = [0]
    for count in turns:
        first.append(first[-1] + count)
    counted = run.records[int(len(run.records) * objective.warm_up) :]
    served = [record for record in counted if not record.error]
    later = [record for record in served if record.turn]
    places = [first[record.flow] + record.turn for record in served]
    prompt_tokens = sum(record.prompt_tokens for record in served)
    begun, ended = counted[0].arrived, max(record.finished for record in served) if served else counted[0].arrived + 1
    span = (ended - begun) / PICOSECONDS
    work = [0] * len(run.workers)
    for record in run.records:
        if not record.error:
            work[record.worker] += record.prompt_tokens - record.cached_tokens
            work[record.decode_worker if record.decode_worker >= 0 else record.worker] += record.output_tokens
    wanted = [record for record in counted if record.priority >= 0] or counted
    sheddable = [record for record in counted if record.priority < 0]
    well = sum(_well(record, objective) for record in served)
    batches = [worker.batch_time for worker in run.workers]
    tokens = sum(run.gaps.counts.values())
    total_requests = sum(worker.requests for worker in run.workers)
    return Measures(
        requests=len(run.records),
        errors=sum(bool(record.error) for record in run.records),
        ttft=_ttft(served),
        bound_ttft_mean=fmean(bound.ttft_seconds[place] for place in places) if places else 0.0,
        pooled_bound_ttft_mean=pooled.mean_ttft(run.records, served),
        itl=Spread(
            run.gaps.total / tokens / PICOSECONDS if tokens else 0.0,
            *(run.gaps.percentile(percent) / PICOSECONDS for percent in (50, 90, 99)),
        ),
        goodput=well / span,
        well_served=sum(_well(record, objective) for record in served if record.priority >= 0) / len(wanted),
        sheddable_served=1.0 - sum(bool(record.error) for record in sheddable) / max(1, len(sheddable)),
        request_rate=len(served) / span,
        hit_rate=_hit_rate(served),
        bound_hit_rate=sum(bound.cached_tokens[place] for place in places) / prompt_tokens if prompt_tokens else 0.0,
        predicted_hit_rate=sum(record.predicted_tokens for record in served) / prompt_tokens if prompt_tokens else 0.0,
        balance=variation(work) or 0.0,
        hottest=max(batches) / fmean(batches) if any(batches) else 0.0,
        hottest_share=max(worker.requests for worker in run.workers) / total_requests if total_requests else 0.0,
        largest_batch=max(worker.largest_batch for worker in run.workers),
        busy=fmean(worker.busy for worker in run.workers) / run.ended if run.ended else 0.0,
        preemptions=sum(worker.preemptions for worker in run.workers),
        queued=run.queued,
        later_ttft=_ttft(later),
        later_hit_rate=_hit_rate(later),
    )


def _hit_rate(records: Sequence[Record]) -> float:
    return sum(record.cached_tokens for record in records) / max(1, sum(record.prompt_tokens for record in records))


def _ttft(records: Sequence[Record]) -> Spread:
    ordered = sorted((record.first_token - record.arrived) / PICOSECONDS for record in records)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0)
    return Spread(fmean(ordered), *(percentile(ordered, percent) or 0.0 for percent in (50, 90, 99)))


def _well(record: Record, objective: Objective) -> bool:
    gaps = record.output_tokens - 1
    itl = (record.finished - record.first_token) / PICOSECONDS / gaps if gaps > 0 else 0.0
    ttft = (record.first_token - record.arrived) / PICOSECONDS
    return ttft <= objective.ttft_seconds and itl <= objective.itl_seconds
