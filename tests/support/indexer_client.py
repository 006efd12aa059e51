"""An indexer to test, in this process or as a real one, behind the same few calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.registry.backends import Backends
from kvscout_common.rpc.channel import call, open_channel
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.servicer import IndexerServicer
from support import processes

MODEL = "tiny"
BLOCK_SIZE = 4

Rpc = Callable[[str, Any], Awaitable[Any]]


class Publishing(Protocol):
    """Where an engine's rank publishes."""

    @property
    def endpoint(self) -> str: ...

    @property
    def replay_endpoint(self) -> str: ...


class IndexerClient:
    """Rpcs of an indexer.

    Args:
        rpc: Calls one by its name.
    """

    def __init__(self, rpc: Rpc) -> None:
        self.rpc = rpc

    async def register(
        self,
        *engines: Publishing,
        worker_id: str = "w",
        update: bool = False,
        bind: bool = False,
        topic: str = "",
        **fields: Any,
    ) -> None:
        """Registers (or updates) a worker whose ranks publish as `engines` do."""
        fields = {"model": MODEL, "block_size": BLOCK_SIZE, "dp_size": max(len(engines), 1), **fields}
        endpoints = [
            workers_pb2.EventEndpoint(
                dp_rank=rank + fields.get("dp_start_rank", 0),
                endpoint=engine.endpoint,
                replay_endpoint=engine.replay_endpoint,
                topic=topic,
                bind=bind,
            )
            for rank, engine in enumerate(engines)
        ]
        worker = workers_pb2.Worker(worker_id=worker_id, event_endpoints=endpoints, **fields)
        if update:
            await self.rpc("UpdateWorker", workers_pb2.UpdateWorkerRequest(worker=worker))
        else:
            await self.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker))

    async def matches(self, tokens: Sequence[int], **fields: Any) -> indexer_pb2.FindMatchesResponse:
        """Who holds how much of a prompt."""
        request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=tokens, **fields)
        answer: indexer_pb2.FindMatchesResponse = await self.rpc("FindMatches", request)
        return answer

    async def overlaps(self, tokens: Sequence[int], **fields: Any) -> dict[tuple[str, int], int]:
        """Device overlap by worker rank; those without any are left out."""
        found = (await self.matches(tokens, **fields)).overlaps
        ranks = found.dp_ranks or [0] * len(found.worker_ids)
        rows = zip(found.worker_ids, ranks, found.device_blocks, strict=True)
        return {(worker, rank): blocks for worker, rank, blocks in rows if blocks}

    async def overlap(self, tokens: Sequence[int], worker_id: str = "w", dp_rank: int = 0, **fields: Any) -> int:
        """Device overlap of one worker rank, in blocks."""
        return (await self.overlaps(tokens, **fields)).get((worker_id, dp_rank), 0)

    async def status(self, worker_id: str = "w", dp_rank: int = 0) -> indexer_pb2.SourceStatus:
        """State of one rank's events."""
        status: indexer_pb2.IndexerGetStatusResponse = await self.rpc("GetStatus", types_pb2.GetStatusRequest())
        return next(s for s in status.sources if (s.worker.worker_id, s.worker.dp_rank) == (worker_id, dp_rank))

    async def until(
        self, reached: Callable[[indexer_pb2.SourceStatus], bool], worker_id: str = "w", dp_rank: int = 0
    ) -> indexer_pb2.SourceStatus:
        """Waits for a state of one rank's events and returns it."""
        status = await self.status(worker_id, dp_rank)
        try:
            async with asyncio.timeout(processes.DEADLINE_SECONDS):
                while not reached(status):
                    await asyncio.sleep(0.002)
                    status = await self.status(worker_id, dp_rank)
        except TimeoutError:
            raise AssertionError(f"state not reached; it is:\n{status}") from None
        return status

    async def until_applied(self, event_id: int, worker_id: str = "w", dp_rank: int = 0) -> indexer_pb2.SourceStatus:
        """Waits until everything up to a batch is applied and nothing is being recovered; -1 = nothing came."""
        return await self.until(
            lambda s: (
                (s.last_event_id if s.HasField("last_event_id") else -1) == event_id
                and s.state != indexer_pb2.SOURCE_STATE_REPLAYING
            ),
            worker_id,
            dp_rank,
        )


@asynccontextmanager
async def local_indexer(config: IndexerConfig | None = None) -> AsyncIterator[tuple[IndexerClient, Indexer]]:
    """An indexer on the running loop with everything that runs beside its server; a crash of it fails the block."""
    config = config or IndexerConfig()
    backends = Backends.of_process("kvscout-indexer", config.server, config.nats, config.admit)
    indexer = Indexer(config, backends)
    servicer = IndexerServicer(indexer, None)

    async def rpc(name: str, request: Any) -> Any:
        if name == "FindMatches":
            return servicer.find(request, request.tenant)
        return await getattr(servicer, name)(request, None)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(make(), name=name) for name, make in {**backends.tasks, **indexer.tasks()}.items()
            ]
            yield IndexerClient(rpc), indexer
            for task in tasks:
                task.cancel()
    finally:
        await indexer.close()
        await backends.close()


@asynccontextmanager
async def indexer_process(
    *flags: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[IndexerClient, processes.Running]]:
    """A real indexer process; `environment` is added to this one's."""
    async with processes.running(
        "kvscout_indexer.main", *flags, environment={**os.environ, **(environment or {})}
    ) as running:
        channel = open_channel(running.address)
        stub = indexer_pb2_grpc.IndexerStub(channel)

        async def rpc(name: str, request: Any) -> Any:
            return await call(getattr(stub, name), request, timeout=10)

        try:
            yield IndexerClient(rpc), running
        finally:
            await channel.close()
