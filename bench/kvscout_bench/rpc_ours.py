"""Our side of `kvscout bench rpc`: indexer, scheduler and gateway on one transport, and calls to them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import grpc

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, workers_pb2
from kvscout_bench.gateway_stack import register_workers, start_services
from kvscout_bench.rpc_fixture import TOKENS, Publishers, prompt, require_all
from kvscout_bench.service_process import BLOCK_SIZE, MODEL, MeasuredProcess
from kvscout_bench.strangers import DriverFailed
from kvscout_common.hashing import block_hashes
from kvscout_common.rpc.channel import open_channel

INDEXER, SCHEDULER, GATEWAY = "/kvscout.v1.Indexer/", "/kvscout.v1.Scheduler/", "/kvscout.v1.Gateway/"
CALL_SECONDS = 30.0

Call = Callable[[int], Awaitable[None]]
"""Makes one call and waits for its end, by its number."""


class OurSide:
    """The services with a number of workers. Errors as of `ServiceProcess`.

    Args:
        transport: As of `--rpc-transport`.
        workers: Number of workers.
        running: Ends them.
    """

    def __init__(self, transport: str, workers: int, running: ExitStack) -> None:
        gateway, scheduler, indexer = start_services(transport, running, http_port=-1)
        self.processes: Mapping[str, MeasuredProcess] = {
            "gateway": gateway,
            "scheduler": scheduler,
            "indexer": indexer,
        }
        self._indexer, self._scheduler, self._gateway = indexer.address, scheduler.address, gateway.address
        self._ids = itertools.count()
        with Publishers(workers) as publishers:
            register_workers(
                gateway.address,
                (
                    workers_pb2.Worker(
                        worker_id=worker_id, event_endpoints=[workers_pb2.EventEndpoint(endpoint=endpoint)]
                    )
                    for worker_id, endpoint in publishers.endpoints.items()
                ),
            )
            indexer.until_applied(publishers.publish())
        for tokens in TOKENS:
            found = indexer.stub.FindMatches(find_request(tokens), timeout=CALL_SECONDS)
            require_all(found.overlaps.device_blocks, tokens, workers)

    async def call_of(self, kind: str, tokens: int, stack: AsyncExitStack) -> Call:
        """Return the call of a kind.

        Raises:
            KeyError: There is no such kind.
        """
        make = {
            "find": self._find,
            "python": self._python,
            "message": self._message,
            "route": self._route,
            "life": self._life,
            "stream": self._stream,
        }[kind]
        return await make(tokens, stack)

    async def _find(self, tokens: int, stack: AsyncExitStack) -> Call:
        indexer = await stack.enter_async_context(open_channel(self._indexer))
        return _unary(indexer.unary_unary(f"{INDEXER}FindMatches"), find_request(tokens).SerializeToString())

    async def _python(self, tokens: int, stack: AsyncExitStack) -> Call:
        indexer = await stack.enter_async_context(open_channel(self._indexer))
        request = workers_pb2.KeepAliveRequest(worker_ids=["worker-0"]).SerializeToString()
        return _unary(indexer.unary_unary(f"{INDEXER}KeepAlive"), request)

    async def _message(self, tokens: int, stack: AsyncExitStack) -> Call:
        indexer = await stack.enter_async_context(open_channel(self._indexer))
        find = Stream(indexer.stream_stream(f"{INDEXER}StreamFindMatches")(), stack)
        request = indexer_pb2.StreamFindMatchesRequest(requests=[find_request(tokens)]).SerializeToString()

        async def call(number: int) -> None:
            await find(request)

        return call

    async def _route(self, tokens: int, stack: AsyncExitStack) -> Call:
        gateway = await stack.enter_async_context(open_channel(self._gateway))
        request = gateway_pb2.RouteRequest(model=MODEL, token_ids=prompt(tokens)).SerializeToString()
        return _unary(gateway.unary_unary(f"{GATEWAY}Route"), request)

    async def _life(self, tokens: int, stack: AsyncExitStack) -> Call:
        """Return a request's life as four calls: find, reserve, prefill complete, free."""
        indexer = await stack.enter_async_context(open_channel(self._indexer))
        scheduler = await stack.enter_async_context(open_channel(self._scheduler))
        find: Any = indexer.unary_unary(f"{INDEXER}FindMatches")
        select: Any = scheduler.unary_unary(f"{SCHEDULER}SelectAndReserve")
        mark: Any = scheduler.unary_unary(f"{SCHEDULER}MarkPrefillComplete")
        free: Any = scheduler.unary_unary(f"{SCHEDULER}Free")
        query, wanted = find_request(tokens).SerializeToString(), _wanted(tokens).SerializeToString()

        async def call(number: int) -> None:
            found = indexer_pb2.FindMatchesResponse.FromString(await find(query, timeout=CALL_SECONDS))
            named = self._named()
            rest = scheduler_pb2.SelectRequest(request_id=named.request_id, attempt_id=1, overlaps=found.overlaps)
            # Messages in a row are one message.
            await select(wanted + rest.SerializeToString(), timeout=CALL_SECONDS)
            ref = named.SerializeToString()
            await mark(ref, timeout=CALL_SECONDS)
            await free(ref, timeout=CALL_SECONDS)

        return call

    async def _stream(self, tokens: int, stack: AsyncExitStack) -> Call:
        """Return the same as messages of two open streams."""
        indexer = await stack.enter_async_context(open_channel(self._indexer))
        scheduler = await stack.enter_async_context(open_channel(self._scheduler))
        find = Stream(indexer.stream_stream(f"{INDEXER}StreamFindMatches")(), stack)
        operations = Operations(scheduler.stream_stream(f"{SCHEDULER}Lifecycle")(), stack)
        await operations.open(f"bench-{next(self._ids)}")
        query = indexer_pb2.StreamFindMatchesRequest(requests=[find_request(tokens)]).SerializeToString()
        wanted = _wanted(tokens)

        async def call(number: int) -> None:
            answer = indexer_pb2.StreamFindMatchesResponse.FromString(await find(query))
            named = self._named()
            overlaps = answer.results[0].response.overlaps
            selection = scheduler_pb2.SelectRequest(request_id=named.request_id, attempt_id=1, overlaps=overlaps)
            selection.MergeFrom(wanted)
            await operations(select_and_reserve=selection)
            await operations(prefill_complete=named)
            await operations(free=named)

        return call

    def _named(self) -> scheduler_pb2.RequestRef:
        return scheduler_pb2.RequestRef(model=MODEL, request_id=f"request-{next(self._ids)}", attempt_id=1)


