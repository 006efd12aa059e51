"""The rpc of the endpoint picker: picks are made, told and let go of, whatever the proxy does."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.ext_proc_messages import (
    BUFFERED,
    DUPLEX,
    NONE,
    STREAMED,
    body_of,
    destinations,
    kinds,
    parsed,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from support.processes import DEADLINE_SECONDS, eventually

from kvscout.ext_proc.v3 import ext_proc_pb2 as pb
from kvscout_common.errors import (
    Draining,
    FailedPrecondition,
    InvalidArgument,
    KvscoutError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.hashing import native_available
from kvscout_common.rpc.guard import Guard
from kvscout_gateway.fronts.client_paths import ClientPaths
from kvscout_gateway.fronts.endpoint_picker import process, wire
from kvscout_gateway.fronts.endpoint_picker.pick_request import PickRequest
from kvscout_gateway.fronts.endpoint_picker.process import ExternalProcessor, Limits
from kvscout_gateway.fronts.endpoint_picker.stream import Follow

TRANSPORTS = ("grpcio", "native") if native_available() else ("grpcio",)
FIRST = "10.0.0.1:8000"
USAGE = b'data: {"usage":{"prompt_tokens":3}}\n\n'


class Noted:
    """A pick that notes what it is told."""

    def __init__(self, told: list[Any]) -> None:
        self.headers = {wire.DESTINATION: FIRST}
        self.answer_headers: Mapping[str, str] = wire.NO_HEADERS
        self._told = told

    def answering(self, status: int, served: str, in_chunks: bool | None) -> None:
        self._told.append(("answering", status, served))

    def first_output(self, head: bytes) -> None:
        self._told.append("first output")

    def ended(self, usage: Mapping[str, Any] | None) -> None:
        self._told.append(("ended", usage))

    def aborted(self) -> None:
        self._told.append("aborted")

    def left(self) -> None:
        self._told.append("left")


class Bench:
    """The rpc with a picker that does as told, and a proxy that says what it is told to."""

    def __init__(self, follow: Follow, limits: Limits) -> None:
        self.told: list[Any] = []
        self.asked: list[PickRequest] = []
        self.error: Exception | None = None
        self.hangs = False
        self.manages_alone = False
        self.cancelled = 0
        self.outcomes: Counter[str] = Counter()
        self.processor = ExternalProcessor(self, lambda: follow, limits, self._count)
        self.channel: grpc.aio.Channel

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    async def pick(self, asked: PickRequest, *, without_upstreams: bool = False) -> Noted:
        self.asked.append(asked)
        if self.hangs and not (without_upstreams and self.manages_alone):
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        if self.error is not None:
            raise self.error
        return Noted(self.told)

    def open(self) -> Any:
        """A stream, as a proxy opens it."""
        return self.channel.stream_stream(f"/{wire.SERVICE}/Process")(timeout=DEADLINE_SECONDS)

    async def pick_of(self, stream: Any, response: int = NONE) -> None:
        """Says what leads to a pick, and reads it."""
        await stream.write(request_headers(BUFFERED, response))
        await stream.read()
        await stream.write(request_body(body_of()))
        assert destinations(parsed([await stream.read()])[0]) == (FIRST, FIRST)

    async def refused(self, body: bytes = body_of()) -> Any:
        """Says what leads to a refusal, and reads it to the end of the stream."""
        stream = self.open()
        await stream.write(request_headers(BUFFERED))
        await stream.read()
        await stream.write(request_body(body))
        answer = parsed([await stream.read()])[0].immediate_response
        assert await stream.read() is grpc.aio.EOF
        return answer

    async def until_told(self, *told: Any) -> None:
        """Waits until the pick was told this, and nothing else."""
        await eventually(lambda: self.told == list(told), what=f"{told}, not {self.told}")


@asynccontextmanager
async def bench(
    transport: str,
    follow: Follow = Follow.PROXY,
    *,
    pick_seconds: float = 10.0,
    body_bytes: int = 1 << 20,
    held_bytes: int = 1 << 21,
    client_paths: Sequence[str] = (),
    conformance: bool = False,
) -> AsyncIterator[Bench]:
    limits = Limits(
        pick_seconds, body_bytes, held_bytes, client_paths=ClientPaths(client_paths), conformance=conformance
    )
    one = Bench(follow, limits)
    server: Any
    if transport == "native":
        from kvscout_common.rpc.native_server import NativeServer

        server = NativeServer(Guard(), max_message_bytes=4 << 20, max_streams=1000)
        one.processor.add_to(server)
        port = server.listen("127.0.0.1", 0)
    else:
        server = grpc.aio.server(interceptors=[Guard()])
        one.processor.add_to(server)
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as one.channel:
        yield one
    await server.stop(None)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


async def test_a_pick_is_told_all_that_happens_to_its_request(transport: str) -> None:
    async with bench(transport) as one:
        stream = one.open()
        await one.pick_of(stream, STREAMED)
        for message in (
            response_headers(served=FIRST),
            response_body(b"data: 1\n\n"),
            response_body(USAGE),
            response_body(b"", end=True),
        ):
            await stream.write(message)
            await stream.read()
        ended = ("ended", {"prompt_tokens": 3})
        await one.until_told(("answering", 200, FIRST), "first output", ended)
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert one.told[-1] == ended
        assert one.asked[0].fields["prompt"] == array("I", [1, 2, 3]).tobytes()
        assert one.outcomes == {"picked": 1}


@pytest.mark.parametrize("ends", ["closes", "cancels"])
async def test_a_stream_that_ends_early_is_an_abort(transport: str, ends: str) -> None:
    async with bench(transport) as one:
        stream = one.open()
        await one.pick_of(stream, STREAMED)
        await stream.write(response_headers())
        await stream.read()
        if ends == "closes":
            await stream.done_writing()
        else:
            stream.cancel()
        await one.until_told(("answering", 200, ""), "aborted")


async def test_where_no_bodies_are_shown_the_end_of_the_stream_is_the_end(transport: str) -> None:
    async with bench(transport) as one:
        stream = one.open()
        await one.pick_of(stream, NONE)
        await stream.write(response_headers())
        await stream.read()
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await one.until_told(("answering", 200, ""), ("ended", None))


async def test_leaving_ends_the_stream_in_peace(transport: str) -> None:
    async with bench(transport, Follow.LEAVE) as one:
        stream = one.open()
        await one.pick_of(stream)
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        await one.until_told("left")


async def test_a_proxy_that_wanted_the_pick_alone_is_no_abort(transport: str) -> None:
    async with bench(transport) as one:
        stream = one.open()
        await stream.write(request_headers(None))
        await stream.write(request_body(body_of()))
        await stream.done_writing()
        assert kinds([await stream.read()]) == ["request_headers"]
        assert kinds([await stream.read()]) == ["request_body"]
        assert await stream.read() is grpc.aio.EOF
        await one.until_told("left")


async def answer_of_path(one: Bench, path: str | None, mode: int, **headers: str) -> Any:
    """What a proxy is answered whose request has a path, or that shows none."""
    stream = one.open()
    message = pb.ProcessingRequest.FromString(request_headers(mode, end=mode == NONE, headers=headers))
    for header in message.request_headers.headers.headers:
        if header.key == ":path":
            header.key = header.key if path is not None else "x-path"
            header.raw_value = (path or "").encode()
    await stream.write(message.SerializeToString())
    if mode == BUFFERED:
        await stream.read()
    if mode != NONE:
        await stream.write(request_body(body_of()))
    [answer] = parsed([await stream.read()])
    stream.cancel()
    return answer


@pytest.mark.parametrize("mode", [NONE, BUFFERED, DUPLEX])
@pytest.mark.parametrize(("path", "status"), [
    ("/sleep", 403), ("/flush_cache?x=/v1/completions", 403), ("/v1/load_lora_adapter", 403), ("/metrics", 403),
    ("/v1/videos", 404), ("/v1/models/../sleep", 404), ("/v1/models/..%2Fsleep", 404), ("/v1/responses//", 404),
    ("/v1/completions%00", 404), ("", 404), ("*", 404),
])  # fmt: skip
async def test_a_path_that_is_no_client_s_is_refused(transport: str, path: str, status: int, mode: int) -> None:
    async with bench(transport) as one:
        answer = (await answer_of_path(one, path, mode)).immediate_response
        assert answer.status.code == status
        assert b"--client-path" in answer.body
        assert one.asked == []
        assert sum(one.outcomes.values()) == 1


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/completions/", "/v1/audio/transcriptions?x=1", "/v1/responses/a", "/v1/models",
     "/v1/models?x", "/v1/models/org/name", "/v1/models/org%2Fname", "/health", "/v1/videos/1", None],
)  # fmt: skip
async def test_a_client_s_path_is_picked_for_and_so_is_one_that_the_proxy_does_not_show(
    transport: str, path: str | None
) -> None:
    async with bench(transport, client_paths=["/v1/videos/*"]) as one:
        assert (await answer_of_path(one, path, NONE)).WhichOneof("response") == "request_headers"
        assert one.outcomes == {"picked": 1}


async def test_a_compressed_body_is_answered_in_the_engine_s_place(transport: str) -> None:
    async with bench(transport) as one:
        packed = {"content-encoding": "gzip"}
        answer = (await answer_of_path(one, "/v1/embeddings", BUFFERED, **packed)).immediate_response
        assert (answer.status.code, b"compressed" in answer.body) == (415, True)
        assert one.outcomes == {"HttpRefused": 1}


async def test_in_a_conformance_test_any_path_is_picked_for(transport: str) -> None:
    async with bench(transport, conformance=True) as one:
        assert (await answer_of_path(one, "/a-test", NONE)).WhichOneof("response") == "request_headers"


@pytest.mark.parametrize(("error", "status", "retry_after"), [
    (InvalidArgument("too long", field="prompt"), 400, None),
    (PermissionDenied("no"), 403, None),
    (NotFound("no such model", field="model"), 404, None),
    (ResourceExhausted("all are busy", retry_after_seconds=7.0), 429, b"7"),
    (Unavailable("nobody", retry_after_seconds=0.1), 503, b"1"),
    (Draining("leaving"), 503, b"1"),
    (FailedPrecondition("no such adapter"), 400, None),
    (ZeroDivisionError("a defect"), 500, None),
])  # fmt: skip
async def test_what_no_endpoint_takes_is_answered_in_its_place(
    transport: str, error: Exception, status: int, retry_after: bytes | None
) -> None:
    async with bench(transport) as one:
        one.error = error
        answer = await one.refused()
        assert answer.status.code == status
        headers = {option.header.key: option.header.raw_value for option in answer.headers.set_headers}
        assert headers.get("retry-after") == retry_after
        assert headers["content-type"] == b"application/json"
        assert b'"error"' in answer.body
        assert b"a defect" not in answer.body
        assert sum(one.outcomes.values()) == 1
        if isinstance(error, KvscoutError):
            assert error.message.encode() in answer.body
        assert not one.told


async def test_a_body_that_is_no_request_is_refused_and_nobody_asked(transport: str) -> None:
    async with bench(transport) as one:
        assert (await one.refused(b"{")).status.code == 400
        assert (await one.refused(b'{"model": 1}')).status.code == 400
        assert not one.asked


async def test_a_pick_that_hangs_is_made_with_what_is_known_here_or_given_up(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FALLBACK_SECONDS", 0.05)
    async with bench(transport, pick_seconds=0.05) as one:
        one.hangs = one.manages_alone = True
        await one.pick_of(one.open())
        assert one.cancelled == 1
        one.manages_alone = False
        answer = await one.refused()
        assert answer.status.code == 503
        assert one.cancelled == 3


async def test_a_proxy_that_goes_while_a_pick_is_made_cancels_it(transport: str) -> None:
    async with bench(transport) as one:
        one.hangs = True
        stream = one.open()
        await stream.write(request_headers(NONE))
        await eventually(lambda: bool(one.asked), what="a pick")
        stream.cancel()
        await eventually(lambda: one.cancelled == 1, what="the pick to be cancelled")


async def test_bodies_are_bounded_one_by_one_and_all_together(transport: str) -> None:
    async with bench(transport, body_bytes=100, held_bytes=150) as one:
        stream = one.open()
        await stream.write(request_headers(DUPLEX))
        await stream.write(request_body(b"x" * 101, end=False))
        assert parsed([await stream.read()])[0].immediate_response.status.code == 413
        first, second = one.open(), one.open()
        for holding in (first, second):
            await holding.write(request_headers(DUPLEX))
        await first.write(request_body(b"x" * 90, end=False))
        await eventually(lambda: one.processor.held_bytes == 90, what="90 bytes held")
        await second.write(request_body(b"x" * 90, end=False))
        assert parsed([await second.read()])[0].immediate_response.status.code == 429
        first.cancel()
        await eventually(lambda: one.processor.held_bytes == 0, what="nothing held")


async def test_what_is_no_message_ends_the_stream_with_an_error_and_the_pick(transport: str) -> None:
    async with bench(transport) as one:
        stream = one.open()
        await one.pick_of(stream)
        await stream.write(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await one.until_told("aborted")
