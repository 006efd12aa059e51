"""An engine's stream as the chunks of a gRPC call: what comes of it, and what its caller does to the engine."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import pytest
from support.http_peers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    TRANSPORTS,
    WHOLE,
    RawEngine,
    Script,
    chunk,
    made_of,
    raw_engine,
    says,
    says_and_waits,
    stream,
    tokens,
)
from support.processes import eventually
from transport.echo_service import MAX_MESSAGE_BYTES, grpcio_channel

from kvscout.v1 import gateway_pb2
from kvscout_common.http.factory import connect
from kvscout_common.http.http import Form, HttpFailed, HttpRequest, PrefixedSink, SinkStalled, StreamReport
from kvscout_common.rpc.guard import Guard
from kvscout_common.transport import Transport
from kvscout_gateway.values.dialects import OPENAI

SERVICE = "test.Pump"
ROUTE = gateway_pb2.GenerateResponse(request_id="r").SerializeToString()


class Running(NamedTuple):
    """A server that pumps what an engine says into its one method."""

    engine: RawEngine
    reports: list[StreamReport | Exception]
    """How each relay ended."""
    call: Callable[..., Any]


@pytest.fixture(autouse=True, params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    with made_of(request.param):
        yield request.param


@asynccontextmanager
async def running(transport: Transport, script: Script, **options: Any) -> AsyncIterator[Running]:
    client = connect()
    reports: list[StreamReport | Exception] = []

    async def generate(request: bytes, context: Any) -> None:
        try:
            answer = await client.send(HttpRequest(engine.url), connect_seconds=2)
            reports.append(await answer.relay(PrefixedSink(context, ROUTE), Form.MESSAGES, OPENAI, **options))
        except (HttpFailed, SinkStalled) as error:
            reports.append(error)
            await context.abort(grpc.StatusCode.INTERNAL, str(error))

    server = _server(transport)
    handlers: Any = {"Generate": grpc.unary_stream_rpc_method_handler(generate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
    if transport is Transport.NATIVE:
        port = server.listen("127.0.0.1", 0)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with raw_engine(script) as engine, grpcio_channel(port) as channel:
        yield Running(engine, reports, channel.unary_stream(f"/{SERVICE}/Generate"))
    await server.stop(0)
    await client.close()


def _server(transport: Transport) -> Any:
    if transport is Transport.GRPCIO:
        return grpc.aio.server()
    from kvscout_common.rpc.native_server import NativeServer

    return NativeServer(Guard(), max_message_bytes=MAX_MESSAGE_BYTES, max_streams=100)


async def gathered(call: Any) -> gateway_pb2.GenerateResponse:
    whole = gateway_pb2.GenerateResponse()
    while (message := await call.read()) is not grpc.aio.EOF:
        whole.MergeFrom(gateway_pb2.GenerateResponse.FromString(message))
    return whole


async def test_a_stream_becomes_pieces(transport: Transport) -> None:
    first: list[int] = []
    sent = says(stream(*WHOLE.splitlines(keepends=True)))
    async with running(transport, sent, on_first_output=lambda: first.append(1)) as run:
        for _ in range(3):
            whole = await gathered(run.call(b""))
            assert (list(whole.token_ids), whole.engine_finish_reason) == ([1, 2, 3], "stop")
            assert (whole.request_id, whole.usage.cached_tokens) == ("r", 4)
        assert [report.done for report in run.reports if isinstance(report, StreamReport)] == [True] * 3
        assert (len(first), run.engine.connections) == (3, 1)


async def test_what_breaks_off_is_told_behind_what_came_before(transport: Transport) -> None:
    async with running(transport, says(stream(tokens(1), ends=False), closes=True)) as run:
        call = run.call(b"")
        assert list(gateway_pb2.GenerateResponse.FromString(await call.read()).token_ids) == [1]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
        assert failed.value.code() is grpc.StatusCode.INTERNAL


async def test_a_caller_that_goes_takes_the_engines_request_with_it(transport: Transport) -> None:
    async with running(transport, says_and_waits(STREAM_HEAD, chunk(tokens(1)))) as run:
        call = run.call(b"")
        await call.read()
        call.cancel()
        await eventually(lambda: run.engine.closed == 1)


def endless(sent: list[int], count: int) -> Script:
    """So many long events, as fast as they are taken."""

    async def script(engine: RawEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in range(count):
            sent.append(number)
            writer.write(chunk(tokens(number, text="x" * 10_000)))
            await writer.drain()
        writer.write(chunk(DONE) + LAST_CHUNK)

    return script


async def test_an_engine_waits_for_a_caller_that_reads_slowly(transport: Transport) -> None:
    sent: list[int] = []
    async with running(transport, endless(sent, 5_000)) as run:
        call = run.call(b"")
        tokens_read = list(gateway_pb2.GenerateResponse.FromString(await call.read()).token_ids)

        async def waits() -> bool:
            before = len(sent)
            await asyncio.sleep(0.1)
            return len(sent) == before

        await eventually(waits)
        assert len(sent) < 4_000
        tokens_read += (await gathered(call)).token_ids
        assert tokens_read == list(range(5_000))


async def test_a_caller_that_reads_nothing_ends_its_stream(transport: Transport) -> None:
    sent: list[int] = []
    async with running(transport, endless(sent, 10_000), write_seconds=0.2) as run:
        call = run.call(b"")
        await call.read()
        await eventually(lambda: bool(run.reports))
        assert isinstance(run.reports[0], SinkStalled)
        call.cancel()
