"""Peers of HTTP that flood, dawdle or break off: what they cost is bounded, and who is well is served meanwhile."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from support.http_peers import (
    STREAM_HEAD,
    TRANSPORTS,
    WHOLE,
    Gathered,
    RawEngine,
    Script,
    chunk,
    echo,
    exchange,
    get,
    made_of,
    raw_engine,
    says,
    served,
    stream,
    tokens,
)
from support.processes import eventually
from support.tcp_server import tcp_server

from kvscout_common.http.factory import connect
from kvscout_common.http.http import FailureKind, Form, HttpCall, HttpClient, HttpFailed, HttpLimits, HttpRequest
from kvscout_common.transport import Transport
from kvscout_gateway.values.dialects import OPENAI

MIB = 1 << 20


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with made_of(request.param):
        yield request.param


@pytest.fixture
async def client(transport: Transport) -> Any:
    client = connect()
    yield client
    await client.close()


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def floods(head: bytes, piece: bytes) -> Script:
    """Sends a head, then a chunk again and again until the other side has enough."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while True:
            writer.write(piece)
            await writer.drain()

    return script


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y" * 10_000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (STREAM_HEAD + b"1;", b"x" * 10_000),
        (STREAM_HEAD + b"fffffffffffffff", b"f" * 100),
        (STREAM_HEAD + chunk(tokens(1)) + b"0\r\n", b"X: y\r\n" * 1000),
    ],
    ids=["headers", "a header", "interim answers", "an extension", "a size", "trailers"],
)
async def test_what_never_ends_is_not_kept(client: HttpClient, head: bytes, piece: bytes) -> None:
    async with raw_engine(floods(head, piece)) as engine:
        before = rss()
        with suppress(TimeoutError, HttpFailed):
            async with asyncio.timeout(0.5):
                answer = await client.send(HttpRequest(engine.url), connect_seconds=2)
                await answer.relay(Gathered(), Form.BYTES, OPENAI)
        assert rss() - before < 64 * MIB


async def test_an_event_without_end_is_refused(client: HttpClient) -> None:
    script = floods(STREAM_HEAD, chunk(b"data: " + b"x" * MIB))
    async with raw_engine(script) as engine:
        answer = await client.send(HttpRequest(engine.url), connect_seconds=2)
        with pytest.raises(HttpFailed) as failed:
            await answer.relay(Gathered(), Form.BYTES, OPENAI)
        assert failed.value.kind is FailureKind.PROTOCOL
        await eventually(lambda: engine.connections == 1 and not answer.report.done)


async def test_an_answer_before_the_end_of_its_request_is_taken(client: HttpClient) -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        await writer.drain()

    # What is still on its way meets a connection that is gone: the answer may be lost with it.
    async with tcp_server(early) as port:
        with suppress(HttpFailed):
            request = HttpRequest(f"http://127.0.0.1:{port}", body=bytes(8 * MIB))
            answer = await client.send(request, connect_seconds=2)
            assert (answer.status, await answer.read(10)) == (413, b"big")


async def test_a_connection_that_its_engine_closed_is_not_used_again(client: HttpClient) -> None:
    async with raw_engine(says(stream(WHOLE), closes=True)) as engine:
        for _ in range(3):
            answer = await client.send(HttpRequest(engine.url), connect_seconds=2)
            assert (await answer.relay(Gathered(), Form.BYTES, OPENAI)).done
            await asyncio.sleep(0.05)
        assert engine.connections == 3


async def test_more_than_was_announced_ends_a_connection(client: HttpClient) -> None:
    sent = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison"
    async with raw_engine(says(sent)) as engine:
        for _ in range(3):
            answer = await client.send(HttpRequest(engine.url), connect_seconds=2)
            assert await answer.read(10) == b"ok"
            await asyncio.sleep(0.02)
        assert engine.connections == 3


async def test_clients_that_dawdle_hold_no_others_up() -> None:
    limits = HttpLimits(idle_seconds=1.0, body_seconds=1.0)
    async with served(echo, limits) as (_, port):
        slow = [asyncio.create_task(exchange(port, b"POST / HTTP/1.1\r\nHost: a\r\nCont")) for _ in range(100)]
        slow += [
            asyncio.create_task(exchange(port, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nab"))
            for _ in range(100)
        ]
        for _ in range(10):
            assert (await exchange(port, get())).startswith(b"HTTP/1.1 200 ")
        assert all(not answer or b" 408 " in answer[:20] for answer in await asyncio.gather(*slow))


async def test_a_client_that_sends_without_reading_is_not_read_without_bound() -> None:
    handled = 0

    async def count(call: HttpCall) -> None:
        nonlocal handled
        handled += 1
        await call.respond(200, [], b"x" * 100_000)

    async with served(count, HttpLimits(write_seconds=0.5)) as (_, port):
        before = rss()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 1000
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(1):
                while True:
                    writer.write(request)
                    await writer.drain()
        assert rss() - before < 64 * MIB
        assert handled < 2_000
        writer.close()


async def test_a_body_that_nobody_wants_is_not_kept() -> None:
    async def refuse(call: HttpCall) -> None:
        await call.respond(403, [], b"no")

    async with served(refuse) as (_, port):
        head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 20000000\r\n\r\n"
        answer = await exchange(port, head, bytes(1_000_000))
        assert answer.startswith(b"HTTP/1.1 403 ")


async def test_hundreds_of_connections_that_break_off_leave_nothing() -> None:
    async with served(echo) as (_, port):
        descriptors = psutil.Process().num_fds()
        for number in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get()[: number % 30])
            writer.transport.abort()
        await eventually(lambda: psutil.Process().num_fds() <= descriptors + 5)
        assert (await exchange(port, get())).startswith(b"HTTP/1.1 200 ")
