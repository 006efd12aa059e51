"""Telling indexers and schedulers of the workers, and learning from them of those that others registered.

One loop a member brings it to what this gateway knows: registers what it lacks, removes what is gone, renews leases.
A member that was away is told everything as soon as it is back. Workers that the members know and this gateway does
not (registered at another gateway, or before a restart) are adopted as `peer` entries: routed to, never pushed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import grpc

from kvscout.v1 import workers_pb2
from kvscout_common.channel import call
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound, Unavailable
from kvscout_common.registry import ALL_TENANTS, Entry, Registry, Source, WorkerName
from kvscout_common.worker import WorkerSpec
from kvscout_common.worker_proto import spec_from_proto, spec_to_proto

log = logging.getLogger("kvscout.gateway")

SYNC_SECONDS = 2.0
"""How often leases are renewed and peers looked at."""
RETRY_SECONDS = 0.5
FILE_LEASE_SECONDS = 300
"""Members forget workers of a gateway's file this long after the gateway is gone."""
MIN_LEASE_SECONDS = 30
"""A worker's own lease is timed here; members get one that survives a pause of this gateway."""
_TIMEOUT_SECONDS = 2.0


class WorkerStub(Protocol):
    """The worker rpcs, which indexer and scheduler stubs both have."""

    RegisterWorker: grpc.aio.UnaryUnaryMultiCallable[
        workers_pb2.RegisterWorkerRequest, workers_pb2.RegisterWorkerResponse
    ]
    RemoveWorker: grpc.aio.UnaryUnaryMultiCallable[workers_pb2.RemoveWorkerRequest, workers_pb2.RemoveWorkerResponse]
    KeepAlive: grpc.aio.UnaryUnaryMultiCallable[workers_pb2.KeepAliveRequest, workers_pb2.KeepAliveResponse]
    ListWorkers: grpc.aio.UnaryUnaryMultiCallable[workers_pb2.ListWorkersRequest, workers_pb2.ListWorkersResponse]


class MemberSync:
    """Brings one indexer or scheduler to what the registry says."""

    def __init__(self, name: str, stub: WorkerStub, registry: Registry) -> None:
        self.name = name
        self._stub = stub
        self._registry = registry
        self._told: dict[WorkerName, Entry] = {}
        self._to_remove: set[WorkerName] = set()
        self.changed = asyncio.Event()
        self.synced = asyncio.Event()
        self.error = ""
        self.peers: dict[WorkerName, WorkerSpec] = {}
        self.peer_leases: dict[WorkerName, int] = {}

    @property
    def pending(self) -> int:
        """Registrations and removals that the member has not been told yet."""
        return len(self._to_remove) + len(self._missing())

    def touch(self, removed: WorkerName | None = None) -> None:
        """The registry changed."""
        if removed is not None:
            self._to_remove.add(removed)
        self.synced.clear()
        self.changed.set()

    async def sync(self) -> None:
        """One round.

        Raises:
            KvscoutError: If the member cannot be reached or refuses; what was done stays done.
        """
        self.changed.clear()
        for name in list(self._to_remove):
            await self._remove(name)
        await self._keep_alive()
        for entry in self._missing():
            await self._register(entry)
        await self._learn()
        if not self.changed.is_set():
            self.synced.set()

    def _own(self) -> list[Entry]:
        return [entry for entry in self._registry.entries() if entry.source is not Source.PEER]

    def _missing(self) -> list[Entry]:
        told = self._told
        return [e for e in self._own() if e.name not in told or told[e.name].spec != e.spec]

    async def _remove(self, name: WorkerName) -> None:
        still_there = any(entry.name == name for entry in self._own())
        if not still_there:
            request = workers_pb2.RemoveWorkerRequest(tenant=name.tenant, worker_id=name.worker_id)
            try:
                await call(self._stub.RemoveWorker, request, timeout=_TIMEOUT_SECONDS)
            except (NotFound, FailedPrecondition):
                pass  # gone already, or the member has it from a file of its own
            self._told.pop(name, None)
            self.peers.pop(name, None)
        self._to_remove.discard(name)

    async def _register(self, entry: Entry) -> None:
        lease = max(entry.lease_seconds, MIN_LEASE_SECONDS) if entry.lease_seconds else 0
        if entry.source is Source.FILE:
            lease = FILE_LEASE_SECONDS
        request = workers_pb2.RegisterWorkerRequest(
            tenant=entry.spec.tenant, worker=spec_to_proto(entry.spec), lease_seconds=lease
        )
        try:
            await call(self._stub.RegisterWorker, request, timeout=_TIMEOUT_SECONDS)
        except FailedPrecondition:
            pass  # the member has it from a file of its own
        self._told[entry.name] = entry

    async def _keep_alive(self) -> None:
        by_tenant: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._told:
            by_tenant[name.tenant].append(name.worker_id)
        for tenant, worker_ids in by_tenant.items():
            request = workers_pb2.KeepAliveRequest(tenant=tenant, worker_ids=worker_ids)
            answer = await call(self._stub.KeepAlive, request, timeout=_TIMEOUT_SECONDS)
            for worker_id in answer.unknown_worker_ids:
                self._told.pop(WorkerName(tenant, worker_id), None)

    async def _learn(self) -> None:
        request = workers_pb2.ListWorkersRequest(tenant=ALL_TENANTS)
        answer = await call(self._stub.ListWorkers, request, timeout=_TIMEOUT_SECONDS)
        self.peers, self.peer_leases = {}, {}
        for entry in answer.workers:
            spec = spec_from_proto(entry.worker)
            name = WorkerName(spec.tenant, spec.worker_id)
            self.peers[name] = spec
            self.peer_leases[name] = entry.lease_seconds


