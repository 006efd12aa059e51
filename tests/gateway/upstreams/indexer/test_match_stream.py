"""FindMatches over streams: coalesced, each request with its own deadline, unary where there is no stream."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.grpc_server import serving
from support.processes import eventually

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_common import errors
from kvscout_common.rpc.channel import call
from kvscout_gateway.upstreams import coalesced_stream
from kvscout_gateway.upstreams.indexer import match_stream
from kvscout_gateway.upstreams.indexer.match_stream import MatchStream


class Answering(indexer_pb2_grpc.IndexerServicer):
    """Answers with the number of blocks asked for; a first hash of 0 is an error, of 1 is never answered."""

    def __init__(self) -> None:
        self.streams = 0
        self.ended = 0
        self.messages: list[int] = []
        self.breaks = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def StreamFindMatches(
        self, requests: AsyncIterator[indexer_pb2.StreamFindMatchesRequest], context: Any
    ) -> AsyncIterator[indexer_pb2.StreamFindMatchesResponse]:
        self.streams += 1
        try:
            async for message in requests:
                self.messages.append(len(message.requests))
                await self.goes_on.wait()
                if self.breaks:
                    self.breaks -= 1
                    raise errors.Unavailable("broken")
                yield self._answer(message)
        finally:
            self.ended += 1

    @staticmethod
    def _answer(message: indexer_pb2.StreamFindMatchesRequest) -> indexer_pb2.StreamFindMatchesResponse:
        answer = indexer_pb2.StreamFindMatchesResponse()
        for request in reversed(message.requests):  # in no order
            if request.block_hashes[0] == 0:
                answer.results.add(id=request.id, code=5, message="no such model")
            elif request.block_hashes[0] != 1:
                found = indexer_pb2.FindMatchesResponse(num_blocks=len(request.block_hashes))
                answer.results.add(id=request.id, response=found)
        return answer


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[MatchStream, Answering]]:
    servicer = Answering()  # type: ignore[abstract]  # the rest answers UNIMPLEMENTED
    async with serving(lambda server: indexer_pb2_grpc.add_IndexerServicer_to_server(servicer, server)) as channel:
        stream = MatchStream(channel)
        try:
            yield stream, servicer
        finally:
            await stream.close()


async def ask(stream: MatchStream, *hashes: int, timeout_seconds: float = 10.0) -> int:
    request = indexer_pb2.FindMatchesRequest(model="m", block_hashes=hashes).SerializeToString()
    return (await call(stream, request, timeout=timeout_seconds)).num_blocks


async def test_requests_of_one_turn_go_together_and_find_their_own_answers() -> None:
    async with streaming() as (stream, servicer):
        assert await asyncio.gather(*(ask(stream, *[7] * (n + 1)) for n in range(20))) == list(range(1, 21))
        assert servicer.messages == [20]
        assert await ask(stream, 7, 8) == 2
        assert servicer.streams == 1


async def test_what_waits_while_a_message_is_long_under_way_is_split_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced_stream, "MESSAGE_BYTES", 90)
    async with streaming() as (stream, servicer):
        assert await asyncio.gather(*(ask(stream, *[7] * n) for n in (4, 4, 4, 30, 1))) == [4, 4, 4, 30, 1]
        assert servicer.messages == [2, 1, 1, 1]


async def test_an_error_is_the_answer_of_its_request_alone() -> None:
    async with streaming() as (stream, servicer):
        answers = await asyncio.gather(ask(stream, 0), ask(stream, 7, 7), return_exceptions=True)
        assert isinstance(answers[0], errors.NotFound)
        assert (str(answers[0]), answers[0].answered, answers[1]) == ("no such model", True, 2)
        assert servicer.streams == 1


async def test_each_request_has_its_own_deadline_and_the_stream_goes_on() -> None:
    async with streaming() as (stream, servicer):
        late = asyncio.create_task(ask(stream, 1, timeout_seconds=0.05))
        cancelled = asyncio.create_task(ask(stream, 1))
        assert await ask(stream, 7) == 1
        cancelled.cancel()
        with pytest.raises(errors.DeadlineExceeded):
            await late
        assert await ask(stream, 7, 7) == 2
        assert servicer.streams == 1


async def test_where_a_stream_breaks_another_one_is_tried_once() -> None:
    async with streaming() as (stream, servicer):
        servicer.breaks = 1
        assert await asyncio.gather(*(ask(stream, *[7] * n) for n in (1, 2, 3))) == [1, 2, 3]
        assert servicer.streams == 2
        servicer.breaks = 2
        with pytest.raises(errors.Unavailable, match="broken"):
            await ask(stream, 7)
        assert await ask(stream, 7) == 1


async def test_a_stream_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_stream, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(match_stream, "CLOSE_SECONDS", 0.2)
    async with streaming() as (stream, servicer):
        servicer.goes_on.clear()
        hanging = asyncio.create_task(ask(stream, 7, 7))
        await eventually(lambda: servicer.messages == [1])
        behind = asyncio.create_task(ask(stream, 7))  # waits for the message under way
        await eventually(lambda: servicer.streams >= 2)
        servicer.goes_on.set()
        assert list(await asyncio.gather(hanging, behind)) == [2, 1]


async def test_a_stream_ends_by_itself_so_that_the_server_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_stream, "RENEW_SECONDS", 0.05)
    async with streaming() as (stream, servicer):
        assert await ask(stream, 7) == 1
        await eventually(lambda: servicer.ended == 1)
        for _ in range(100):  # across several renewals
            assert await ask(stream, 7) == 1
