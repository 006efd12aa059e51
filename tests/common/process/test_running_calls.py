"""Calls that a stopping server waits for, and those that it ends: whatever they are doing, and whenever they came."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.processes import DEADLINE_SECONDS

from kvscout_common.process import running_calls
from kvscout_common.rpc import stopping
from kvscout_common.rpc.guard import Guard
from kvscout_common.rpc.stopping import stop_serving

WATCH, STREAM, WORK = ("WatchLoads", "Lifecycle", "Select")
LARGE = b"x" * 4_000_000
"""More than flow control lets through to a client that does not read."""


class Server:
    """One rpc without an end in either shape, as their behaviours are set, and one that ends when it is told to."""

    def __init__(self) -> None:
        guard = Guard()
        self.calls = guard.calls
        self.server = grpc.aio.server(interceptors=(guard,))
        self.came = asyncio.Event()
        self.release = asyncio.Event()
        self.behaviour: Any = None
        handlers: dict[str, Any] = {
            WATCH: grpc.unary_stream_rpc_method_handler(self._endless),
            STREAM: grpc.stream_stream_rpc_method_handler(self._endless),
            WORK: grpc.unary_unary_rpc_method_handler(self._work),
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvscout.v1.Scheduler", handlers),))
        self.channel: Any = None

    async def _endless(self, request: Any, context: Any) -> None:
        self.came.set()
        await self.behaviour(context)

    async def _work(self, request: bytes, context: Any) -> bytes:
        self.came.set()
        await self.release.wait()
        return request

    async def call(self, name: str) -> Any:
        """A call that has reached its behaviour."""
        self.came.clear()
        call = self.open(name)
        await self.came.wait()
        return call

    def open(self, name: str) -> Any:
        """A call, wherever it is."""
        path = f"/kvscout.v1.Scheduler/{name}"
        if name == STREAM:
            return self.channel.stream_stream(path)()
        return (self.channel.unary_stream if name == WATCH else self.channel.unary_unary)(path)(b"request")


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    port = server.server.add_insecure_port("127.0.0.1:0")
    await server.server.start()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as server.channel:
                yield server
    finally:
        await server.server.stop(0)


async def for_ever(context: Any) -> None:
    await asyncio.Event().wait()


async def is_draining(call: Any) -> bool:
    return await call.code() is grpc.StatusCode.UNAVAILABLE and "draining" in await call.details()


@pytest.mark.parametrize("shape", [WATCH, STREAM])
async def test_an_endless_call_that_comes_while_the_last_work_is_waited_for_is_ended_too(shape: str) -> None:
    async with serving() as server:
        server.behaviour = for_ever
        work = await server.call(WORK)
        before = await server.call(shape)
        finishing = asyncio.create_task(server.calls.finish())
        assert await is_draining(before)
        assert await is_draining(server.open(shape))
        assert not finishing.done()
        server.release.set()
        assert await work == b"request"
        await finishing


async def test_an_endless_call_that_swallows_its_end_is_told_again() -> None:
    async def swallows(context: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    async with serving() as server:
        server.behaviour = swallows
        call = await server.call(STREAM)
        await server.calls.finish()
        assert await is_draining(call)


async def test_an_endless_call_that_never_ends_is_left_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running_calls, "CANCEL_AGAIN_SECONDS", 0.001)
    told = 0
    end = asyncio.Event()

    async def swallows(context: Any) -> None:
        nonlocal told
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                told += 1

    async with serving() as server:
        server.behaviour = swallows
        await server.call(STREAM)
        with caplog.at_level(logging.ERROR):
            await server.calls.finish()
        end.set()
    assert told == running_calls.MAX_CANCELS
    assert "/kvscout.v1.Scheduler/Lifecycle" in caplog.text


@pytest.mark.parametrize("shape", [WATCH, STREAM])
async def test_an_endless_call_whose_caller_reads_nothing_holds_no_server(
    monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    async def writes(context: Any) -> None:
        while True:
            await context.write(LARGE)

    monkeypatch.setattr(stopping, "LEAVE_SECONDS", 0.2)
    async with serving() as server:
        server.behaviour = writes
        await server.call(shape)
        await stop_serving(server.server, server.calls, None, grace_seconds=1000, immediate=asyncio.Event())
