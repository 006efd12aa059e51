"""A snapshot as two tables: one row a service, one row a worker rank and indexer. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, workers_pb2
from kvscout_common.doctor.conditions import Severity
from kvscout_common.doctor.request_checks import check_requests
from kvscout_common.doctor.snapshot import (
    RankName,
    Service,
    ServiceKind,
    Snapshot,
    observed_name,
    source_name,
)
from kvscout_common.doctor.worker_health import Health, judged_healths, shown_health
from kvscout_common.enum_words import word_of
from kvscout_common.plain_text import printable
from kvscout_common.registry.registry import WorkerName
from kvscout_common.worker import MAX_RANKS

TROUBLE_CHARACTERS = 1_000
"""Longest sentence on requests; services say a part of it."""

TROUBLED = frozenset(
    {
        indexer_pb2.SOURCE_STATE_INCOMPLETE,
        indexer_pb2.SOURCE_STATE_INCOMPATIBLE,
        indexer_pb2.SOURCE_STATE_MISCONFIGURED,
        indexer_pb2.SOURCE_STATE_QUARANTINED,
        indexer_pb2.SOURCE_STATE_DISCONNECTED,
        indexer_pb2.SOURCE_STATE_BLIND,
    }
)
"""States of a source in which overlaps are too low, or there are none."""
UNKNOWN = "unknown"
"""State of a worker rank that no indexer reports."""


@dataclass(frozen=True, slots=True)
class ServiceRow:
    """One service."""

    kind: str
    address: str
    version: str
    """"" = it does not answer."""
    uptime_seconds: float | None
    state: str
    """"ok", "draining", "not serving", or what is wrong with it."""
    well: bool
    warnings: tuple[str, ...]
    """Warnings that it reports to operators."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """The events of one worker rank, as one indexer has them, and what came of it."""

    tenant: str
    worker_id: str
    dp_rank: int
    model: str
    indexer: str
    """Address; "" = no indexer reports the worker."""
    state: str
    """As in the API, in lower case, such as "live"."""
    reason: str
    """Reason why it is not live; "" = it is."""
    well: bool
    endpoint: str
    """Endpoint at which its events are read; "" = they are pushed, or not read."""
    last_event_age_seconds: float | None
    """None = nothing came yet."""
    blocks: int
    requests: int
    """Requests that gateways sent to it."""
    prediction_error: float | None
    """See `prediction_error`; None = nothing could be compared."""
    health: Health
    """Health of the worker rank, whatever its events are like."""


@dataclass(frozen=True, slots=True)
class QueueRow:
    """Requests of one priority and fair share that wait at a scheduler."""

    tenant: str
    model: str
    priority: int
    caller: str
    """"" = the tenant."""
    fairness_id: str
    waiting: int
    ahead_seconds: float
    """Estimated seconds by weight that the caller has had more than the one that goes next."""


@dataclass(frozen=True, slots=True)
class Overview:
    """All tables."""

    services: tuple[ServiceRow, ...]
    sources: tuple[SourceRow, ...]
    queue: tuple[QueueRow, ...] = ()
    """As far as schedulers show it: to administrators."""
    troubles: tuple[str, ...] = ()
    """Problems of requests, one sentence each."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Requests that failed since the gateways' start, by whose fault: "caller", "engine", "router"."""
    answered: int = 0
    """Requests that were answered, but with less knowledge than usual, or after another worker had failed them."""

    @property
    def well(self) -> bool:
        """Return whether nothing is wrong in any row, nor with requests."""
        return (
            not self.troubles
            and all(row.well for row in self.services)
            and all(row.well and row.health.well for row in self.sources)
        )


def reported_prompt_tokens(one: gateway_pb2.WorkerObservation) -> int:
    """Return the prompt tokens of which the cached ones are a part; those of a gateway of an earlier release include
    requests that run."""
    return one.reported_prompt_tokens if one.HasField("reported_prompt_tokens") else one.prompt_tokens


