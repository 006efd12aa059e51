"""The HTTP client: connections, what engines may send, and what of it is passed on."""

import asyncio
import gc
import math
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.http_peers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    TRANSPORTS,
    USAGE,
    WHOLE,
    Gathered,
    RawEngine,
    chunk,
    event,
    exchange,
    get,
    made_of,
    raw_engine,
    says,
    says_and_waits,
    served,
    stream,
    tokens,
)
from support.processes import eventually

from kvscout.v1 import gateway_pb2
from kvscout_common.http.dialect import Dialect, Usage
from kvscout_common.http.factory import connect
from kvscout_common.http.http import (
    FailureKind,
    Form,
    HttpAnswer,
    HttpCall,
    HttpClient,
    HttpFailed,
    HttpRequest,
    PrefixedSink,
    SinkGone,
    SinkStalled,
    StreamReport,
)
from kvscout_common.transport import Transport
from kvscout_gateway.values.dialects import OPENAI, SGLANG


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with made_of(request.param):
        yield request.param


@pytest.fixture
async def client(transport: Transport) -> Any:
    client = connect()
    yield client
    await client.close()


async def ask(client: HttpClient, engine: RawEngine, **fields: Any) -> HttpAnswer:
    return await client.send(HttpRequest(f"{engine.url}/v1/completions", **fields), connect_seconds=2.0)


async def relayed(
    client: HttpClient, sent: bytes, form: Form, dialect: Dialect = OPENAI, **options: Any
) -> tuple[bytes, StreamReport]:
    sink = Gathered()
    async with raw_engine(says(sent, closes=True)) as engine:
        answer = await ask(client, engine)
        report = await answer.relay(sink, form, dialect, **options)
    return sink.data, report


def pieces(data: bytes) -> gateway_pb2.GenerateResponse:
    """Messages merge by being put one behind the other, but for texts."""
    return gateway_pb2.GenerateResponse.FromString(data)


async def test_a_request_is_sent_as_it_was_given(client: HttpClient) -> None:
    async with raw_engine(says(b"HTTP/1.1 201 Made\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 2\r\n\r\nok")) as engine:
        answer = await ask(client, engine, headers=[("X-Request-Id", "r"), ("X-B", "é")], body=b"{}")
        assert (answer.status, await answer.read(2)) == (201, b"ok")
        assert [value for name, value in answer.headers if name.lower() == "x-a"] == ["1", "2"]
        head, body = engine.requests[0]
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "post /v1/completions http/1.1"
    assert {"x-request-id: r", "x-b: é", "content-length: 2", "accept-encoding: identity"} <= set(lines)
    assert body == b"{}"


async def test_connections_are_used_again(client: HttpClient) -> None:
    async with raw_engine(says(stream(WHOLE))) as engine:
        for _ in range(5):
            answer = await ask(client, engine)
            await answer.relay(Gathered(), Form.MESSAGES, OPENAI)
            await asyncio.sleep(0)
        assert engine.connections == 1


async def test_a_body_in_chunks_is_read_as_it_comes(client: HttpClient) -> None:
    async with raw_engine(says(STREAM_HEAD, chunk(b"ab"), chunk(b"cd"), LAST_CHUNK, apart=True)) as engine:
        answer = await ask(client, engine)
        assert b"".join([piece async for piece in answer.chunks()]) == b"abcd"


async def test_a_body_up_to_the_end_of_its_connection_is_whole(client: HttpClient) -> None:
    async with raw_engine(says(b"HTTP/1.1 200 OK\r\n\r\nabcd", closes=True)) as engine:
        assert await (await ask(client, engine)).read(10) == b"abcd"


async def test_an_answer_that_is_too_long_is_none(client: HttpClient) -> None:
    async with raw_engine(says(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123456789")) as engine:
        with pytest.raises(HttpFailed) as failed:
            await (await ask(client, engine)).read(9)
        assert failed.value.kind is FailureKind.PROTOCOL


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", FailureKind.BROKEN),
        (b"HTTP/1.1 200", FailureKind.BROKEN),
        (b"SSH-2.0-OpenSSH\r\n\r\n", FailureKind.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\n" + b"X: %s\r\n" % (b"a" * 100_000), FailureKind.PROTOCOL),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", FailureKind.BROKEN),
        (STREAM_HEAD + b"5\r\nab", FailureKind.BROKEN),
        (STREAM_HEAD + b"xyz\r\nab", FailureKind.PROTOCOL),
        (STREAM_HEAD + b"2\r\nabXX0\r\n\r\n", FailureKind.PROTOCOL),
        (stream(WHOLE[:30], ends=False), FailureKind.BROKEN),
    ],
)
async def test_what_is_no_whole_answer_fails_and_says_how(client: HttpClient, sent: bytes, kind: FailureKind) -> None:
    async with raw_engine(says(sent, closes=True)) as engine:
        with pytest.raises(HttpFailed) as failed:
            await (await ask(client, engine)).read(1000)
        assert failed.value.kind is kind
        assert str(failed.value)


