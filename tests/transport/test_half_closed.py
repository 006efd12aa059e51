"""Clients that close their side and wait are answered; clients that have gone are noticed, though they look alike."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
from support.http_peers import TRANSPORTS, made_of, served

from kvscout_common.http.http import HttpCall
from kvscout_common.transport import Transport

GET = b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with made_of(request.param):
        yield request.param


async def slowly(call: HttpCall) -> None:
    """Answers after a while, streamed or not."""
    body = await call.body()
    await asyncio.sleep(0.1)
    if call.path == "/stream":
        await call.start(200, [])
        for chunk in (b"a", b"b", b"c"):
            await call.write(chunk)
            await asyncio.sleep(0.02)
        await call.end()
    else:
        await call.respond(200, [], b"abc" + body)


async def half_closed(port: int, sent: bytes) -> bytes:
    """All that is said to a client that sends this and closes its side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    writer.write_eof()
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("path", [b"/", b"/stream"])
async def test_a_client_that_closes_its_side_is_answered(path: bytes, transport: Transport) -> None:
    if transport is not Transport.NATIVE:
        pytest.skip("for aiohttp it has gone")
    async with served(slowly) as (_, port):
        interim, _, answer = (await half_closed(port, GET % path)).partition(b"\r\n\r\n")
    assert interim == b"HTTP/1.1 100 Continue"
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"abc" if path == b"/" else b"0\r\n\r\n")


async def test_a_body_that_its_clients_end_cuts_short_is_refused_or_given_up(transport: Transport) -> None:
    async with served(slowly) as (_, port):
        answer = await half_closed(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc")
    assert b" 200 " not in answer
    if transport is Transport.NATIVE:
        assert b"HTTP/1.1 400 " in answer
        assert answer.endswith(b"the body ends too early\n")


async def test_over_http_1_0_a_client_that_closes_its_side_counts_as_gone(transport: Transport) -> None:
    cancelled = asyncio.Event()

    async def wait(call: HttpCall) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with served(wait) as (_, port):
        answer = await half_closed(port, b"GET / HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(20):
            await cancelled.wait()
    if transport is Transport.NATIVE:
        assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_has_gone_is_noticed_while_its_request_is_handled(*, resets: bool, streams: bool) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(call: HttpCall) -> None:
        if streams:
            await call.start(200, [])
            await call.write(b"a")
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with served(wait) as (_, port):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(GET % b"/")
        await begun.wait()
        if streams:
            # What is not read makes the kernel reset it.
            await asyncio.get_running_loop().run_in_executor(None, connection.recv, 1 if resets else 1000)
        elif resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
        async with asyncio.timeout(20):
            await cancelled.wait()


async def test_a_request_on_its_way_to_a_server_that_stops_is_the_last_of_its_connection(transport: Transport) -> None:
    if transport is not Transport.NATIVE:
        pytest.skip("aiohttp closes idle connections at once")
    async with served(slowly) as (server, port):
        peers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, writer in peers:
            writer.write(GET % b"/")
            assert (await reader.readuntil(b"abc")).startswith(b"HTTP/1.1 200 ")
        stopping = asyncio.create_task(server.stop(20))
        await asyncio.sleep(0)
        for _, writer in peers[:2]:
            writer.write(GET % b"/")
        for reader, writer in peers[:2]:
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"\r\nconnection: close\r\n" in answer.lower()
            writer.close()
        for reader, writer in peers[2:]:
            assert await reader.read() == b""
            writer.close()
        await stopping
