"""A gateway with real helpers and real mockers, for tests."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from kvscout.v1 import (
    gateway_pb2,
    gateway_pb2_grpc,
    indexer_pb2,
    indexer_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    workers_pb2,
)
from kvscout_common import errors
from kvscout_common.rpc.channel import call, open_channel
from support.free_ports import free_ports
from support.grpc_relay import Relay, relaying
from support.mocker_process import MockerProcess, running_mocker
from support.processes import Running, eventually, running

MODEL = "mock"
CALL_SECONDS = 60.0
in_one_process = False
"""Whether stacks have gateway, indexer and scheduler in one process; the fixture `each_mode` sets it."""
_ids = itertools.count()


@dataclass(slots=True)
class Answer:
    """Everything that one Generate call sent."""

    request_id: str = ""
    routes: list[gateway_pb2.RouteResponse] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: gateway_pb2.Usage | None = None
    finish_reason: int = 0

    @property
    def route(self) -> gateway_pb2.RouteResponse:
        """Where it ran in the end."""
        return self.routes[-1]

    def add(self, message: gateway_pb2.GenerateResponse) -> None:
        """Takes one message."""
        self.request_id = message.request_id or self.request_id
        if message.HasField("route"):
            self.routes.append(message.route)
        self.token_ids += message.token_ids
        self.finish_reason = message.finish_reason or self.finish_reason
        if message.HasField("usage"):
            self.usage = message.usage


class GatewayClient:
    """Stubs of a gateway and of its helpers, with the calls that tests make often."""

    def __init__(self, gateway: str, scheduler: str, indexer: str) -> None:
        self.gateway = gateway
        self._channels = [open_channel(address) for address in (gateway, scheduler, indexer)]
        self.stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(self._channels[0])
        self.scheduler: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(self._channels[1])
        self.indexer: indexer_pb2_grpc.IndexerAsyncStub = indexer_pb2_grpc.IndexerStub(self._channels[2])

    async def close(self) -> None:
        """Closes the channels."""
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def route(self, token_ids: Sequence[int] = (), **fields: Any) -> gateway_pb2.RouteResponse:
        """Calls Route."""
        fields.setdefault("model", MODEL)
        request = gateway_pb2.RouteRequest(token_ids=token_ids, **fields)
        return await call(self.stub.Route, request, timeout=CALL_SECONDS)

    def start(
        self, token_ids: Iterable[int], *, max_tokens: int = 4, **fields: Any
    ) -> grpc.aio.UnaryStreamCall[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse]:
        """Starts Generate and gives the running call."""
        fields.setdefault("model", MODEL)
        stop = gateway_pb2.StopConditions(max_tokens=max_tokens)
        request = gateway_pb2.GenerateRequest(token_ids=token_ids, stop_conditions=stop, **fields)
        running_call: Any = self.stub.Generate(request, timeout=CALL_SECONDS)
        return running_call  # type: ignore[no-any-return]

    async def generate(self, token_ids: Iterable[int], *, max_tokens: int = 4, **fields: Any) -> Answer:
        """Runs Generate to its end.

        Raises:
            grpc.aio.AioRpcError: As the gateway answers.
        """
        answer = Answer()
        async for message in self.start(token_ids, max_tokens=max_tokens, **fields):
            answer.add(message)
        return answer

    async def register(self, worker: workers_pb2.Worker, *, lease_seconds: int = 0) -> None:
        """Registers a worker at the gateway, and at its helpers, for which the gateway itself waits for 2 s only."""
        request = workers_pb2.RegisterWorkerRequest(worker=worker, lease_seconds=lease_seconds)

        async def everywhere() -> bool:
            try:
                await call(self.stub.RegisterWorker, request, timeout=CALL_SECONDS)
            except errors.Unavailable as error:
                if "not everywhere yet" not in str(error):
                    raise
                return False
            return True

        await eventually(everywhere, what=f"{worker.worker_id} registered everywhere")

    async def status(self) -> gateway_pb2.GatewayGetStatusResponse:
        """The gateway's status."""
        return await call(self.stub.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)

    async def sources(self) -> dict[str, indexer_pb2.SourceStatus]:
        """What the indexer tells of each worker's events; of its last rank."""
        status = await call(self.indexer.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
        return {source.worker.worker_id: source for source in status.sources}

    async def active(self) -> list[scheduler_pb2.ActiveRequest]:
        """Requests that the scheduler has as active."""
        request = scheduler_pb2.ListActiveRequestsRequest()
        return list((await call(self.scheduler.ListActiveRequests, request, timeout=CALL_SECONDS)).requests)

    async def loads(self, model: str = MODEL) -> list[tuple[int, int, int]]:
        """(active requests, prefill tokens, decode blocks) of each worker rank."""
        request = scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=model)
        answer = await call(self.scheduler.GetPotentialLoads, request, timeout=CALL_SECONDS)
        return [(w.active_requests, w.active_prefill_tokens, w.active_decode_blocks) for w in answer.loads]

    async def until_idle(self, model: str = MODEL) -> None:
        """Waits until nothing is booked any more."""

        async def idle() -> bool:
            return not any(map(any, await self.loads(model))) and not await self.active()

        await eventually(idle, what="all loads 0")

    async def until_active(self) -> None:
        """Waits until something is booked."""
        await eventually(self.active, what="an active request")

    async def until_known(self, *worker_ids: str) -> None:
        """Waits until the gateway lists these workers."""

        async def known() -> bool:
            return set(worker_ids) <= set(await self.known())

        await eventually(known, what=f"{worker_ids} known")

    async def known(self) -> dict[str, workers_pb2.WorkerEntry]:
        """What the gateway lists, by worker id."""
        listed = await call(self.stub.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=CALL_SECONDS)
        return {entry.worker.worker_id: entry for entry in listed.workers}

    async def overlap(self, token_ids: Sequence[int], **fields: Any) -> dict[str, int]:
        """Device overlap by worker id, as the indexer has it."""
        fields.setdefault("model", MODEL)
        request = indexer_pb2.FindMatchesRequest(token_ids=token_ids, **fields)
        overlaps = (await call(self.indexer.FindMatches, request, timeout=CALL_SECONDS)).overlaps
        return dict(zip(overlaps.worker_ids, overlaps.device_blocks, strict=True))

    async def until_indexed(self, token_ids: Sequence[int], blocks: int, at: str = "", **fields: Any) -> None:
        """Waits until a worker, or the one that is named, holds this many blocks of a prompt."""

        async def held() -> bool:
            found = await self.overlap(token_ids, **fields)
            return max((found.get(at, 0),) if at else found.values(), default=0) >= blocks

        await eventually(held, what=f"{blocks} blocks indexed")