async def test_where_nobody_listens_nothing_is_reached(client: HttpClient) -> None:
    async with raw_engine(says()) as engine:
        pass
    for url in (engine.url, "http://nowhere.invalid"):
        with pytest.raises(HttpFailed) as failed:
            await client.send(HttpRequest(url), connect_seconds=2.0)
        assert failed.value.kind is FailureKind.UNREACHABLE


async def test_without_descriptors_it_is_this_process_that_failed(client: HttpClient) -> None:
    async with raw_engine(says(stream(WHOLE))) as engine:
        await (await ask(client, engine)).read(1000)
        await client.close()
        client = connect()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(HttpFailed) as failed:
                await ask(client, engine)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert failed.value.kind is FailureKind.RESOURCES
        await client.close()


async def test_who_stops_waiting_for_an_answer_closes_the_connection(client: HttpClient) -> None:
    async with raw_engine(says_and_waits()) as engine:
        asking = asyncio.create_task(ask(client, engine))
        await eventually(lambda: bool(engine.requests))
        asking.cancel()
        await eventually(lambda: _closed(engine))


async def _closed(engine: RawEngine) -> bool:
    return engine.closed == 1


async def test_an_abort_ends_what_runs(client: HttpClient) -> None:
    async with raw_engine(says_and_waits(STREAM_HEAD, chunk(tokens(1)))) as engine:
        answer = await ask(client, engine)
        begun = asyncio.Event()
        relaying = asyncio.create_task(answer.relay(Gathered(), Form.BYTES, OPENAI, on_first_output=begun.set))
        await begun.wait()
        answer.abort()
        with pytest.raises(HttpFailed) as failed:
            await relaying
        assert failed.value.kind is FailureKind.BROKEN
        await eventually(lambda: _closed(engine))


@pytest.mark.parametrize("form", list(Form))
async def test_a_stream_is_noticed_as_it_passes(client: HttpClient, form: Form) -> None:
    first: list[str] = []
    data, report = await relayed(client, stream(WHOLE), form, on_first_output=lambda: first.append("output"))
    assert (report.events, report.outputs, report.tokens, report.finish) == (3, 2, 3, "stop")
    assert (report.done, report.overrun, report.error, first) == (True, False, b"", ["output"])
    assert report.usage == Usage(9, 4, 3)
    assert 0 < report.first_output_at <= report.last_output_at <= report.progress_at
    assert report.passed == len(data)
    if form is Form.MESSAGES:
        message = pieces(data)
        assert (list(message.token_ids), message.text) == ([1, 2, 3], "ab")
        assert (message.finish_reason, message.engine_finish_reason) == (gateway_pb2.FINISH_REASON_STOP, "stop")
        assert message.usage == gateway_pb2.Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=4)
    else:
        assert data == (WHOLE if form is Form.BYTES else WHOLE.replace(USAGE, b""))


async def test_a_stream_that_ends_early_is_not_done(client: HttpClient) -> None:
    data, report = await relayed(client, stream(tokens(1)), Form.BYTES)
    assert (data, report.done) == (tokens(1), False)


async def test_a_body_without_events_passes_as_it_is(client: HttpClient) -> None:
    body = b'data: {"error": 1}\n' * 20
    sent = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    data, report = await relayed(client, sent, Form.WITHOUT_USAGE)
    assert (data, report.done, report.events, report.passed) == (body, True, 0, len(body))


@pytest.mark.parametrize("form", list(Form))
async def test_an_error_as_the_first_word_ends_a_stream_of_which_nothing_passed(client: HttpClient, form: Form) -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    sent = stream(b": ping\n\n", role, event({"error": {"message": "gone", "code": 400}}), WHOLE)
    data, report = await relayed(client, sent, form)
    assert (data, report.passed, report.outputs) == (b"", 0, 0)
    assert b'"gone"' in report.error


async def test_an_error_behind_output_passes_as_it_came_and_ends_pieces(client: HttpClient) -> None:
    body = tokens(1) + event({"object": "error", "message": "gone"}) + DONE
    data, report = await relayed(client, stream(body), Form.BYTES)
    assert data == body
    assert b'"gone"' in report.error
    data, report = await relayed(client, stream(body), Form.MESSAGES)
    assert list(pieces(data).token_ids) == [1]
    assert b'"gone"' in report.error


