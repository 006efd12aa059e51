"""Exceptions of servicers become statuses, in every shape of call."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from support.grpc_server import serving

from kvscout.v1 import events_pb2, indexer_pb2, indexer_pb2_grpc
from kvscout_common import errors
from kvscout_common.rpc.channel import call, stream
from kvscout_common.rpc.guard import Guard
from kvscout_common.transport.statuses import INTERNAL_TEXT


class Faulty(indexer_pb2_grpc.IndexerServicer):
    """Raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.closed = asyncio.Event()

    async def FindMatches(self, request: Any, context: Any) -> indexer_pb2.FindMatchesResponse:
        raise self.error

    async def Dump(self, request: Any, context: Any) -> AsyncIterator[events_pb2.KvEventBatch]:
        try:
            yield events_pb2.KvEventBatch(version=1)
            if request.model == "endless":
                await asyncio.Event().wait()
            raise self.error
        finally:
            self.closed.set()

    async def StreamFindMatches(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[indexer_pb2.StreamFindMatchesResponse]:
        async for _ in request_iterator:
            yield indexer_pb2.StreamFindMatchesResponse()
        raise self.error


def faulty(error: BaseException) -> Faulty:
    return Faulty(error)  # type: ignore[abstract]  # rpcs without a method answer UNIMPLEMENTED


def adding(servicer: Faulty) -> Any:
    return lambda server: indexer_pb2_grpc.add_IndexerServicer_to_server(servicer, server)


async def test_our_exceptions_arrive_as_themselves_with_field_and_retry_hint() -> None:
    sent = errors.ResourceExhausted("all busy", retry_after_seconds=1.5)
    async with serving(adding(faulty(sent))) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        with pytest.raises(errors.ResourceExhausted, match="all busy") as caught:
            await call(stub.FindMatches, indexer_pb2.FindMatchesRequest())
    assert caught.value.retry_after_seconds == 1.5
    assert caught.value.answered


async def test_a_dead_connection_is_unavailable_and_not_an_answer() -> None:
    async with serving(adding(faulty(errors.NotFound("x")))) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        with pytest.raises(errors.NotFound):
            await call(stub.FindMatches, indexer_pb2.FindMatchesRequest())
    unused = grpc.aio.insecure_channel("127.0.0.1:1")
    try:
        with pytest.raises(errors.Unavailable) as caught:
            await call(indexer_pb2_grpc.IndexerStub(unused).FindMatches, indexer_pb2.FindMatchesRequest(), timeout=5)
    finally:
        await unused.close()
    assert not caught.value.answered


async def test_anything_else_is_internal_with_a_fixed_text_and_a_logged_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(adding(faulty(ZeroDivisionError("secret detail")))) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        with caplog.at_level(logging.ERROR), pytest.raises(errors.InternalError) as caught:
            await call(stub.FindMatches, indexer_pb2.FindMatchesRequest())
    assert caught.value.message == INTERNAL_TEXT
    assert "secret detail" in caplog.text


async def test_a_panic_is_answered_and_told_to_the_loop() -> None:
    class Panic(BaseException):
        pass

    panic = Panic("native code")
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with serving(adding(faulty(panic))) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        with pytest.raises(errors.InternalError, match=INTERNAL_TEXT):
            await call(stub.FindMatches, indexer_pb2.FindMatchesRequest(), timeout=10)
    # Others: what grpc.aio leaves of loops that have ended may be told to this one.
    assert [one for context in told if isinstance(one := context.get("exception"), Panic)] == [panic]


async def test_an_error_after_answers_of_a_stream_arrives_after_them() -> None:
    async with serving(adding(faulty(errors.NotFound("no such model")))) as channel:
        stub = indexer_pb2_grpc.IndexerStub(channel)
        answers = []
        with pytest.raises(errors.NotFound, match="no such model"):
            async for answer in stream(stub.Dump, indexer_pb2.DumpRequest()):
                answers.append(answer)
    assert len(answers) == 1


async def test_bidirectional_streams_are_covered_too() -> None:
    async with serving(adding(faulty(errors.FailedPrecondition("block size")))) as channel:
        running = indexer_pb2_grpc.IndexerStub(channel).StreamFindMatches(
            iter([indexer_pb2.StreamFindMatchesRequest()])
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in running:
                pass
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_error_while_the_first_answer_is_on_its_way_reaches_the_caller() -> None:
    class Hasty(Faulty):
        async def StreamFindMatches(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            async def write() -> None:
                await context.write(indexer_pb2.StreamFindMatchesResponse())

            async for _ in request_iterator:
                writing = asyncio.create_task(write())
                await asyncio.sleep(0)  # it has begun
                writing.cancel()
                raise self.error

    async with serving(adding(Hasty(errors.NotFound("gone")))) as channel:  # type: ignore[abstract]
        running = indexer_pb2_grpc.IndexerStub(channel).StreamFindMatches(
            iter([indexer_pb2.StreamFindMatchesRequest()]), timeout=10
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in running:
                pass
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


class Gone:
    """The context of a call that is over, which this process is about to learn."""

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch": (SendMessageOperation,)')

    async def send_initial_metadata(self, metadata: object) -> None:
        await self.write(metadata)

    async def abort(self, code: object, text: str, trailing_metadata: object) -> None:
        await self.write(text)

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def guarded(error: Exception | None, *, both_ways: bool) -> None:
    """Runs a handler that raises, or writes where there is no error."""

    async def handler(request: Any, context: Any) -> None:
        if error is not None:
            raise error
        await context.write(b"answer")

    make = grpc.stream_stream_rpc_method_handler if both_ways else grpc.unary_stream_rpc_method_handler
    context: Any = Gone()
    shaped: Any = make
    await Guard().method("/x/Y", shaped(handler)).run([b""], context)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("error", [errors.NotFound("x"), grpc.aio.InternalError('Failed "execute_batch"'), None])
async def test_what_fails_because_the_caller_has_gone_ends_the_call_without_a_log_line(
    caplog: pytest.LogCaptureFixture, error: Exception | None, both_ways: bool
) -> None:
    with pytest.raises(asyncio.CancelledError):
        await guarded(error, both_ways=both_ways)
    assert caplog.records == []


async def test_a_wrong_use_of_grpc_is_a_defect_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    misuse = grpc.aio.InternalError("Failed grpc_call_start_batch: 8 with grpc_call_error value: 'TOO_MANY'")
    with pytest.raises(asyncio.CancelledError):
        await guarded(misuse, both_ways=False)
    assert "TOO_MANY" in caplog.text


async def test_an_error_that_repeats_a_very_long_name_arrives_shortened_and_as_itself() -> None:
    async with serving(adding(faulty(errors.NotFound(f"no worker {'x' * 100_000!r}")))) as channel:
        with pytest.raises(errors.NotFound, match="no worker 'xxx") as caught:
            await call(indexer_pb2_grpc.IndexerStub(channel).FindMatches, indexer_pb2.FindMatchesRequest())
    assert len(caught.value.message) <= errors.MAX_TEXT


GARBAGE = b"\xff\xfftruncated"


@pytest.mark.parametrize("streams", [(False, False), (False, True), (True, True)])
async def test_bytes_that_are_no_message_are_an_invalid_argument_in_every_shape_of_call(
    streams: tuple[bool, bool],
) -> None:
    method = {(False, False): "FindMatches", (False, True): "Dump", (True, True): "StreamFindMatches"}[streams]
    shape = "_".join("stream" if streaming else "unary" for streaming in streams)
    async with serving(adding(faulty(errors.NotFound("x")))) as channel:
        make: Any = getattr(channel, shape)
        rpc = make(f"/kvscout.v1.Indexer/{method}")
        running = rpc(iter([GARBAGE]) if streams[0] else GARBAGE, timeout=10)
        assert await running.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "request: is no " in await running.details()


async def test_a_stream_whose_reader_goes_away_is_closed_at_once() -> None:
    servicer = faulty(errors.NotFound("x"))
    async with serving(adding(servicer)) as channel:
        running = indexer_pb2_grpc.IndexerStub(channel).Dump(indexer_pb2.DumpRequest(model="endless"))
        await running.read()
        running.cancel()
        async with asyncio.timeout(30):
            await servicer.closed.wait()


async def test_rpcs_that_no_release_has_yet_answer_unimplemented() -> None:
    async with serving(adding(faulty(errors.NotFound("x")))) as channel:
        with pytest.raises(errors.Unimplemented):
            await call(indexer_pb2_grpc.IndexerStub(channel).RecordRouting, indexer_pb2.RecordRoutingRequest())
