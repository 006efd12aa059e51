"""Both ends of HTTP for tests: an engine that sends what it is told, bytes as they are, and a client that reads all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeAlias

from kvscout_common.hashing import native_available
from kvscout_common.http.factory import serve_http
from kvscout_common.http.http import HttpCall, HttpHandler, HttpLimits, HttpServer
from kvscout_common.transport import Transport, choose, chosen
from support.tcp_server import tcp_server

Script: TypeAlias = Callable[["RawEngine", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def tokens(*ids: int, text: str = "", finish: str | None = None) -> bytes:
    return event({"choices": [{"token_ids": list(ids), "text": text, "finish_reason": finish}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)
DONE = b"data: [DONE]\n\n"
WHOLE = tokens(1, text="a") + tokens(2, 3, text="b", finish="stop") + USAGE + DONE


TRANSPORTS = [Transport.GRPCIO, *([Transport.NATIVE] if native_available() else [])]


@contextmanager
def made_of(transport: Transport) -> Iterator[None]:
    """Clients and servers that are made meanwhile are of this."""
    before = chosen()
    choose(transport)
    try:
        yield
    finally:
        choose(before)


class RawEngine:
    """Speaks as a script says, once it has read a request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self.requests: list[tuple[bytes, bytes]] = []
        """Head and body of each."""
        self.connections = 0
        self.closed = 0
        """Connections that the other side closed."""
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0])) if length else b""
                self.requests.append((head, body))
                await self.script(self, reader, writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed += 1


@asynccontextmanager
async def raw_engine(script: Script) -> AsyncIterator[RawEngine]:
    """An engine that listens."""
    engine = RawEngine(script)
    async with tcp_server(engine.serve) as port:
        engine.url = f"http://127.0.0.1:{port}"
        yield engine


def says(*chunks: bytes, closes: bool = False, apart: bool = False) -> Script:
    """Sends these bytes."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            if apart:
                await asyncio.sleep(0.005)
        if closes:
            writer.close()

    return script


def says_and_waits(*chunks: bytes) -> Script:
    """Sends these bytes, then nothing until the other side closes."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for chunk in chunks:
            writer.write(chunk)
        await reader.readexactly(1)

    return script


def stream(*bodies: bytes, ends: bool = True) -> bytes:
    """A whole answer, each of these a chunk."""
    return STREAM_HEAD + b"".join(chunk(body) for body in bodies) + (LAST_CHUNK if ends else b"")


class Gathered:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.chunks.append(data)

    @property
    def data(self) -> bytes:
        return b"".join(self.chunks)


@asynccontextmanager
async def served(handler: HttpHandler, limits: HttpLimits | None = None) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server that listens, and its port."""
    server = serve_http(handler, limits)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop(0)


async def exchange(port: int, *chunks: bytes, ends: bool = True) -> bytes:
    """Sends bytes to a server; all that it says until it closes, or until it is silent if it is not to be ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for chunk in chunks:
        writer.write(chunk)
        with suppress(ConnectionError):
            await writer.drain()
    try:
        async with asyncio.timeout(30):
            return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def get(path: str = "/", *headers: str) -> bytes:
    """A request without a body, on a connection of its own."""
    lines: Sequence[str] = (f"GET {path} HTTP/1.1", "Host: a", "Connection: close", *headers)
    return "\r\n".join((*lines, "", "")).encode()


async def echo(call: HttpCall) -> None:
    """Answers with what came."""
    body = await call.body()
    await call.respond(200, [("Content-Type", "text/plain"), ("X-Path", call.path), ("X-Query", call.query)], body)