async def test_nonsense_is_passed_on_and_is_no_piece(client: HttpClient) -> None:
    body = tokens(1) + b"data: {]\n\n" + DONE
    data, report = await relayed(client, stream(body), Form.BYTES)
    assert (data, report.events) == (body, 2)
    with pytest.raises(HttpFailed) as failed:
        await relayed(client, stream(body), Form.MESSAGES)
    assert failed.value.kind is FailureKind.PROTOCOL


async def test_output_past_the_end_is_left_out(client: HttpClient) -> None:
    body = tokens(1) + tokens(2, 3) + tokens(4, 5) + DONE
    for form, expected in ((Form.BYTES, tokens(1)), (Form.MESSAGES, None)):
        data, report = await relayed(client, stream(body), form, max_tokens=2)
        assert report.overrun
        assert report.done
        if expected is None:
            message = pieces(data)
            assert (list(message.token_ids), message.engine_finish_reason) == ([1, 2], "length")
        else:
            assert data == expected


async def test_chat_chunks_are_output_by_their_content(client: HttpClient) -> None:
    deltas = [{"role": "assistant"}, {"content": "he"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}]
    body = b"".join(event({"choices": [{"delta": delta}]}) for delta in deltas) + DONE
    data, report = await relayed(client, stream(body), Form.BYTES)
    assert (data, report.events, report.outputs, report.tokens) == (body, 4, 3, 3)
    data, _ = await relayed(client, stream(body), Form.MESSAGES)
    assert pieces(data).text == "he"


@pytest.mark.parametrize("cumulative", [True, False])
async def test_sglangs_stream_is_told_by_what_is_new(client: HttpClient, cumulative: bool) -> None:
    body = b""
    for count in range(1, 5):
        since = 0 if cumulative else count - 1
        finish = {"type": "length", "length": 4} if count == 4 else None
        meta = {"finish_reason": finish, "prompt_tokens": 9, "completion_tokens": count, "cached_tokens": 8}
        ids = list(range(10 + since, 10 + count))
        body += event({"text": "abcd"[since:count], "output_ids": ids, "meta_info": meta})
    data, report = await relayed(client, stream(body + DONE), Form.MESSAGES, dialect=SGLANG)
    message = pieces(data)
    assert (list(message.token_ids), message.text, message.engine_finish_reason) == ([10, 11, 12, 13], "abcd", "length")
    assert message.usage == gateway_pb2.Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=8)
    assert (report.tokens, report.outputs, report.finish) == (4, 4, "length")


