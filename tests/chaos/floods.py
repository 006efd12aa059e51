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
from contextlib import suppress
from itertools import count, cycle
from typing import Final, NamedTuple

from support.http2_resets import (
    DATA,
    EMPTY_MESSAGE,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    headers_of,
)

CONNECT_SECONDS: Final = 5.0
SLICE_BYTES: Final = 64 << 10
IDLE_CONNECTIONS: Final = 2_000
SLOW_CONNECTIONS: Final = 200
BODY_BYTES: Final = 24 << 20
MULTIPART_BYTES: Final = 224_000
ADVERSARIAL_BYTES: Final = 140_000
"""Of a body that is read on the event loop."""
LARGE_BYTES: Final = 8 << 20
ONE_BYTE_CONNECTIONS: Final = 50
SLOW_READERS: Final = 100
WINDOW_UPDATE, CONTINUATION, UNKNOWN = 8, 9, 0xEE
HTTP2: Final = PREFACE + frame(SETTINGS, 0, 0)
CHECK: Final = "/grpc.health.v1.Health/Check"
REFLECTION: Final = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LONGEST_FRAME: Final = 16 << 10
GET_HEALTH: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Sent(NamedTuple):
    """What a flood did."""

    sent_bytes: int
    connections: int
    refused: int
    """Connections that the server ended, or did not accept."""


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


def escaped(field: str) -> bytes:
    """Return a request with one long text, of which every second character is escaped."""
    return filled(b'{"model":"mock","%s":"' % field.encode(), b"a\\n", b'"}', LARGE_BYTES)


