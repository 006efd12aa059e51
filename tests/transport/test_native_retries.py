"""Calls that a server has not looked at are made again, once, whatever they do: others are not."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.http2_resets import (
    ACK,
    DATA,
    EMPTY_MESSAGE,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    frame,
)
from support.tcp_server import tcp_server
from transport.echo_service import native_channel

from kvscout_common.hashing import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: it is what is tested")

REFUSED_STREAM, CANCEL = 7, 8
UNARY = "/kvscout.test.Scripted/Unary"

Script = Callable[["Peer", int], None]


def literals(**fields: str) -> bytes:
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in ((name.replace("_", "-"), value) for name, value in fields.items())
    )


class Peer:
    """A server that does with each call what its script says."""

    def __init__(self, script: list[Script]) -> None:
        self._script = script
        self._writer: asyncio.StreamWriter | None = None
        self.calls = 0
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.connections += 1
        await reader.readexactly(24)
        writer.write(frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0))
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == HEADERS:
                number = self.calls
                self.calls += 1
                self._script[number](self, int.from_bytes(head[5:], "big"))

    def write(self, *frames: bytes) -> None:
        assert self._writer is not None
        self._writer.write(b"".join(frames))


def answers(peer: Peer, stream: int) -> None:
    headers = b"\x88" + literals(content_type="application/grpc")
    peer.write(
        frame(HEADERS, END_HEADERS, stream, headers),
        frame(DATA, 0, stream, EMPTY_MESSAGE),
        frame(HEADERS, END_HEADERS | END_STREAM, stream, literals(grpc_status="0")),
    )


def resets(code: int) -> Script:
    return lambda peer, stream: peer.write(frame(RST_STREAM, 0, stream, struct.pack(">I", code)))


def goes_away(peer: Peer, stream: int) -> None:
    peer.write(frame(GOAWAY, 0, 0, struct.pack(">II", stream - 2 if stream > 1 else 0, 0)))


def answers_a_part_and_refuses(peer: Peer, stream: int) -> None:
    headers = b"\x88" + literals(content_type="application/grpc", seen="it")
    peer.write(frame(HEADERS, END_HEADERS, stream, headers))
    resets(REFUSED_STREAM)(peer, stream)


@asynccontextmanager
async def scripted(*script: Script) -> AsyncIterator[tuple[Peer, Any]]:
    peer = Peer(list(script))
    async with tcp_server(peer.serve) as port, native_channel(port) as channel:
        yield peer, channel


@pytest.mark.parametrize("unseen", [resets(REFUSED_STREAM), goes_away], ids=["refused", "goaway"])
async def test_a_call_that_was_not_looked_at_is_made_again(unseen: Script) -> None:
    async with scripted(unseen, answers) as (peer, channel):
        assert await channel.unary_unary(UNARY)(b"once", timeout=10) == b""
        assert peer.calls == 2
        assert peer.connections == (2 if unseen is goes_away else 1)


async def test_a_call_that_is_refused_twice_fails() -> None:
    async with scripted(resets(REFUSED_STREAM), resets(REFUSED_STREAM), answers) as (peer, channel):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(UNARY)(b"once", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert peer.calls == 2
        assert await channel.unary_unary(UNARY)(b"another", timeout=10) == b""


@pytest.mark.parametrize("seen", [resets(CANCEL), answers_a_part_and_refuses])
async def test_a_call_that_may_have_been_looked_at_is_not_made_again(seen: Script) -> None:
    async with scripted(seen, answers) as (peer, channel):
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(UNARY)(b"once", timeout=10)
        assert peer.calls == 1


async def test_a_stream_that_has_written_is_not_made_again_and_one_that_has_not_is() -> None:
    async with scripted(answers, resets(REFUSED_STREAM), answers) as (peer, channel):
        assert await channel.unary_unary(UNARY)(b"connects", timeout=10) == b""
        untouched = channel.stream_stream(UNARY)(timeout=10)
        assert await untouched.read() == b""
        assert peer.calls == 3


async def test_answers_to_calls_that_were_given_up_leave_the_connection_as_it_is() -> None:
    late = 1_200
    kept: list[int] = []
    async with scripted(*[lambda _, stream: kept.append(stream)] * late, answers) as (peer, channel):
        calls = [channel.unary_unary(UNARY)(b"late", timeout=60) for _ in range(late)]
        while len(kept) < late:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        for stream in kept:
            answers(peer, stream)
        assert await channel.unary_unary(UNARY)(b"in time", timeout=10) == b""
        assert peer.connections == 1


async def test_a_call_in_flight_ends_when_its_channel_is_closed() -> None:
    async with scripted(lambda peer, stream: None) as (peer, channel):
        call = channel.unary_unary(UNARY)(b"once")
        while not peer.calls:
            await asyncio.sleep(0.01)
        await channel.close()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
