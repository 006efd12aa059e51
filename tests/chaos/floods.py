"""One hostile client as a process of its own: `python -m chaos.floods KIND HOST PORT SECONDS`.

Each kind sends as fast as the server takes it, without a token, over plain blocking sockets, and prints one line of
JSON at its end: what it sent, and how often its connection was ended or refused. Bounded in time by SECONDS and in
memory by one body. It has a process of its own because a flood from the server's own event loop, or from that of the
honest client, only ever sends while nobody else wants to run.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Final, NamedTuple

CONNECT_SECONDS: Final = 5.0
SLICE_BYTES: Final = 64 << 10
IDLE_CONNECTIONS: Final = 2_000
SLOW_CONNECTIONS: Final = 200
BODY_BYTES: Final = 24 << 20
MULTIPART_BYTES: Final = 224_000
H2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, WINDOW_UPDATE, UNKNOWN, DATA, HEADERS = 4, 6, 8, 0xEE, 0, 1


class Sent(NamedTuple):
    """What a flood did."""

    sent_bytes: int
    connections: int
    refused: int
    """Connections that the server ended, or did not accept."""


def frame(kind: int, payload: bytes = b"", *, stream: int = 0, flags: int = 0) -> bytes:
    """Return one HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request(path: str, body_bytes: int, content_type: str = "application/json") -> bytes:
    """Return the head of a POST."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {body_bytes}\r\n\r\n"
    ).encode()


def small_objects() -> bytes:
    """Return a chat completion whose messages are millions of empty lists."""
    return b'{"model":"mock","messages":[' + b"[]," * (BODY_BYTES // 3) + b"[]]}"


def numbers() -> bytes:
    """Return an embeddings request of millions of numbers, the model behind them."""
    return b'{"input":[' + b"1," * (BODY_BYTES // 2) + b'1],"model":"mock"}'


def multipart() -> bytes:
    """Return a body in which every line looks like the head of the part that names the model."""
    line = b'name="model"\r\n'
    return line * (MULTIPART_BYTES // len(line))


def repeated(data: bytes) -> Iterator[bytes]:
    """Yield slices of about `SLICE_BYTES` that repeat `data` for ever."""
    return cycle([data * max(1, SLICE_BYTES // len(data))])


def bodies(path: str, body: bytes, content_type: str = "application/json") -> Iterator[bytes]:
    """Yield one request after the other, in slices."""
    whole = request(path, len(body), content_type) + body
    while True:
        yield from (whole[at : at + SLICE_BYTES] for at in range(0, len(whole), SLICE_BYTES))


def after(begin: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a beginning once and then the rest."""
    yield begin
    yield from rest


STREAMS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "crlf": lambda: repeated(b"\r\n"),
    "pipelined": lambda: repeated(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "tiny-chunks": lambda: after(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        repeated(b"1\r\n[\r\n"),
    ),
    "small-objects": lambda: bodies("/v1/chat/completions", small_objects()),
    "passed-on": lambda: bodies("/v1/embeddings", numbers()),
    "multipart": lambda: bodies("/v1/audio/transcriptions", multipart(), "multipart/form-data; boundary=x"),
    "unknown-frames": lambda: after(H2_PREFACE + frame(SETTINGS), repeated(frame(UNKNOWN))),
    "pings": lambda: after(H2_PREFACE + frame(SETTINGS), repeated(frame(PING, bytes(8)))),
    "settings": lambda: after(H2_PREFACE + frame(SETTINGS), repeated(frame(SETTINGS))),
    "window-updates": lambda: after(H2_PREFACE + frame(SETTINGS), repeated(frame(WINDOW_UPDATE, b"\0\0\0\1"))),
}
"""By kind, what one connection sends."""
GRPC_KINDS: Final = ("unknown-frames", "pings", "settings", "window-updates")
"""Those for the gRPC port; all others are for the HTTP port."""
KINDS: Final = (*STREAMS, "slow-bodies", "idle")


def pour(address: tuple[str, int], chunks: Callable[[], Iterator[bytes]], deadline: float) -> Sent:
    """Send on one connection after the other until the deadline; what the server answers is read and dropped."""
    sent = connections = refused = 0
    while time.monotonic() < deadline:
        connections += 1
        try:
            with socket.create_connection(address, timeout=CONNECT_SECONDS) as connection:
                connection.setblocking(False)
                for chunk in chunks():
                    rest = memoryview(chunk)
                    while rest and time.monotonic() < deadline:
                        select.select([connection], [connection], [], 0.2)
                        drain(connection)
                        try:
                            count = connection.send(rest)
                        except BlockingIOError:
                            continue
                        sent += count
                        rest = rest[count:]
                    if time.monotonic() >= deadline:
                        break
        except OSError:
            refused += 1
            time.sleep(0.001)
    return Sent(sent, connections, refused)


def drain(connection: socket.socket) -> None:
    """Read what is there of a connection that does not block; raise OSError when the server has ended it."""
    try:
        while connection.recv(1 << 20):
            pass
    except BlockingIOError:
        return
    raise ConnectionError("the server has ended the connection")


def many(address: tuple[str, int], count: int, head: bytes, drip: bytes, deadline: float) -> Sent:
    """Open many connections, send a head on each, then a drip on each of them once a second."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    open_ones: list[socket.socket] = []
    sent = connections = refused = 0
    try:
        while time.monotonic() < deadline:
            while len(open_ones) < count and time.monotonic() < deadline:
                connections += 1
                try:
                    connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
                    connection.setblocking(False)
                    sent += connection.send(head) if head else 0
                    open_ones.append(connection)
                except OSError:
                    refused += 1
            alive = []
            for connection in open_ones:
                try:
                    drain(connection)
                    sent += connection.send(drip) if drip else 0
                    alive.append(connection)
                except BlockingIOError:
                    alive.append(connection)
                except OSError:
                    refused += 1
                    connection.close()
            open_ones = alive
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    finally:
        for connection in open_ones:
            connection.close()
    return Sent(sent, connections, refused)


def flood(kind: str, address: tuple[str, int], seconds: float) -> Sent:
    """Run one kind of flood for so long."""
    deadline = time.monotonic() + seconds
    if kind == "idle":
        return many(address, IDLE_CONNECTIONS, b"", b"", deadline)
    if kind == "slow-bodies":
        return many(address, SLOW_CONNECTIONS, request("/v1/completions", 1 << 20), b"[", deadline)
    return pour(address, STREAMS[kind], deadline)


def main() -> int:
    """Run the flood that the command line names."""
    kind, host, port, seconds = sys.argv[1:]
    print(json.dumps(flood(kind, (host, int(port)), float(seconds))._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
