"""The workers that one indexer or scheduler lists, read again only where the list has changed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import grpc

from kvscout.v1 import types_pb2, workers_pb2
from kvscout_common.enum_words import word_of
from kvscout_common.errors import InvalidArgument
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.registry import DECLARED, Source, WorkerName
from kvscout_common.registry.worker_proto import spec_from_proto
from kvscout_common.rpc.channel import call
from kvscout_common.worker import ALL_TENANTS, WorkerSpec

log = logging.getLogger("kvscout.gateway")

CALL_SECONDS = 2.0
WORKERS_A_SLICE = 32
"""Workers compared in a row: about a millisecond where all are new, after which other tasks run."""

KEPT = (*DECLARED, Source.NATS)
"""Sources of a member that bring its workers to others, or to nobody else, without this gateway."""
_SOURCES = {source.value: source for source in Source}


class ServiceStatus(Protocol):
    """The part of a status that indexers and schedulers have in common."""

    @property
    def service(self) -> types_pb2.ServiceInfo:
        """The service."""


class WorkerStub(Protocol):
    """The rpcs that indexer and scheduler stubs both have."""

    RegisterWorker: grpc.aio.UnaryUnaryMultiCallable[
        workers_pb2.RegisterWorkerRequest, workers_pb2.RegisterWorkerResponse
    ]
    RemoveWorker: grpc.aio.UnaryUnaryMultiCallable[workers_pb2.RemoveWorkerRequest, workers_pb2.RemoveWorkerResponse]
    KeepAlive: grpc.aio.UnaryUnaryMultiCallable[workers_pb2.KeepAliveRequest, workers_pb2.KeepAliveResponse]
    ListWorkers: grpc.aio.UnaryUnaryMultiCallable[workers_pb2.ListWorkersRequest, workers_pb2.ListWorkersResponse]

    @property
    def GetStatus(self) -> Callable[..., Awaitable[ServiceStatus]]:
        """State of the service."""


class Peer(NamedTuple):
    """A registration as a member lists it."""

    spec: WorkerSpec
    lease_seconds: int
    source: Source
    listed_at: float
    """Time when its list was requested, on the gateway's clock."""

    @property
    def registered_there(self) -> bool:
        """True = by a call to the member, so that nobody else need know the worker."""
        return self.source not in KEPT and self.source is not Source.PEER

    @property
    def declared(self) -> bool:
        """True = by the member's own file, pods or DNS names: nobody else can change it there."""
        return self.source in DECLARED


class MemberList:
    """The list of one member.

    Args:
        name: Of the member, for people.
        stub: Its rpcs.
        clock: Monotonic seconds.
    """

    def __init__(self, name: str, stub: WorkerStub, clock: Callable[[], float]) -> None:
        self.workers: dict[WorkerName, Peer] = {}
        self._name = name
        self._stub = stub
        self._clock = clock
        self._version = ""
        """Version of the list that was read last; "" = there is none."""
        self._specs: dict[bytes, WorkerSpec] = {}
        """Registrations of that list, by their serialised form."""
        self._warnings = RateLimitedLog(log)

    async def read(self) -> bool:
        """Read the list; return whether it may be another one than the last.

        Raises:
            KvscoutError: The member cannot be reached.
        """
        requested_at = self._clock()
        request = workers_pb2.ListWorkersRequest(tenant=ALL_TENANTS, known_version=self._version)
        answer = await call(self._stub.ListWorkers, request, timeout=CALL_SECONDS)
        changed = not answer.version or answer.version != self._version
        if changed:
            self.workers = await self._workers(answer, requested_at)
            self._version = answer.version
        else:
            self.workers = {name: peer._replace(listed_at=requested_at) for name, peer in self.workers.items()}
        return changed

    async def _workers(self, answer: workers_pb2.ListWorkersResponse, requested_at: float) -> dict[WorkerName, Peer]:
        """Return the workers of a list."""
        listed: dict[WorkerName, Peer] = {}
        specs: dict[bytes, WorkerSpec] = {}
        for number, entry in enumerate(answer.workers):
            if number % WORKERS_A_SLICE == 0:
                await asyncio.sleep(0)
            try:
                proto = entry.registered if entry.HasField("registered") else entry.worker
                serialised = proto.SerializeToString(deterministic=True)
                # Of a fleet nearly all are as they were a round ago: those are not read again.
                spec = specs[serialised] = self._specs.get(serialised) or spec_from_proto(proto)
            except InvalidArgument as error:
                # Of a release with other rules; the others in the list are of use all the same.
                self._warnings.warning("listed", "%s lists a worker that cannot be read: %s", self._name, error)
                continue
            listed[WorkerName(spec.tenant, spec.worker_id)] = Peer(
                spec, entry.lease_seconds, _source_of(entry), requested_at
            )
        self._specs = specs
        return listed

    async def restarted_since(self, then: float) -> bool:
        """Return whether the member's process started after a time; called only when workers are missing: it costs."""
        status = await call(self._stub.GetStatus, types_pb2.GetStatusRequest(tenant=ALL_TENANTS), timeout=CALL_SECONDS)
        return self._clock() - status.service.uptime_seconds > then


def _source_of(listed: workers_pb2.WorkerEntry) -> Source:
    """Return a source as a member lists it; one that only its release knows counts as any other peer's."""
    return _SOURCES.get(word_of(workers_pb2.RegistrationSource, listed.source), Source.RPC)
