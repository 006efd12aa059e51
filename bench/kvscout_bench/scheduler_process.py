"""A real scheduler process under measurement, and one gateway's Lifecycle stream to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, workers_pb2
from kvscout_bench.service_process import BLOCK_SIZE, MODEL, READY_SECONDS, ServiceProcess
from kvscout_bench.strangers import DriverFailed

SYSTEM_BLOCKS = 8
"""Leading blocks that a quarter of the prompts share."""
SYSTEM_PROMPTS = 4
HASH_BYTES = 8
OPERATIONS_A_MESSAGE = 16


class SchedulerProcess(ServiceProcess):
    """A scheduler with workers. Errors as of `ServiceProcess`.

    Args:
        workers: Registered at once, of one rank each.
        environment: Added to this process's.
    """

    def __init__(self, workers: int, *, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("scheduler", environment=environment)
        self.worker_ids = [f"worker-{number:04}" for number in range(workers)]
        with grpc.insecure_channel(self.address) as channel:
            grpc.channel_ready_future(channel).result(READY_SECONDS)
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            for worker_id in self.worker_ids:
                worker = workers_pb2.Worker(worker_id=worker_id, model=MODEL, block_size=BLOCK_SIZE, dp_size=1)
                stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), timeout=READY_SECONDS)


def prompts(count: int, blocks: int, worker_ids: Sequence[str], seed: int) -> list[bytes]:
    """Return serialised `SelectRequest`s without a request id: different prompts, each cached in part on every worker.

    Args:
        count: Number of prompts.
        blocks: Complete blocks of each.
        worker_ids: The workers.
        seed: Same seed, same prompts.
    """
    random = Random(seed)
    shared = min(SYSTEM_BLOCKS, blocks)
    systems = [[random.getrandbits(64) for _ in range(shared)] for _ in range(SYSTEM_PROMPTS)]
    made = []
    for number in range(count):
        hashes = [*systems[number % SYSTEM_PROMPTS], *(random.getrandbits(64) for _ in range(blocks - shared))]
        overlaps = types_pb2.Overlaps(
            worker_ids=worker_ids, device_blocks=[random.randrange(1, blocks + 1) for _ in worker_ids]
        )
        request = scheduler_pb2.SelectRequest(
            model=MODEL, block_hashes=hashes, isl_tokens=blocks * BLOCK_SIZE, overlaps=overlaps
        )
        made.append(request.SerializeToString())
    return made


class Gateway:
    """Runs requests through their lives on one stream, several at once: booked, prefill complete, freed.

    Operations answered in one message continue in one message.

    Args:
        requests: Serialised `SelectRequest`s, taken round-robin.
        outstanding: Requests at once.
        operations: Operations of one message at first; later messages follow the answers.
        held: Requests that are booked before all others, and stay.
    """

    def __init__(self, requests: Sequence[bytes], *, outstanding: int, operations: int, held: int = 0) -> None:
        self._requests = requests
        self._outstanding = outstanding
        self._operations = operations
        self._held = held
        self._begun = self._done = 0

    async def run(self, address: str, lifecycles: int, begins: Callable[[], None]) -> None:
        """Run `lifecycles` lives; return when the last one is over.

        Args:
            address: Address of the scheduler.
            lifecycles: Number counted; a tenth more comes first.
            begins: Called when the first one that counts begins.

        Raises:
            DriverFailed: An operation was refused.
        """
        warm = lifecycles // 10 + 1
        async with _open_stream(address) as call:
            await self._hold(call)
            await self._live(call, warm)
            begins()
            await self._live(call, lifecycles)

    async def _hold(self, call: Any) -> None:
        for start in range(0, self._held, self._operations):
            operations = []
            for number in range(start, min(start + self._operations, self._held)):
                operation = scheduler_pb2.LifecycleOperation(id=number)
                operation.select_and_reserve.MergeFromString(self._requests[number % len(self._requests)])
                operation.select_and_reserve.request_id = f"held-{number}"
                operations.append(operation)
            await call.write(self._message(operations))
            answered = 0
            while answered < len(operations):
                results = (await call.read()).results
                if refused := next((result for result in results if result.code), None):
                    raise DriverFailed(f"the scheduler refused a booking: {refused.message}")
                answered += len(results)

    async def _live(self, call: Any, lifecycles: int) -> None:
        last = self._begun + lifecycles
        while self._begun < min(last, self._done + self._outstanding):
            await call.write(self._message(self._begin(last) for _ in range(self._operations)))
        while self._done < last:
            message = await call.read()
            if message is grpc.aio.EOF:
                raise DriverFailed(f"the scheduler ended the stream: {await call.details()}")
            following = [self._next(result, last) for result in message.results]
            for start in range(0, len(following), self._operations):
                request = self._message(following[start : start + self._operations])
                if request.operations:
                    await call.write(request)

    def _begin(self, last: int) -> scheduler_pb2.LifecycleOperation | None:
        if self._begun == last:
            return None
        number = self._begun
        self._begun += 1
        operation = scheduler_pb2.LifecycleOperation(id=number * 3)
        operation.select_and_reserve.MergeFromString(self._requests[number % len(self._requests)])
        operation.select_and_reserve.request_id = f"request-{number}"
        operation.select_and_reserve.attempt_id = number + 1
        return operation

    def _next(self, result: scheduler_pb2.LifecycleResult, last: int) -> scheduler_pb2.LifecycleOperation | None:
        if result.code:
            raise DriverFailed(f"the scheduler refused an operation: {result.message}")
        number, stage = divmod(result.id, 3)
        if stage == 2:
            if result.free.outcome != scheduler_pb2.FREE_OUTCOME_FREED:
                raise DriverFailed("the scheduler lost a booking")
            self._done += 1
            return self._begin(last)
        ref = scheduler_pb2.RequestRef(model=MODEL, request_id=f"request-{number}", attempt_id=number + 1)
        if stage == 0:
            return scheduler_pb2.LifecycleOperation(id=result.id + 1, prefill_complete=ref)
        return scheduler_pb2.LifecycleOperation(id=result.id + 1, free=ref)

    @staticmethod
    def _message(operations: Any) -> scheduler_pb2.LifecycleRequest:
        return scheduler_pb2.LifecycleRequest(operations=filter(None, operations))


@asynccontextmanager
async def _open_stream(address: str) -> AsyncIterator[Any]:
    """Open a Lifecycle stream to a scheduler; it ends with the context."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        call = stub.Lifecycle()
        await call.write(scheduler_pb2.LifecycleRequest(hello=scheduler_pb2.LifecycleHello(owner_id="bench")))
        await call.read()
        yield call
        call.cancel()