@dataclass(slots=True)
class Seen:
    """Observations of one worker rank, of all gateways together."""

    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    """Of the requests of which the engine reported cached tokens."""
    checked: int = 0
    mispredicted: int = 0
    unreported: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    error_tokens: int = 0
    first_tokens: int = 0
    ttft_seconds: float = 0.0
    """Sum, of the requests of which an output came."""

    def add(self, one: gateway_pb2.WorkerObservation) -> None:
        """Add the observations of one more gateway."""
        self.requests += one.requests
        self.failures += one.failures
        self.prompt_tokens += reported_prompt_tokens(one)
        self.checked += one.checked
        self.mispredicted += one.mispredicted
        self.unreported += one.unreported
        self.cached_tokens += one.cached_tokens
        self.predicted_tokens += one.predicted_cached_tokens
        self.error_tokens += one.prediction_error_tokens
        self.first_tokens += one.first_tokens
        self.ttft_seconds += one.ttft_seconds

    @property
    def prediction_error(self) -> float | None:
        """By how much predictions of cached tokens were wrong: Σ |predicted − reported| ÷ Σ (predicted + reported),
        0 = never, 1 = all; None = nothing could be compared."""
        if not self.checked:
            return None
        total = self.predicted_tokens + self.cached_tokens
        return min(1.0, self.error_tokens / total) if total else 0.0


def seen_by_gateways(snapshot: Snapshot) -> dict[RankName, Seen]:
    """Return what the gateways saw of each worker rank."""
    found: defaultdict[RankName, Seen] = defaultdict(Seen)
    for _, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for one in status.workers:
            found[observed_name(one)].add(one)
    return dict(found)


def failed_by_owner(snapshot: Snapshot) -> dict[str, int]:
    """Return the requests that failed since the gateways' start, by whose fault: "caller", "engine", "router"."""
    found = dict.fromkeys(("caller", "engine", "router"), 0)
    for count in _failure_counts(snapshot):
        owner = word_of(gateway_pb2.FaultOwner, count.owner)
        if not count.answered and owner in found:
            found[owner] += count.total
    return found


def answered_with_less(snapshot: Snapshot) -> int:
    """Return the requests that were answered since then, but not as they should have been."""
    return sum(count.total for count in _failure_counts(snapshot) if count.answered)


def _failure_counts(snapshot: Snapshot) -> Iterator[gateway_pb2.FailureCount]:
    for _, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        yield from status.failure_counts


def overview(snapshot: Snapshot) -> Overview:
    """Return the tables of a snapshot."""
    reached = reached_by_gateways(snapshot)
    return Overview(
        services=tuple(_service_row(service, reached.get(service.address)) for service in snapshot.services),
        sources=tuple(_source_rows(snapshot)),
        queue=tuple(
            QueueRow(pool.tenant, pool.model, one.priority, one.caller, one.fairness_id, one.waiting, one.ahead_seconds)
            for _, status in snapshot.statuses(scheduler_pb2.SchedulerGetStatusResponse)
            for pool in status.pools
            for one in pool.queue
        ),
        troubles=tuple(
            printable(f"{found.condition.id}: {found.evidence}", TROUBLE_CHARACTERS)
            for found in sorted(check_requests(snapshot), key=lambda one: one.condition.severity is not Severity.ERROR)
        ),
        failed=failed_by_owner(snapshot),
        answered=answered_with_less(snapshot),
    )


def out_of_sight(service: Service, reached: gateway_pb2.HelperStatus | None) -> bool:
    """Return whether a service cannot be reached from here, and serves its gateway all the same."""
    return bool(service.error) and service.actual is None and reached is not None and reached.healthy


def reached_by_gateways(snapshot: Snapshot) -> dict[str, gateway_pb2.HelperStatus]:
    """Return what gateways say of their helpers, by address; of several, the one that reaches it."""
    found: dict[str, gateway_pb2.HelperStatus] = {}
    for _, status in snapshot.statuses(gateway_pb2.GatewayGetStatusResponse):
        for helper in status.helpers:
            if helper.address not in found or helper.healthy:
                found[helper.address] = helper
    return found


