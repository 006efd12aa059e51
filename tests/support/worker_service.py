"""An indexer or scheduler as far as gateways tell it of workers, in this process: it can restart, lag and refuse."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.errors import InvalidArgument
from kvscout_common.registry.registrar import OwnRegistrar
from kvscout_common.registry.registry import Registry, Source
from kvscout_common.registry.worker_rpcs import WorkerRpcs
from kvscout_common.rpc.channel import open_channel
from kvscout_common.rpc.guard import Guard
from kvscout_common.worker import WorkerSpec


class WorkerService(WorkerRpcs, scheduler_pb2_grpc.SchedulerServicer):
    """The worker rpcs over a registry of its own."""

    def __init__(self) -> None:
        super().__init__(Registry(time.monotonic))
        self._started = time.monotonic()
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self.refused: set[str] = set()
        """Worker ids whose registration it refuses."""
        self.calls: Counter[str] = Counter()

    @property
    def worker_ids(self) -> list[str]:
        """Who is registered."""
        return [entry.spec.worker_id for entry in self.registry.entries()]

    @property
    def specs(self) -> dict[str, WorkerSpec]:
        """How they are registered."""
        return {entry.spec.worker_id: entry.spec for entry in self.registry.entries()}

    def from_file(self, *specs: WorkerSpec) -> None:
        """Has workers of a file of its own."""
        self.registry.replace_source(Source.FILE, specs)

    async def start(self) -> str:
        """Serves, on the same port as before; returns the address."""
        self._server = grpc.aio.server(interceptors=(Guard(),))
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        return f"127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Is out of reach; nothing is forgotten."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def forget(self) -> None:
        """Is a new process: knows nobody."""
        self.registry = Registry(time.monotonic)
        self.registrar = OwnRegistrar(self.registry)
        self._started = time.monotonic()

    async def RegisterWorker(
        self, request: workers_pb2.RegisterWorkerRequest, context: Any
    ) -> workers_pb2.RegisterWorkerResponse:
        self.calls["RegisterWorker"] += 1
        if request.worker.worker_id in self.refused:
            raise InvalidArgument("not this one", field="worker_id")
        return await super().RegisterWorker(request, context)

    async def RemoveWorker(
        self, request: workers_pb2.RemoveWorkerRequest, context: Any
    ) -> workers_pb2.RemoveWorkerResponse:
        self.calls["RemoveWorker"] += 1
        return await super().RemoveWorker(request, context)

    async def GetStatus(
        self, request: types_pb2.GetStatusRequest, context: Any
    ) -> scheduler_pb2.SchedulerGetStatusResponse:
        uptime = time.monotonic() - self._started
        return scheduler_pb2.SchedulerGetStatusResponse(service=types_pb2.ServiceInfo(uptime_seconds=uptime))


@asynccontextmanager
async def worker_service() -> AsyncIterator[tuple[WorkerService, scheduler_pb2_grpc.SchedulerAsyncStub]]:
    """A service that runs, and a stub of it."""
    service = WorkerService()  # type: ignore[abstract]  # rpcs without a method answer UNIMPLEMENTED
    channel = open_channel(await service.start())
    expiring = asyncio.ensure_future(_expire(service))
    try:
        yield service, scheduler_pb2_grpc.SchedulerStub(channel)
    finally:
        expiring.cancel()
        await channel.close()
        await service.stop()


async def _expire(service: WorkerService) -> None:
    while True:
        service.registry.expire()
        await asyncio.sleep(0.02)
