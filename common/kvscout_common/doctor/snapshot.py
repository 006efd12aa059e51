"""Answers of the services and engines of one kvscout at one time. Values only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias, TypeVar

from kvscout.v1 import bridge_pb2, gateway_pb2, indexer_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.registry.engine_facts import EngineFacts
from kvscout_common.registry.registry import WorkerName

Status: TypeAlias = (
    gateway_pb2.GatewayGetStatusResponse
    | indexer_pb2.IndexerGetStatusResponse
    | scheduler_pb2.SchedulerGetStatusResponse
    | bridge_pb2.BridgeGetStatusResponse
)
S = TypeVar("S", bound=Status)


class ServiceKind(StrEnum):
    """Kind of a service."""

    GATEWAY = "gateway"
    INDEXER = "indexer"
    SCHEDULER = "scheduler"
    BRIDGE = "bridge"


HELPER_KINDS = {
    gateway_pb2.HELPER_KIND_INDEXER: ServiceKind.INDEXER,
    gateway_pb2.HELPER_KIND_SCHEDULER: ServiceKind.SCHEDULER,
}
"""Kinds of a gateway's upstreams."""


class RankName(NamedTuple):
    """Name of a worker rank."""

    tenant: str
    worker_id: str
    dp_rank: int

    @property
    def worker(self) -> WorkerName:
        """Its worker."""
        return WorkerName(self.tenant, self.worker_id)

    def __str__(self) -> str:
        return f"{self.worker_id}/{self.dp_rank}"


@dataclass(frozen=True, slots=True)
class Service:
    """One service, and what it said."""

    address: str
    kind: ServiceKind | None = None
    """Kind that it is taken for; None = nobody says, and it does not."""
    actual: ServiceKind | None = None
    """Kind of the service that answers there, where it is no `kind`."""
    named_by: str = ""
    """Address of the gateway, or worker, that names it; "" = whoever asks."""
    error: str = ""
    """Reason why its status is unknown; "" = it is known."""
    serving: bool = False
    """Its health says so."""
    status: Status | None = None
    workers: tuple[workers_pb2.WorkerEntry, ...] | None = None
    """Those that it knows; None = it was not queried, or does not report them."""
    replicas: scheduler_pb2.GetReplicasResponse | None = None
    """Replicas of a scheduler; None = it is another service."""
    clock_offset_seconds: float | None = None
    """By which its wall clock is ahead of ours; None = unknown."""
    clock_doubt_seconds: float = 0.0
    """By which that may be wrong: half of the time that the answer took."""
    untold: tuple[str, ...] = ()
    """Requests that it did not answer, and why."""

    @property
    def name(self) -> str:
        """Return kind and address."""
        return f"{self.kind or 'service'} {self.address}"

    @property
    def age_seconds(self) -> float:
        """Return the time since it was started; infinity = it does not say."""
        return (self.info.uptime_seconds if self.info is not None else 0.0) or float("inf")

    @property
    def info(self) -> types_pb2.ServiceInfo | None:
        """Return the part of the status that every service has; None = it does not answer."""
        return self.status.service if self.status is not None else None


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine of one worker, as it answers whoever asks."""

    worker: WorkerName
    url: str
    facts: EngineFacts | None = None
    """None = unknown."""
    error: str = ""
    """Why not."""
    reached: bool = False
    """Something answers there."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """An Envoy in front of the engines, as its admin interface answers."""

    url: str
    """URL of the admin interface."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Those of `PROXY_COUNTERS`, by their full names."""
    error: str = ""
    """Reason why they are unknown; "" = they are known."""


PROXY_COUNTERS = r"upstream_(cx|rq_pending|rq_retry)_overflow$|ext_proc\..*failure_mode_allowed$"
"""Envoy's counters of what its limits refused, and of requests without a pick; a regular expression."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it."""

    services: tuple[Service, ...]
    engines: tuple[Engine, ...] = ()
    """Engines of the workers that have an HTTP endpoint; empty = engines were not queried."""
    left_out: int = 0
    """Services and engines that were too many to ask."""
    proxies: tuple[Proxy, ...] = ()
    """Those that were named."""
    is_own: bool = False
    """A gateway took it itself: whatever it reaches is reachable from here."""

    def statuses(self, kind: type[S]) -> Iterator[tuple[Service, S]]:
        """Yield every service that sent a status of one kind, with that status."""
        for service in self.services:
            if isinstance(service.status, kind):
                yield service, service.status

    def of_kind(self, kind: ServiceKind) -> list[Service]:
        """Return every service that is taken for one of a kind."""
        return [service for service in self.services if service.kind is kind]

    @property
    def workers(self) -> dict[WorkerName, workers_pb2.Worker]:
        """Return every worker that any service knows, as the first service reports it: gateways come first."""
        found: dict[WorkerName, workers_pb2.Worker] = {}
        for kind in (ServiceKind.GATEWAY, ServiceKind.INDEXER, ServiceKind.SCHEDULER):
            for service in self.of_kind(kind):
                for entry in service.workers or ():
                    found.setdefault(worker_name(entry.worker), entry.worker)
        return found


def worker_name(worker: workers_pb2.Worker) -> WorkerName:
    """Return the name of a registered worker."""
    return WorkerName(worker.tenant, worker.worker_id)


def source_name(source: indexer_pb2.SourceStatus) -> RankName:
    """Return the worker rank of a source."""
    return RankName(source.tenant, source.worker.worker_id, source.worker.dp_rank)


def observed_name(seen: gateway_pb2.WorkerObservation) -> RankName:
    """Return the worker rank that a gateway saw."""
    return RankName(seen.tenant, seen.worker.worker_id, seen.worker.dp_rank)