class Stream:
    """An open stream on which each message is answered by one, in order.

    Args:
        stream: Stream of bytes.
        stack: Ends it.
    """

    def __init__(self, stream: Any, stack: AsyncExitStack) -> None:
        self._stream = stream
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()
        stack.callback(stream.cancel)

    async def __call__(self, message: bytes) -> bytes:
        """Send a message and return its answer.

        Raises:
            ConnectionError: The stream ended.
        """
        async with self._writing:
            await self._stream.write(message)
            # The next message is written while this one's answer is awaited.
            reading = asyncio.ensure_future(self._read())
        return await reading

    async def _read(self) -> bytes:
        async with self._reading:
            answer: Any = await self._stream.read()
        if answer is grpc.aio.EOF:
            raise ConnectionError("the stream ended")
        return bytes(answer)


class Operations:
    """Operations on an open Lifecycle stream, whose results come several in a message and in any order.

    Args:
        stream: Stream of bytes; nothing was written yet.
        stack: Ends it.
    """

    def __init__(self, stream: Any, stack: AsyncExitStack) -> None:
        self._stream = stream
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[scheduler_pb2.LifecycleResult]] = {}
        self._writing = asyncio.Lock()
        stack.callback(stream.cancel)
        self._reader: asyncio.Task[None] | None = None
        self._stack = stack

    async def open(self, owner_id: str) -> None:
        """Send the owner of the operations."""
        hello = scheduler_pb2.LifecycleHello(owner_id=owner_id)
        await self._stream.write(scheduler_pb2.LifecycleRequest(hello=hello).SerializeToString())
        await self._stream.read()
        self._reader = asyncio.create_task(self._read())
        self._stack.callback(self._reader.cancel)

    async def __call__(self, **operation: Any) -> None:
        """Send an operation and wait for its result.

        Raises:
            DriverFailed: It was refused.
            ConnectionError: The stream ended.
        """
        number = next(self._ids)
        answered = self._waiting[number] = asyncio.get_running_loop().create_future()
        made = scheduler_pb2.LifecycleOperation(id=number, **operation)
        request = scheduler_pb2.LifecycleRequest(operations=[made]).SerializeToString()
        async with self._writing:
            await self._stream.write(request)
        result = await answered
        if result.code:
            raise DriverFailed(f"the scheduler refused an operation: {result.message}")

    async def _read(self) -> None:
        while (message := await self._stream.read()) is not grpc.aio.EOF:
            for result in scheduler_pb2.LifecycleResponse.FromString(message).results:
                self._waiting.pop(result.id).set_result(result)
        for waiting in self._waiting.values():
            waiting.set_exception(ConnectionError("the stream ended"))


def _unary(method: Any, request: bytes) -> Call:
    async def call(number: int) -> None:
        await method(request, timeout=CALL_SECONDS)

    return call


def find_request(tokens: int) -> indexer_pb2.FindMatchesRequest:
    """Return the query for the prompt of `tokens` tokens."""
    return indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=prompt(tokens))


def _wanted(tokens: int) -> scheduler_pb2.SelectRequest:
    """Return the booking of a prompt, without its overlaps and its name."""
    hashes = block_hashes(prompt(tokens), BLOCK_SIZE)
    return scheduler_pb2.SelectRequest(model=MODEL, block_hashes=hashes, isl_tokens=tokens)