@dataclass(slots=True)
class Stack:
    """Processes of one test, and a client."""

    indexer: Running
    scheduler: Running
    gateway: Running
    mockers: list[MockerProcess]
    client: GatewayClient
    relay: Relay | None
    """Between gateway and scheduler, where asked for; None in one process."""
    indexers: list[Running]
    """One a shard; the first is `indexer`."""


@asynccontextmanager
async def together(*contexts: AbstractAsyncContextManager[Any]) -> AsyncIterator[list[Any]]:
    """Enters and leaves contexts at the same time, as starting and stopping processes is mostly waiting."""
    async with AsyncExitStack() as entered:
        entering = await asyncio.gather(*(c.__aenter__() for c in contexts), return_exceptions=True)

        async def leave() -> None:
            ready = [c for c, e in zip(contexts, entering, strict=True) if not isinstance(e, BaseException)]
            for error in await asyncio.gather(*(c.__aexit__(None, None, None) for c in ready), return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error

        entered.push_async_callback(leave)
        for result in entering:
            if isinstance(result, BaseException):
                raise result
        yield list(entering)


@asynccontextmanager
async def connected(gateway: Running, scheduler: Running, indexer: Running) -> AsyncIterator[GatewayClient]:
    """A client of a gateway and its helpers."""
    client = GatewayClient(gateway.address, scheduler.address, indexer.address)
    try:
        yield client
    finally:
        await client.close()


class Services(NamedTuple):
    """A gateway and its helpers; in one process all are the same."""

    gateway: Running
    scheduler: Running
    indexers: list[Running]
    """One a shard."""
    relay: Relay | None = None
    """Between gateway and scheduler, where asked for; None in one process."""

    @property
    def indexer(self) -> Running:
        """The first one."""
        return self.indexers[0]


@asynccontextmanager
async def running_services(
    *gateway_flags: str,
    scheduler_flags: Sequence[str] = (),
    indexer_flags: Sequence[str] = (),
    shards: int = 1,
    relay: bool = False,
) -> AsyncIterator[Services]:
    """Indexer, scheduler and gateway.

    Args:
        gateway_flags: Further flags of the gateway.
        scheduler_flags: Flags of the scheduler.
        indexer_flags: Flags of every indexer.
        shards: Indexers, each of which has a share of the workers.
        relay: Put a relay between gateway and scheduler; in one process there is nothing between them.
    """
    if in_one_process:
        assert shards == 1, "shards are processes of their own"
        async with running("kvscout_serve.main", *gateway_flags, *scheduler_flags, *indexer_flags) as served:
            yield Services(served, served, [served])
        return
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        names = [f"{index}/{shards}" for index in range(shards)]
        # Some tests restart them where they were.
        place, *places = (("--port", str(port)) for port in free_ports(1 + shards))
        processes = [
            running("kvscout_indexer.main", "--shard", name, *port, *indexer_flags)
            for name, port in zip(names, places, strict=True)
        ]
        starts = together(running("kvscout_scheduler.main", *place, *scheduler_flags), *processes)
        scheduler, *indexers = await enter(starts)
        between = await enter(relaying(scheduler.address)) if relay else None
        helpers = ["--scheduler", between.address if between else scheduler.address]
        for name, one in zip(names, indexers, strict=True):
            helpers += ["--indexer", f"{name}={one.address}" if shards > 1 else one.address]
        # A machine that is busy with other tests must not look like helpers that are slow.
        timeouts = ("--indexer-timeout-ms", "2000", "--scheduler-timeout-ms", "3000")
        gateway = await enter(running("kvscout_gateway.main", *helpers, *timeouts, *gateway_flags))
        yield Services(gateway, scheduler, indexers, between)


@asynccontextmanager
async def running_stack(
    *gateway_flags: str, mockers: Sequence[Sequence[str]] = ((), ()), **services: Any
) -> AsyncIterator[Stack]:
    """Indexer, scheduler, gateway and mockers w0, w1, … registered at the gateway.

    Args:
        gateway_flags: Further flags of the gateway.
        mockers: Flags of each mocker.
        services: Further arguments of `running_services`.
    """
    engines = [running_mocker(*flags) for flags in mockers]
    async with together(running_services(*gateway_flags, **services), *engines) as (served, *started):
        async with connected(served.gateway, served.scheduler, served.indexer) as client:
            for index, mocker in enumerate(started):
                await client.register(mocker_worker(f"w{index}", mocker))
            gateway, scheduler, indexers, relay = served
            yield Stack(served.indexer, scheduler, gateway, started, client, relay, indexers)


async def until_all_indexed(stack: Stack) -> None:
    """Waits until the indexer has applied everything that the engines published."""
    published = [len(await mocker.replay(0)) - 1 for mocker in stack.mockers]

    async def applied() -> bool:
        status = await call(stack.client.indexer.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
        last = {s.worker.worker_id: s.last_event_id + 1 if s.HasField("last_event_id") else 0 for s in status.sources}
        return all(last[f"w{index}"] >= count for index, count in enumerate(published))

    await eventually(applied, what="all events applied")


def mocker_worker(worker_id: str, mocker: MockerProcess, **fields: Any) -> workers_pb2.Worker:
    """The registration of a mocker."""
    fields.setdefault("model", MODEL)
    fields.setdefault("block_size", 16)
    fields.setdefault("total_kv_blocks", 4095)
    fields.setdefault("engine", workers_pb2.ENGINE_KIND_MOCK)
    return workers_pb2.Worker(
        worker_id=worker_id,
        http_endpoint=mocker.url,
        dp_size=len(mocker.ranks),
        event_endpoints=[
            workers_pb2.EventEndpoint(dp_rank=rank["dp_rank"], endpoint=rank["events"], replay_endpoint=rank["replay"])
            for rank in mocker.ranks
        ],
        **fields,
    )


def fresh_prompt(tokens: int) -> array[int]:
    """A prompt that no other test of this process has: nothing of it is cached anywhere."""
    start = 1_000 + next(_ids) * 7_919
    return array("I", (start + index for index in range(tokens)))