class Registration:
    """The syncs of all members, and the peers they bring."""

    def __init__(self, registry: Registry, members: Sequence[tuple[str, WorkerStub]]) -> None:
        self._registry = registry
        self.members = [MemberSync(name, stub, registry) for name, stub in members]
        registry.listen(self)

    def worker_added(self, spec: WorkerSpec) -> None:
        """Pushes a new worker."""
        self._touch()

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Pushes a changed worker."""
        self._touch()

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Pushes a removal, unless it is only that the members no longer have it."""
        if reason != Source.PEER:
            self._touch(WorkerName(spec.tenant, spec.worker_id))

    def _touch(self, removed: WorkerName | None = None) -> None:
        for member in self.members:
            member.touch(removed)

    async def flush(self, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        """Waits until every member knows what the registry says now.

        Raises:
            Unavailable: If a member does not within the time; it is told as soon as it is back.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.gather(*(member.synced.wait() for member in self.members))
        except TimeoutError:
            late = ", ".join(f"{m.name} ({m.error or 'slow'})" for m in self.members if not m.synced.is_set())
            raise Unavailable(f"not told yet, will be when they are back: {late}", retry_after_seconds=1.0) from None

    async def keep(self, member: MemberSync) -> None:
        """Syncs one member for ever."""
        while True:
            pause = SYNC_SECONDS
            try:
                await member.sync()
                member.error = ""
            except KvscoutError as error:
                if not member.error:
                    log.warning("%s is not told of the workers: %s", member.name, error)
                member.error = str(error)
                member.touch()
                pause = RETRY_SECONDS
                await asyncio.sleep(pause)
            self._adopt()
            try:
                async with asyncio.timeout(pause):
                    await member.changed.wait()
            except TimeoutError:
                pass  # time for the next round

    def _adopt(self) -> None:
        # The first member that knows a worker says how it is registered.
        union: dict[WorkerName, WorkerSpec] = {}
        for member in reversed(self.members):
            union.update(member.peers)
        own = {entry.name for entry in self._registry.entries() if entry.source is not Source.PEER}
        self._registry.replace_source(Source.PEER, [spec for name, spec in union.items() if name not in own])

    def take_over(self, tenant: str, worker_id: str) -> None:
        """Makes a peer's worker this gateway's own, so that a call about it here takes effect everywhere."""
        name = WorkerName(tenant, worker_id)
        try:
            entry = self._registry.get(tenant, worker_id)
        except NotFound:
            return  # whoever asked is told by the call itself
        if entry.source is Source.PEER:
            lease = next((m.peer_leases[name] for m in self.members if name in m.peer_leases), 0)
            self._registry.register(entry.spec, lease_seconds=lease)
