"""A replica of the scheduler as a process, and gateways that use it."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import grpc
from chaos.members import Member

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2
from kvscout_common.errors import Unavailable
from kvscout_common.rpc.channel import call, open_channel
from support.free_ports import free_ports
from support.process_metrics import scrape
from support.processes import eventually

MODEL = "m"
BLOCK = 16
DEADLINE_SECONDS = 30.0

NO_ATTEMPTS: Mapping[str, int] = {}

State = tuple[dict[str, tuple[Any, ...]], dict[str, tuple[int, int, int]]]
"""Requests by id, loads by worker."""


def free_of(named: scheduler_pb2.RequestRef) -> scheduler_pb2.FreeRequest:
    """Its Free: the same fields."""
    return scheduler_pb2.FreeRequest.FromString(named.SerializeToString())


def ref(request_id: str, attempt_id: int) -> scheduler_pb2.RequestRef:
    """A request in one of its attempts."""
    return scheduler_pb2.RequestRef(model=MODEL, request_id=request_id, attempt_id=attempt_id)


class ReplicaClient:
    """One replica.

    Args:
        name: Its replica id.
        nats_url: Where it connects to.
        flags: Further flags.
        path: Where it finds further packages.
        module: Its main module.
    """

    def __init__(
        self,
        name: str,
        nats_url: str,
        *flags: str,
        path: Path | None = None,
        module: str = "kvscout_scheduler.main",
    ) -> None:
        self.name = name
        port = free_ports(1)[0]
        self.address = f"127.0.0.1:{port}"
        self.member = Member(
            name, module, "--port", str(port), "--metrics-port", "0", "--router-replica-sync",
            "--replica-id", name, "--nats-server", nats_url, "--router-track-output-blocks", "--seed", "1", *flags,
            path=path,
        )  # fmt: skip
        self._channels: list[grpc.aio.Channel] = []
        """One for each start."""

    async def start(self) -> None:
        """Starts the process, again too."""
        await self.member.start()
        # Gateways may be in a call on the one before: closing it would cancel them, not the call.
        self._channels.append(open_channel(self.address))

    async def kill(self) -> None:
        """SIGKILL."""
        await self.member.kill()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        assert self.member._process is not None
        self.member._process.send_signal(number)

    async def close(self) -> None:
        """Ends everything."""
        for channel in self._channels:
            await channel.close()
        await self.member.kill()

    @property
    def stub(self) -> Any:
        """Its rpcs."""
        return scheduler_pb2_grpc.SchedulerStub(self._channels[-1])

    async def rpc(self, name: str, request: Any) -> Any:
        return await call(getattr(self.stub, name), request, timeout=DEADLINE_SECONDS)

    async def register(self, *worker_ids: str) -> None:
        """Registers workers, for every replica, as soon as the registry in NATS is there."""
        for worker_id in worker_ids:
            worker = workers_pb2.Worker(worker_id=worker_id, model=MODEL, block_size=BLOCK)
            request = workers_pb2.RegisterWorkerRequest(worker=worker)

            async def registered(request: workers_pb2.RegisterWorkerRequest = request) -> bool:
                try:
                    await self.rpc("RegisterWorker", request)
                except Unavailable:
                    return False
                return True

            await eventually(registered, what="a registration")

    def knows_workers(self, number: int) -> Callable[[], Awaitable[bool]]:
        """Whether it knows so many workers."""

        async def knows() -> bool:
            listed = await self.rpc("ListWorkers", workers_pb2.ListWorkersRequest())
            return len(listed.workers) == number

        return knows

    async def book(self, request_id: str, *, attempt_id: int = 0) -> str:
        """A unary caller books a prompt of two blocks and a bit; the worker that got it."""
        request = scheduler_pb2.SelectRequest(
            model=MODEL, isl_tokens=2 * BLOCK + 1, request_id=request_id, attempt_id=attempt_id
        )
        answer = await self.rpc("SelectAndReserve", request)
        worker_id: str = answer.worker.worker_id
        return worker_id

    async def mark(self, request_id: str, *, attempt_id: int = 0) -> Any:
        request = scheduler_pb2.MarkPrefillCompleteRequest(model=MODEL, request_id=request_id, attempt_id=attempt_id)
        return await self.rpc("MarkPrefillComplete", request)

    async def state(self) -> State:
        """Its requests and loads, as replicas must agree on them."""
        listed = await self.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest(page_size=10_000))
        loads = await self.rpc("GetPotentialLoads", scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=MODEL))
        requests = {
            each.request.request_id: (
                each.request.attempt_id, each.worker.worker_id, each.phase, each.blocks, each.output_blocks,
                each.uncached_tokens, each.owner_id,
            )
            for each in listed.requests
        }  # fmt: skip
        return requests, {
            each.worker.worker_id: (each.active_requests, each.active_prefill_tokens, each.active_decode_blocks)
            for each in loads.loads
        }

    async def replica(self, name: str) -> Any:
        """What it knows of the newest incarnation of another replica."""
        known = await self.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest())
        return max((each for each in known.replicas if each.replica_id == name), key=lambda each: each.epoch)

    def has_problem(self, expected: bool) -> Callable[[], Awaitable[bool]]:
        """Whether it says that it works alone."""

        async def has() -> bool:
            try:
                known = await self.rpc("GetReplicas", scheduler_pb2.GetReplicasRequest())
            except Unavailable:
                return False  # channels of a process share their pauses between tries to connect to an address
            return bool(known.problem) is expected

        return has

    async def metrics(self) -> dict[str, float]:
        return await scrape(self.member)  # type: ignore[arg-type]  # both have a ready line


HEARTBEAT_MS = 1_000


class Reachable(Protocol):
    """Where a scheduler is called."""

    @property
    def stub(self) -> Any:
        """Its rpcs."""


class GatewayStream:
    """The Lifecycle stream of a gateway.

    Args:
        call: Of the rpc.
        attempts: Attempts of requests, 1 where they are not here.
    """

    def __init__(self, call: Any, attempts: Mapping[str, int]) -> None:
        self._call = call
        self._attempts = attempts
        self._ids = itertools.count(1)
        self._results: dict[int, Any] = {}
        self.unknown: list[str] = []

    def ref(self, request_id: str) -> scheduler_pb2.RequestRef:
        """A request of ours, in its attempt."""
        return ref(request_id, self._attempts.get(request_id, 1))

    async def hello(self, owner_id: str, in_flight: Iterable[str], seconds: float) -> None:
        """Says who it is; returns when the scheduler knows."""
        hello = scheduler_pb2.LifecycleHello(
            owner_id=owner_id,
            in_flight=map(self.ref, in_flight),
            opened_unix_us=time.time_ns() // 1000,
            heartbeat_ms=HEARTBEAT_MS if self._attempts is not NO_ATTEMPTS else 0,
        )
        async with asyncio.timeout(seconds):
            await self._call.write(scheduler_pb2.LifecycleRequest(hello=hello))
            await self._read()

    async def ask(self, *operations: dict[str, Any], seconds: float = DEADLINE_SECONDS) -> list[Any]:
        """Sends operations in one message; their results, in the order asked."""
        if not operations:
            return []
        made = [scheduler_pb2.LifecycleOperation(id=next(self._ids), **operation) for operation in operations]
        async with asyncio.timeout(seconds):
            await self._call.write(scheduler_pb2.LifecycleRequest(operations=made))
            while not all(each.id in self._results for each in made):
                await self._read()
        return [self._results.pop(each.id) for each in made]

    async def beat(self, seconds: float) -> None:
        """Is received, and hears."""
        async with asyncio.timeout(seconds):
            await self._call.write(scheduler_pb2.LifecycleRequest())
            await self._read()

    async def book(
        self, *request_ids: str, seconds: float = DEADLINE_SECONDS, hashes: int = 2, **fields: Any
    ) -> list[Any]:
        """Books prompts that share nothing."""
        return await self.ask(
            *(
                {
                    "select_and_reserve": scheduler_pb2.SelectRequest(
                        model=MODEL,
                        isl_tokens=hashes * BLOCK + 1,
                        request_id=request_id,
                        attempt_id=self._attempts.get(request_id, 1),
                        block_hashes=[hash((request_id, n)) % 2**64 for n in range(hashes)],
                        **fields,
                    )
                }
                for request_id in request_ids
            ),
            seconds=seconds,
        )

    async def _read(self) -> None:
        message = await self._call.read()
        if message is grpc.aio.EOF:
            raise ConnectionError("the stream has ended")
        self.unknown += [name.request_id for name in message.unknown_in_flight]
        self._results.update({result.id: result for result in message.results})


@asynccontextmanager
async def gateway(
    replica: Reachable,
    owner_id: str,
    in_flight: Iterable[str] = (),
    seconds: float = DEADLINE_SECONDS,
    attempts: Mapping[str, int] = NO_ATTEMPTS,
) -> AsyncIterator[GatewayStream]:
    """A gateway's stream for the length of a block; one that tells of attempts promises heartbeats, too."""
    call = replica.stub.Lifecycle()
    stream = GatewayStream(call, attempts)
    try:
        await stream.hello(owner_id, in_flight, seconds)
        yield stream
    finally:
        call.cancel()