def multipart() -> bytes:
    """Return a body in which every line looks like the head of the part that names the model."""
    line = b'name="model"\r\n'
    return line * (MULTIPART_BYTES // len(line))


def filled(begin: bytes, again: bytes, end: bytes, size: int) -> bytes:
    """Return a text of about `size` bytes that repeats its middle."""
    return begin + again * ((size - len(begin) - len(end)) // len(again)) + end


def adversarial(field: str, again: bytes) -> bytes:
    """Return a chat completion with one field that takes long to read for its length."""
    return filled(b'{"model":"mock","%s":[' % field.encode(), again + b",", b"1]}", ADVERSARIAL_BYTES)


def header_bomb() -> bytes:
    """Return a request with about as many and as long headers as are taken."""
    return GET_HEALTH[:-2] + b"".join(b"X-%d: %s\r\n" % (at, b"x" * 230) for at in range(120)) + b"\r\n"


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


def on_each_stream(frames: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield an HTTP/2 connection's beginning, then what is sent on one stream after the other."""
    yield HTTP2
    for first in count(1, 200):
        yield b"".join(frames(stream) for stream in range(first, first + 200, 2))


def on_one_stream(path: str, again: bytes) -> Iterator[bytes]:
    """Yield the headers of a call, then a frame again and again."""
    return after(HTTP2 + frame(HEADERS, END_HEADERS, 1, headers_of(path)), repeated(again))


def reset_call(stream: int) -> bytes:
    """Return a call that is reset as soon as it is begun."""
    return frame(HEADERS, END_HEADERS, stream, headers_of(CHECK)) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))


def whole_call(stream: int) -> bytes:
    """Return a call that is answered."""
    begun = frame(HEADERS, END_HEADERS, stream, headers_of(CHECK))
    return begun + frame(DATA, END_STREAM, stream, EMPTY_MESSAGE)


HTTP_STREAMS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "crlf": lambda: repeated(b"\r\n"),
    "pipelined": lambda: repeated(GET_HEALTH),
    "header-bombs": lambda: repeated(header_bomb()),
    "tiny-chunks": lambda: after(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        repeated(b"1\r\n[\r\n"),
    ),
    "small-objects": lambda: bodies("/v1/chat/completions", small_objects()),
    "passed-on": lambda: bodies("/v1/embeddings", numbers()),
    "multipart": lambda: bodies("/v1/audio/transcriptions", multipart(), "multipart/form-data; boundary=x"),
    "140-kB-messages": lambda: bodies("/v1/chat/completions", adversarial("messages", b"{}")),
    "140-kB-options": lambda: bodies("/v1/chat/completions", adversarial("tool_choice", b"[]")),
    "deep-nesting": lambda: bodies("/v1/chat/completions", adversarial("messages", b"[" * 100 + b"]" * 100)),
    "8-MiB-text": lambda: bodies("/v1/chat/completions", escaped("messages")),
    "8-MiB-prompt": lambda: bodies("/v1/completions", escaped("prompt")),
}
"""By kind, what one connection sends to the HTTP port."""
GRPC_STREAMS: Final[dict[str, Callable[[], Iterator[bytes]]]] = {
    "unknown-frames": lambda: after(HTTP2, repeated(frame(UNKNOWN, 0, 0))),
    "pings": lambda: after(HTTP2, repeated(frame(PING, 0, 0, bytes(8)))),
    "settings": lambda: after(HTTP2, repeated(frame(SETTINGS, 0, 0))),
    "window-updates": lambda: after(HTTP2, repeated(frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"))),
    "continuations": lambda: after(
        HTTP2 + frame(HEADERS, 0, 1, headers_of(CHECK)), repeated(frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 50))
    ),
    "tiny-data": lambda: on_one_stream(CHECK, frame(DATA, 0, 1, b"\0")),
    "empty-messages": lambda: on_one_stream(
        REFLECTION, frame(DATA, 0, 1, EMPTY_MESSAGE * (LONGEST_FRAME // len(EMPTY_MESSAGE)))
    ),
    "resets": lambda: on_each_stream(reset_call),
    "calls": lambda: on_each_stream(whole_call),
}
"""By kind, what one connection sends to the gRPC port."""
STREAMS: Final = {**HTTP_STREAMS, **GRPC_STREAMS}
KINDS: Final = (*STREAMS, "slow-bodies", "slow-readers", "one-byte", "connects", "idle")


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


def drip(address: tuple[str, int], deadline: float) -> Sent:
    """Send requests on a few connections, each byte in a packet of its own."""
    sent = connections = refused = 0
    connection_at: dict[int, tuple[socket.socket, int]] = {}
    for slot in cycle(range(ONE_BYTE_CONNECTIONS)):
        if time.monotonic() >= deadline:
            break
        try:
            if slot not in connection_at:
                connections += 1
                connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setblocking(False)
                connection_at[slot] = connection, 0
            connection, at = connection_at[slot]
            with suppress(BlockingIOError):
                connection_at[slot] = connection, (at + connection.send(GET_HEALTH[at : at + 1])) % len(GET_HEALTH)
                sent += 1
            drain(connection)
        except OSError:
            refused += 1
            connection_at.pop(slot, None)
    return Sent(sent, connections, refused)


def connect(address: tuple[str, int], deadline: float) -> Sent:
    """Connect, say half a line, and reset the connection, again and again."""
    connections = refused = 0
    while time.monotonic() < deadline:
        connections += 1
        try:
            with socket.create_connection(address, timeout=CONNECT_SECONDS) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.send(GET_HEALTH[:9])
        except OSError:
            refused += 1
    return Sent(9 * connections, connections, refused)


def unread(address: tuple[str, int], deadline: float) -> Sent:
    """Ask for long answers on many connections, and read nothing."""
    sent = refused = 0
    asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
    open_ones: list[socket.socket] = []
    while time.monotonic() < deadline:
        try:
            if len(open_ones) < SLOW_READERS:
                connection = socket.create_connection(address, timeout=CONNECT_SECONDS)
                connection.setblocking(False)
                open_ones.append(connection)
            for connection in open_ones:
                with suppress(BlockingIOError):
                    sent += connection.send(asked)
        except OSError:
            refused += 1
        time.sleep(0.002)
    return Sent(sent, len(open_ones), refused)


def flood(kind: str, address: tuple[str, int], seconds: float) -> Sent:
    """Run one kind of flood for so long."""
    deadline = time.monotonic() + seconds
    if kind == "idle":
        return many(address, IDLE_CONNECTIONS, b"", b"", deadline)
    if kind == "slow-bodies":
        return many(address, SLOW_CONNECTIONS, request("/v1/completions", 1 << 20), b"[", deadline)
    if kind == "slow-readers":
        return unread(address, deadline)
    if kind == "one-byte":
        return drip(address, deadline)
    if kind == "connects":
        return connect(address, deadline)
    return pour(address, STREAMS[kind], deadline)


def main() -> int:
    """Run the flood that the command line names."""
    kind, host, port, seconds = sys.argv[1:]
    print(json.dumps(flood(kind, (host, int(port)), float(seconds))._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