def lifecycle_cpu_us(process: SchedulerProcess, gateway: Gateway, lifecycles: int) -> float:
    """Return the CPU time of the process a lifecycle, in microseconds; blocks."""
    before = 0

    def begins() -> None:
        nonlocal before
        before = process.cpu_ns()

    asyncio.run(gateway.run(process.address, lifecycles, begins))
    return (process.cpu_ns() - before) / lifecycles / 1e3


def bytes_a_booking(process: SchedulerProcess, bookings: int, *, blocks: int) -> float:
    """Return the memory of the process that an active request takes, in bytes; blocks. No two share a block.

    Args:
        process: Measured.
        bookings: Number measured; a quarter as many come first and stay, too.
        blocks: Complete blocks of each prompt.
    """

    async def book(stub: Any, numbers: range) -> None:
        for start in range(numbers.start, numbers.stop, OPERATIONS_A_MESSAGE):
            operations = []
            for number in range(start, min(start + OPERATIONS_A_MESSAGE, numbers.stop)):
                packed = Random(number).randbytes(blocks * HASH_BYTES)
                hashes = [int.from_bytes(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)]
                wanted = scheduler_pb2.SelectRequest(
                    model=MODEL, request_id=f"request-{number}", block_hashes=hashes, isl_tokens=blocks * BLOCK_SIZE
                )
                operations.append(scheduler_pb2.LifecycleOperation(id=number, select_and_reserve=wanted))
            await stub.write(scheduler_pb2.LifecycleRequest(operations=operations))
            answered = 0
            while answered < len(operations):
                answered += len((await stub.read()).results)

    async def run() -> float:
        async with _open_stream(process.address) as call:
            warm = bookings // 4
            await book(call, range(warm))
            before = process.rss_bytes()
            await book(call, range(warm, warm + bookings))
            return (process.rss_bytes() - before) / bookings

    return asyncio.run(run())
