"""The worker rpcs, the same on every service: protobuf ↔ `Registry`."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from typing import Any

from kvscout.v1 import types_pb2, workers_pb2
from kvscout_common.enum_words import value_of
from kvscout_common.errors import InvalidArgument
from kvscout_common.identity.identity import tenant_to_show
from kvscout_common.registry.registrar import OwnRegistrar, Registrar
from kvscout_common.registry.registry import Registry, WorkerName
from kvscout_common.registry.worker_proto import spec_from_proto, spec_to_proto
from kvscout_common.rpc.pages import page_token, read_page_token
from kvscout_common.worker import DEFAULT_TENANT, WorkerSpec

MAX_LEASE_SECONDS = 86_400
WORKERS_A_TURN = 64
"""Listed in a row: about a millisecond, after which other calls run."""


class WorkerRpcs:
    """Mixin of a servicer: RegisterWorker … ListWorkers over its registry.

    Args:
        registry: What is listed.
        registrar: Where changes are made; None = in that registry alone.
    """

    def __init__(self, registry: Registry, registrar: Registrar | None = None) -> None:
        self.registry = registry
        self.registrar = registrar if registrar is not None else OwnRegistrar(registry)

    async def RegisterWorker(
        self, request: workers_pb2.RegisterWorkerRequest, context: Any
    ) -> workers_pb2.RegisterWorkerResponse:
        if request.lease_seconds > MAX_LEASE_SECONDS:
            raise InvalidArgument(f"must be at most {MAX_LEASE_SECONDS}", field="lease_seconds")
        spec = self._admitted(request)
        self.registry.require_room(WorkerName(spec.tenant, spec.worker_id))
        if request.passed_on:
            created = self.registry.learn(spec, request.lease_seconds)
        else:
            created = await self.registrar.register(spec, request.lease_seconds)
        return workers_pb2.RegisterWorkerResponse(created=created, worker=spec_to_proto(spec))

    async def UpdateWorker(
        self, request: workers_pb2.UpdateWorkerRequest, context: Any
    ) -> workers_pb2.UpdateWorkerResponse:
        spec = self._admitted(request)
        await self.registrar.update(spec)
        return workers_pb2.UpdateWorkerResponse(worker=spec_to_proto(spec))

    async def DrainWorker(
        self, request: workers_pb2.DrainWorkerRequest, context: Any
    ) -> workers_pb2.DrainWorkerResponse:
        tenant = request.tenant or DEFAULT_TENANT
        await self.registrar.set_draining(tenant, required_id(request.worker_id), not request.undo)
        active = self.active_requests(tenant, request.worker_id)
        return workers_pb2.DrainWorkerResponse(active_requests=active)

    async def KeepAlive(self, request: workers_pb2.KeepAliveRequest, context: Any) -> workers_pb2.KeepAliveResponse:
        if not request.worker_ids:
            raise InvalidArgument("names no worker", field="worker_ids")
        unknown = await self.registrar.keep_alive(request.tenant or DEFAULT_TENANT, request.worker_ids)
        return workers_pb2.KeepAliveResponse(unknown_worker_ids=unknown)

    async def RemoveWorker(
        self, request: workers_pb2.RemoveWorkerRequest, context: Any
    ) -> workers_pb2.RemoveWorkerResponse:
        await self.registrar.remove(request.tenant or DEFAULT_TENANT, required_id(request.worker_id))
        return workers_pb2.RemoveWorkerResponse()

    async def ListWorkers(
        self, request: workers_pb2.ListWorkersRequest, context: Any
    ) -> workers_pb2.ListWorkersResponse:
        tenant = tenant_to_show(request.tenant)
        answer = workers_pb2.ListWorkersResponse(version=self.registry.version)
        if request.known_version == answer.version:
            return answer
        entries = self.registry.entries(tenant, request.model)
        after = read_page_token(request.page_token, str, str)
        if after is not None:
            entries = entries[bisect_right(entries, after, key=lambda entry: entry.name) :]
        if 0 < request.page_size < len(entries):
            entries = entries[: request.page_size]
            answer.next_page_token = page_token(*entries[-1].name)
        for number, entry in enumerate(entries):
            if number % WORKERS_A_TURN == WORKERS_A_TURN - 1:
                await asyncio.sleep(0)
            answer.workers.add(
                worker=spec_to_proto(entry.spec),
                source=value_of(workers_pb2.RegistrationSource, entry.source),
                lease_remaining_seconds=self.registry.lease_remaining(entry),
                lease_seconds=entry.lease_seconds,
                registered=spec_to_proto(entry.registered) if entry.registered != entry.spec else None,
                health=self.health(entry.spec),
            )
        return answer

    def _admitted(self, request: workers_pb2.RegisterWorkerRequest | workers_pb2.UpdateWorkerRequest) -> WorkerSpec:
        """Return the worker of a request, if this service takes it.

        Raises:
            InvalidArgument: Naming the field that is wrong, or refused.
        """
        spec = spec_from_proto(request.worker, request.tenant)
        self.registry.admit(spec)
        return spec

    def health(self, spec: WorkerSpec) -> types_pb2.WorkerHealth | None:
        """Return the health of a worker; None where the service does not judge it."""
        return None

    def active_requests(self, tenant: str, worker_id: str) -> int:
        """Return the active requests of a worker; 0 if the service does not know them."""
        return 0


def required_id(worker_id: str) -> str:
    """Return a worker id that is given.

    Raises:
        InvalidArgument: If it is empty.
    """
    if not worker_id:
        raise InvalidArgument("must not be empty", field="worker_id")
    return worker_id
