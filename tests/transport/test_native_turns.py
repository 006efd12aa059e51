"""What one turn of the loop reads of a connection is bounded, whatever a peer sends: others have their turn."""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from support.http2_resets import DATA, END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, SETTINGS, frame, headers_of
from support.http_peers import STREAM_HEAD, chunk

from kvscout_common.hashing import native_available
from kvscout_gateway.values.dialects import OPENAI

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: it is what is tested")

SHARE = 64 << 10
WRITE_SHARE = 256 << 10
TURNS = 600
SLACK = 12 << 20
"""What the kernel may keep of a connection, on both sides of it."""
UNARY = "/test/Unary"

CONTINUATION, WINDOW_UPDATE, UNKNOWN = 9, 8, 77
OPENED = frame(HEADERS, END_HEADERS, 1, headers_of(UNARY))
HTTP2 = PREFACE + frame(SETTINGS, 0, 0)
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
HTTP_FLOODS = {
    "empty lines": (b"", b"\r\n"),
    "a body that nobody wants": (POST + b"Content-Length: 9\r\nX: \0\r\n\r\n", b"x" * 1000),
    "chunks of one byte": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
}
RPC_FLOODS = {
    "pings": (HTTP2, frame(PING, 0, 0, bytes(8))),
    "settings": (HTTP2, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))),
    "empty data": (HTTP2 + OPENED, frame(DATA, 0, 1)),
    "windows": (HTTP2 + OPENED, frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
    "continuations": (HTTP2 + frame(HEADERS, 0, 1, headers_of(UNARY)), frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 50)),
    "unknown frames": (HTTP2, frame(UNKNOWN, 0, 0)),
}
"""What begins it, and what is sent again and again."""