def _service_row(service: Service, helper: gateway_pb2.HelperStatus | None) -> ServiceRow:
    info = service.info
    well = False
    if out_of_sight(service, helper):
        state, well = f"ok, says the gateway; from here: {service.error}", True
    elif info is None:
        state = service.error
    elif info.draining:
        state = "draining"
    elif not service.serving:
        state = "not serving"
    elif helper is not None and not helper.healthy:
        state = f"its gateway: {helper.last_error or 'no answer yet'}"
    else:
        state, well = "ok", True
    return ServiceRow(
        kind=service.kind or "",
        address=service.address,
        version=info.version if info is not None else "",
        uptime_seconds=info.uptime_seconds if info is not None else None,
        state=state,
        well=well,
        warnings=tuple(info.warnings) if info is not None else (),
    )


def _source_rows(snapshot: Snapshot) -> list[SourceRow]:
    seen = seen_by_gateways(snapshot)
    judged, has_gateway = judged_healths(snapshot), any(snapshot.statuses(gateway_pb2.GatewayGetStatusResponse))
    rows: list[SourceRow] = []
    reported: set[WorkerName] = set()

    def health(name: RankName) -> Health:
        return shown_health(judged.get(name), None, has_gateway=has_gateway)

    for service, status in snapshot.statuses(indexer_pb2.IndexerGetStatusResponse):
        for source in status.sources:
            name = source_name(source)
            reported.add(name.worker)
            rows.append(_source_row(service, source, seen.get(name, Seen()), health(name)))
    without_indexer = not snapshot.of_kind(ServiceKind.INDEXER)
    for worker in snapshot.workers.values():
        if WorkerName(worker.tenant, worker.worker_id) not in reported:
            rows += _unknown_rows(worker, seen, health, without_indexer=without_indexer)
    return sorted(rows, key=lambda row: (row.tenant, row.worker_id, row.dp_rank, row.indexer))


def _source_row(service: Service, source: indexer_pb2.SourceStatus, seen: Seen, health: Health) -> SourceRow:
    return SourceRow(
        tenant=source.tenant,
        worker_id=source.worker.worker_id,
        dp_rank=source.worker.dp_rank,
        model=source.model,
        indexer=service.address,
        state=state_name(source.state),
        reason=source.reason,
        well=source.state not in TROUBLED,
        endpoint=source.endpoint,
        last_event_age_seconds=(source.last_event_age_seconds if source.HasField("last_event_age_seconds") else None),
        blocks=source.blocks,
        requests=seen.requests,
        prediction_error=seen.prediction_error,
        health=health,
    )


def _unknown_rows(
    worker: workers_pb2.Worker,
    seen: dict[RankName, Seen],
    health: Callable[[RankName], Health],
    *,
    without_indexer: bool,
) -> list[SourceRow]:
    rows = []
    for dp_rank in range(worker.dp_start_rank, worker.dp_start_rank + min(max(1, worker.dp_size), MAX_RANKS)):
        name = RankName(worker.tenant, worker.worker_id, dp_rank)
        known = seen.get(name, Seen())
        rows.append(
            SourceRow(
                tenant=worker.tenant,
                worker_id=worker.worker_id,
                dp_rank=dp_rank,
                model=worker.model,
                indexer="",
                state=UNKNOWN,
                reason="there is no indexer" if without_indexer else "no indexer reported it",
                well=without_indexer,
                endpoint="",
                last_event_age_seconds=None,
                blocks=0,
                requests=known.requests,
                prediction_error=known.prediction_error,
                health=health(name),
            )
        )
    return rows


def state_name(state: indexer_pb2.SourceState.ValueType) -> str:
    """Return a state of a source as people read it."""
    try:
        name = indexer_pb2.SourceState.Name(state)
    except ValueError:  # a newer release's
        return f"state {state}"
    return name.removeprefix("SOURCE_STATE_").lower()