async def test_sglangs_abort_with_a_status_is_an_error(client: HttpClient) -> None:
    reason = {"type": "abort", "message": "too long", "status_code": 400}
    body = event({"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}})
    data, report = await relayed(client, stream(body + DONE), Form.MESSAGES, dialect=SGLANG)
    assert (data, b"too long" in report.error) == (b"", True)


async def test_an_engine_waits_while_the_sink_takes_nothing(client: HttpClient) -> None:
    free = asyncio.Event()

    class Slow(Gathered):
        async def write(self, data: bytes) -> None:
            await free.wait()
            await super().write(data)

    async def endless(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while len(sent) < 10_000:
            sent.append(1)
            writer.write(chunk(tokens(1, text="x" * 10_000)))
            await writer.drain()
        writer.write(chunk(DONE) + LAST_CHUNK)

    sent: list[int] = []
    sink = Slow()
    async with raw_engine(endless) as engine:
        answer = await ask(client, engine)
        relaying = asyncio.create_task(answer.relay(sink, Form.BYTES, OPENAI))

        async def waits() -> bool:
            before = len(sent)
            await asyncio.sleep(0.1)
            return len(sent) == before > 0

        await eventually(waits)
        assert len(sent) < 5_000
        assert answer.report.listening_since == math.inf
        free.set()
        report = await relaying
        assert (report.outputs, report.done) == (10_000, True)


async def test_a_sink_that_takes_nothing_for_too_long_ends_the_relay(client: HttpClient) -> None:
    class Deaf(Gathered):
        async def write(self, data: bytes) -> None:
            await asyncio.Event().wait()

    async with raw_engine(says_and_waits(STREAM_HEAD, chunk(tokens(1)))) as engine:
        answer = await ask(client, engine)
        with pytest.raises(SinkStalled):
            await answer.relay(Deaf(), Form.BYTES, OPENAI, write_seconds=0.05)
        await eventually(lambda: _closed(engine))


async def test_the_engine_is_closed_when_the_sink_has_gone(client: HttpClient) -> None:
    class Gone(Gathered):
        async def write(self, data: bytes) -> None:
            raise SinkGone("it left")

    async with raw_engine(says_and_waits(STREAM_HEAD, chunk(tokens(1)))) as engine:
        answer = await ask(client, engine)
        with pytest.raises(SinkGone):
            await answer.relay(Gone(), Form.BYTES, OPENAI)
        await eventually(lambda: _closed(engine))


async def test_an_engine_that_does_not_end_its_body_has_answered_all_the_same(client: HttpClient) -> None:
    async with raw_engine(says_and_waits(stream(WHOLE, ends=False))) as engine:
        answer = await ask(client, engine)
        sink = Gathered()
        assert (await answer.relay(sink, Form.MESSAGES, OPENAI)).done
        assert list(pieces(sink.data).token_ids) == [1, 2, 3]


async def test_a_relay_from_an_engine_to_a_client(client: HttpClient) -> None:
    async def front(call: HttpCall) -> None:
        answer = await ask(client, engine, body=await call.body())
        await call.start(answer.status, [("Content-Type", "text/event-stream")])
        await answer.relay(call, Form.BYTES, OPENAI)
        await call.end()

    async with raw_engine(says(stream(*WHOLE.splitlines(keepends=True)))) as engine, served(front) as (_, port):
        got = await exchange(port, get())
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    unchunked = b"".join(body.split(b"\r\n")[1::2])
    assert unchunked == WHOLE


@pytest.mark.parametrize("error", [False, True])
async def test_what_precedes_an_answer_goes_with_the_first_of_it_or_not_at_all(client: HttpClient, error: bool) -> None:
    sinks: list[PrefixedSink] = []

    async def front(call: HttpCall) -> None:
        await call.start(200, [])
        for to in (call, gathered):
            answer = await ask(client, engine)
            sinks.append(PrefixedSink(to, b"route "))
            await answer.relay(sinks[-1], Form.BYTES, OPENAI)
        await call.end()

    gathered = Gathered()
    sent = event({"error": {"code": 500}}) if error else WHOLE
    async with raw_engine(says(stream(sent))) as engine, served(front) as (_, port):
        got = await exchange(port, get())
    assert [sink.first for sink in sinks] == ([b"route ", b"route "] if error else [b"", b""])
    assert gathered.chunks == ([] if error else [b"route " + WHOLE])
    assert (b"route " + WHOLE in got) is not error


async def test_a_client_that_goes_takes_the_engines_request_with_it(client: HttpClient) -> None:
    async def front(call: HttpCall) -> None:
        answer = await ask(client, engine)
        await call.start(200, [])
        await answer.relay(call, Form.BYTES, OPENAI)
        await call.end()

    async with raw_engine(says_and_waits(STREAM_HEAD, chunk(tokens(1)))) as engine, served(front) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(get())
        await reader.readuntil(b"data: ")
        writer.close()
        await eventually(lambda: _closed(engine))


async def test_what_is_left_of_a_closed_client_may_be_collected_by_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    gc.collect()
    client = connect()
    async with raw_engine(says_and_waits(stream(tokens(1), ends=False))) as engine:
        answer, read = [await ask(client, engine) for _ in range(2)]
        relaying = asyncio.create_task(read.relay(Gathered(), Form.MESSAGES, OPENAI))
        await asyncio.sleep(0)
        await client.close()
        answer.abort()
        cycle: list[object] = [client, answer, read, *await asyncio.gather(relaying, return_exceptions=True)]
        assert isinstance(cycle[-1], HttpFailed)
        cycle.append(cycle)
        del client, answer, read, relaying, cycle
        await asyncio.to_thread(gc.collect)
    assert not raised


async def test_the_end_of_a_client_is_not_that_of_an_answer_which_lasts_as_long_as_its_connection() -> None:
    client = connect()
    async with raw_engine(says_and_waits(b"HTTP/1.1 200 OK\r\n\r\nthe beginning")) as engine:
        answer = await ask(client, engine)
        relaying = asyncio.create_task(answer.relay(Gathered(), Form.BYTES, OPENAI))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(HttpFailed):
            await relaying


async def test_nobody_waits_for_what_is_read_of_a_closed_client() -> None:
    client = connect()
    async with raw_engine(says_and_waits(stream(tokens(1)))) as engine:
        answer = await ask(client, engine)
        await client.close()
        async with asyncio.timeout(20):
            with suppress(HttpFailed):
                await answer.relay(Gathered(), Form.MESSAGES, OPENAI)
