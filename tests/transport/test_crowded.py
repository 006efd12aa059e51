"""As many connections as may be: idle ones of strangers make room, those of known clients and busy ones stay."""

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.http2_resets import (
    DATA,
    EMPTY_MESSAGE,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    headers_of,
)
from support.http_peers import TRANSPORTS, get, made_of, served
from support.processes import eventually
from transport.echo_service import SERVICE, grpcio_channel, native, native_channel

from kvscout_common.hashing import native_available
from kvscout_common.http.http import HttpCall, HttpLimits
from kvscout_common.identity.identity import TokenTable
from kvscout_common.rpc.guard import Guard
from kvscout_common.transport import Transport

MOST = 20
KEPT_ALIVE = b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"

Peer = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with made_of(request.param):
        yield request.param


async def handle(call: HttpCall) -> None:
    """Waits, or answers; says who is known."""
    if call.path == "/wait":
        await asyncio.Event().wait()
    if call.path == "/known":
        call.trust()
    await call.respond(200, [], b"ok")


async def asks(port: int, path: bytes) -> Peer:
    """A client that has asked something; the answer is read unless there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(KEPT_ALIVE % path)
    if path != b"wait":
        await reader.readuntil(b"ok")
    return reader, writer


async def is_open(peer: Peer) -> bool:
    """Whether a connection that is idle can be used again."""
    reader, writer = peer
    try:
        writer.write(KEPT_ALIVE % b"")
        await reader.readuntil(b"ok")
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    return True


async def silent(port: int, count: int) -> list[Peer]:
    """Connections on which nothing is said."""
    return [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]


async def closed(peer: Peer, within_seconds: float = 0.01) -> bool:
    """Whether the server closes a connection on which nothing is said."""
    try:
        async with asyncio.timeout(within_seconds):
            return await peer[0].read(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


async def test_strangers_that_say_nothing_do_not_keep_others_out(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    if transport is not Transport.NATIVE:
        pytest.skip("aiohttp closes new connections alone")
    async with served(handle, HttpLimits(connections=MOST)) as (server, port):
        strangers = await silent(port, 3 * MOST)
        for _ in range(MOST):
            _, writer = await asks(port, b"")
            writer.close()
        assert server.stats()["connections"] <= MOST
        assert server.stats()["connections_evicted"] >= 2 * MOST
        assert server.stats()["connections_refused"] == 0
        assert [await closed(peer, 30.0) for peer in strangers[: 2 * MOST]] == [True] * 2 * MOST
        for _, writer in strangers:
            writer.close()
    assert sum("20 connections are open" in line for line in caplog.messages) == 1


async def test_who_is_known_or_waits_for_an_answer_is_not_closed_for_a_stranger(transport: Transport) -> None:
    if transport is not Transport.NATIVE:
        pytest.skip("aiohttp closes new connections alone")
    async with served(handle, HttpLimits(connections=MOST)) as (_, port):
        busy = await asks(port, b"wait")
        known = await asks(port, b"known")
        asked = await asks(port, b"")
        strangers = await silent(port, MOST - 2)
        assert await is_open(asked), "who has asked nothing goes first"
        more = [await asks(port, b"") for _ in range(MOST)]
        assert not await is_open(asked), "it was idle for the longest"
        assert await is_open(known)
        assert not await closed(busy)
        for _, writer in (busy, known, asked, *strangers, *more):
            writer.close()


async def test_where_nobody_is_idle_new_connections_are_closed(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    begun = 0

    async def wait(call: HttpCall) -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    async with served(wait, HttpLimits(connections=MOST)) as (server, port):
        busy = [await asks(port, b"wait") for _ in range(MOST)]
        known = get("/known")
        await eventually(lambda: begun == MOST, what="all are busy")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(known)
        try:
            assert await reader.read() == b""
        except ConnectionError:
            pass
        assert server.stats()["connections_refused"] == 1
        assert server.stats()["connections_evicted"] == 0
        for peer in busy:
            assert not await closed(peer)
            peer[1].close()
        writer.close()
    assert "20 connections are open" in caplog.text


@pytest.mark.skipif(not native_available(), reason="how many connections grpc takes is its own to limit")
async def test_callers_get_through_a_crowd_of_connections_on_which_nobody_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens: [{token: secret, role: admin, tenant: team}]")
    known = (("authorization", "Bearer secret"),)
    async with (
        native(guard=Guard(TokenTable.load(path)), max_connections=MOST) as server,
        grpcio_channel(server.port) as channel,
    ):
        unary = channel.unary_unary(f"/{SERVICE}/Unary")
        await unary(b"{}", metadata=known, timeout=20)
        strangers = await silent(server.port, 5 * MOST)
        for _, writer in strangers:
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
        await eventually(lambda: bool(server.server.stats()["connections_evicted"] >= 4 * MOST))
        for _ in range(5):
            async with native_channel(server.port) as other:
                await other.unary_unary(f"/{SERVICE}/Unary")(b"{}", metadata=known, timeout=20)
        assert channel.get_state() is grpc.ChannelConnectivity.READY
        await unary(b"{}", metadata=known, timeout=20)
        assert server.server.stats()["connections_refused"] == 0
        assert server.server.stats()["connections"] <= MOST
        assert sum("20 connections are open" in line for line in caplog.messages) == 1
        for _, writer in strangers:
            writer.close()


@contextmanager
def without_descriptors() -> Iterator[None]:
    """This process can open no file meanwhile."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(not native_available(), reason="out of descriptors grpc and asyncio accept nobody")
def test_out_of_descriptors_strangers_that_have_asked_nothing_make_room() -> None:
    from kvscout_native import HTTP_EVENTS, RPC_EVENTS, Http, Rpc

    http, rpc = Http(0.0), Rpc()
    _, http_port = http.listen(
        "127.0.0.1", 0, connections=100, head_bytes=1000, headers=10, body_bytes=10,
        idle_seconds=60, body_seconds=60, write_seconds=60,
    )  # fmt: skip
    _, rpc_port = rpc.listen("127.0.0.1", 0, [("/test/Unary", False, False)])
    call = frame(HEADERS, END_HEADERS, 1, headers_of("/test/Unary")) + frame(DATA, END_STREAM, 1, EMPTY_MESSAGE)
    served: list[tuple[Any, int, int, bytes]] = [
        (http, http_port, HTTP_EVENTS["REQUEST"], get()),
        (rpc, rpc_port, RPC_EVENTS["OPEN"], PREFACE + frame(SETTINGS, 0, 0) + call),
    ]
    for core, port, asked, request in served:
        with ExitStack() as held:
            for _ in range(5):
                held.enter_context(socket.create_connection(("127.0.0.1", port)))
            core.poll()
            honest = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            honest.sendall(request)
            with without_descriptors():
                events = [event for _ in range(5) for event in core.poll()]
            assert [event[0] for event in events].count(asked) == 1
            # The kernel says that there is no descriptor left even where nobody waits: one more is closed in reserve.
            assert 1 <= core.stats()["connections_evicted"] <= 2


COMING = 400
"""More than the standard libraries let wait."""


@pytest.mark.skipif(
    int(Path("/proc/sys/net/core/somaxconn").read_text()) < COMING, reason="net.core.somaxconn lets fewer wait"
)
async def test_many_that_come_at_once_are_not_made_to_come_again(transport: Transport) -> None:
    async with served(handle) as (_, port):
        with ExitStack() as stack:
            # The loop has no turn meanwhile: nothing is accepted. Whoever is not let wait is told nothing for a second.
            for _ in range(COMING):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.8))