class Flood:
    """A connection that sends whatever the kernel takes."""

    def __init__(self, connection: socket.socket, begins: bytes, again: bytes) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._pieces = begins, again * (100_000 // len(again) + 1)
        self._rest = begins
        self.taken = 0

    def send(self) -> None:
        """Fills the buffers; an answer that ends the connection ends the flood."""
        try:
            while True:
                sent = self._connection.send(self._rest)
                self.taken += sent
                self._rest = self._rest[sent:] or self._pieces[1]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._rest = b""


@contextmanager
def http() -> Iterator[tuple[Any, int]]:
    from kvscout_native import Http

    core = Http(0.0)
    _, port = core.listen(
        "127.0.0.1", 0, connections=100, head_bytes=32 << 10, headers=100, body_bytes=1 << 40,
        idle_seconds=60, body_seconds=60, write_seconds=60,
    )  # fmt: skip
    yield core, port


@contextmanager
def rpc() -> Iterator[tuple[Any, int]]:
    from kvscout_native import Rpc

    core = Rpc()
    _, port = core.listen("127.0.0.1", 0, [(UNARY, False, False)])
    yield core, port


def flooded(core: Any, floods: list[Flood], each: Callable[[list[Any]], object]) -> None:
    for _ in range(TURNS):
        for flood in floods:
            flood.send()
        each(core.poll())
        core.flush()


@pytest.mark.parametrize("name", HTTP_FLOODS)
def test_a_turn_reads_no_more_of_a_client_than_its_share(name: str) -> None:
    from kvscout_native import HTTP_EVENTS

    with http() as (core, port), socket.create_connection(("127.0.0.1", port)) as connection:
        flood = Flood(connection, *HTTP_FLOODS[name])

        def want(events: list[Any]) -> None:
            for event in events:
                if event[0] == HTTP_EVENTS["REQUEST"]:
                    core.want_body(event[1])

        flooded(core, [flood], want)
        assert flood.taken <= TURNS * SHARE + SLACK


@pytest.mark.parametrize("name", RPC_FLOODS)
def test_a_turn_reads_no_more_of_a_callers_connection_than_its_share(name: str) -> None:
    with rpc() as (core, port), socket.create_connection(("127.0.0.1", port)) as connection:
        flood = Flood(connection, *RPC_FLOODS[name])
        flooded(core, [flood], len)
        assert flood.taken <= TURNS * SHARE + SLACK


def test_a_turn_reads_no_more_of_an_engine_than_its_share() -> None:
    from kvscout_common.http.native_http_client import native_dialect
    from kvscout_native import HTTP_EVENTS, Http

    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        core = Http(0.0)
        core.send("engine", listener.getsockname()[:2], 5.0, "GET", "/", "a", [], b"")
        core.poll()
        engine = held.enter_context(listener.accept()[0])
        flood = Flood(engine, STREAM_HEAD, chunk(b": nothing\n\n"))

        def pass_on(events: list[Any]) -> None:
            for event in events:
                if event[0] == HTTP_EVENTS["ANSWER"]:
                    core.stream(event[1], ("bytes", native_dialect(OPENAI), None))
                elif event[0] == HTTP_EVENTS["CHUNK"]:
                    core.resume(event[1])

        flooded(core, [flood], pass_on)
        assert flood.taken <= TURNS * SHARE + SLACK


def test_an_engine_that_only_announces_its_answer_is_given_up() -> None:
    from kvscout_native import HTTP_EVENTS, Http

    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        core = Http(0.0)
        core.send("engine", listener.getsockname()[:2], 5.0, "GET", "/", "a", [], b"")
        core.poll()
        flood = Flood(held.enter_context(listener.accept()[0]), b"", b"HTTP/1.1 100 Continue\r\n\r\n")
        ended: list[Any] = []
        flooded(core, [flood], lambda events: ended.extend(e for e in events if e[0] == HTTP_EVENTS["ENDED"]))
        assert [(event[2], event[3]) for event in ended] == [("protocol", "interim answers without end")]


def test_a_request_is_told_within_a_few_turns_of_a_flood() -> None:
    from kvscout_native import HTTP_EVENTS

    with http() as (core, port), ExitStack() as held:
        floods = [
            Flood(held.enter_context(socket.create_connection(("127.0.0.1", port))), *flood)
            for flood in HTTP_FLOODS.values()
        ]
        asked = answered = 0
        honest: list[socket.socket] = []

        def serve(events: list[Any]) -> None:
            nonlocal answered
            for event in events:
                if event[0] == HTTP_EVENTS["REQUEST"] and event[3] == "GET":
                    answered += 1

        for _ in range(20):
            honest.append(held.enter_context(socket.create_connection(("127.0.0.1", port))))
            honest[-1].sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            asked += 1
            # It is accepted in one turn, and read in one of the next.
            for _ in range(4):
                for flood in floods:
                    flood.send()
                serve(core.poll())
                core.flush()
        assert (asked, answered) == (20, 20)


def test_a_call_is_told_within_a_few_turns_of_a_flood() -> None:
    from kvscout_native import RPC_EVENTS

    call = HTTP2 + OPENED + frame(DATA, END_STREAM, 1, bytes(5))
    with rpc() as (core, port), ExitStack() as held:
        floods = [
            Flood(held.enter_context(socket.create_connection(("127.0.0.1", port))), *flood)
            for flood in RPC_FLOODS.values()
        ]
        told = 0
        for _ in range(20):
            held.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(call)
            for _ in range(8):
                for flood in floods:
                    flood.send()
                told += sum(event[0] == RPC_EVENTS["OPEN"] for event in core.poll())
                core.flush()
        assert told == 20


def test_empty_lines_may_precede_a_request_and_do_not_make_one() -> None:
    from kvscout_native import HTTP_EVENTS

    with http() as (core, port), ExitStack() as held:
        for lines in (1, 4, 5, 1000):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"\r\n" * lines + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            events = [event for _ in range(3) for event in core.poll()]
            requests = sum(event[0] == HTTP_EVENTS["REQUEST"] for event in events)
            assert requests == (lines <= 4)
            if not requests:
                core.flush()
                assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_turn_ends_with_so_many_events_and_goes_on_with_the_next() -> None:
    from kvscout_native import HTTP_EVENTS

    with http() as (core, port), ExitStack() as held:
        connections = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
        for connection in connections:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        told = []
        for _ in range(20):
            events = core.poll()
            told.append(sum(event[0] == HTTP_EVENTS["REQUEST"] for event in events))
            if sum(told) == len(connections):
                break
            assert (HTTP_EVENTS["AGAIN"],) in events, "more is said to be left"
        assert sum(told) == len(connections)
        assert max(told) <= 64


def test_a_poll_writes_no_more_to_a_client_than_its_share_however_fast_that_reads() -> None:
    from kvscout_native import HTTP_EVENTS

    body = bytes(4 << 20)
    with http() as (core, port), socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)

        def received() -> int:
            total = 0
            try:
                while data := client.recv(1 << 20):
                    total += len(data)
            except BlockingIOError:
                pass
            return total

        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        [call] = [event[1] for _ in range(3) for event in core.poll() if event[0] == HTTP_EVENTS["REQUEST"]]
        core.respond(call, 200, [], body)
        core.flush()
        shares = [received()]
        for _ in range(TURNS):
            core.poll()
            shares.append(received())
        assert sum(shares) > len(body)
        assert max(shares) <= WRITE_SHARE


def test_small_messages_of_a_call_are_told_a_few_at_a_time_and_wait_in_its_window() -> None:
    from kvscout_native import RPC_EVENTS, Rpc

    sent, stream = 3000, "/test/Stream"
    core = Rpc()
    _, port = core.listen("127.0.0.1", 0, [(stream, True, True)])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        messages = frame(DATA, END_STREAM, 1, bytes(5) * sent)
        connection.sendall(HTTP2 + frame(HEADERS, END_HEADERS, 1, headers_of(stream)) + messages)
        calls: set[int] = set()

        def told() -> tuple[int, bool]:
            """How many messages are told of until no more come, and whether the caller has ended."""
            count, ended = 0, False
            for _ in range(200):
                events = core.poll()
                core.flush()
                calls.update(event[1] for event in events if event[0] == RPC_EVENTS["OPEN"])
                of_poll = sum(event[0] == RPC_EVENTS["MESSAGE"] for event in events)
                assert of_poll <= 64
                count += of_poll
                ended = ended or any(event[0] == RPC_EVENTS["HALF_CLOSED"] for event in events)
            return count, ended

        assert told() == (1024, False), "as many as may wait for their handler"
        [call] = calls
        for expected in ((1024, False), (952, True)):
            for _ in range(1024):
                core.consumed(call, 0)
            assert told() == expected
        for _ in range(952):
            core.consumed(call, 0)
        assert core.stats()["queued_bytes"] == 0
