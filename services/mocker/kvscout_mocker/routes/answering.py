"""From a validated request to its answer over HTTP, whichever API it came through: whole, or as a stream of events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import replace

from aiohttp import web

from kvscout_common.errors import InternalError, Unavailable
from kvscout_mocker.answers.answers import Answer, CacheUse
from kvscout_mocker.answers.event_stream import begin_stream, break_off, only_pings
from kvscout_mocker.engine.rank import TokenStream
from kvscout_mocker.engine.request import ChoiceDelta
from kvscout_mocker.faults import Faults
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.routes.intake import Admitted, Intake
from kvscout_mocker.server import Document


class Answering:
    """Generates answers.

    Args:
        intake: Into the engines.
        faults: Faults of the process.
    """

    def __init__(self, intake: Intake, faults: Faults) -> None:
        self._intake = intake
        self._faults = faults

    async def respond(
        self, http: web.Request, answer: Answer, answer_id: str, *, ranked: bool = True
    ) -> web.StreamResponse:
        """Generate an answer; a client that goes away frees its request's blocks.

        Args:
            http: What asked for it.
            answer: Its shape.
            answer_id: For logs and transfers.
            ranked: `X-data-parallel-rank` chooses the rank; else the header has no effect.
        """
        generation = answer.generation
        if generation.stream and self._faults.mutes():
            return await only_pings(http)
        dp_rank = http.headers.get("X-data-parallel-rank") if ranked else None
        async with self._intake.admitted(with_priority(generation, http), answer_id, dp_rank) as admitted:
            if not generation.stream:
                return web.json_response(await whole(answer, admitted))
            response = await begin_stream(http)
            try:
                async for events in streamed(answer, admitted):
                    await response.write(events)
            except (Unavailable, InternalError):
                return break_off(http, response)
            await response.write_eof()
            return response

    async def whole_of(self, answer: Answer, answer_id: str) -> Document:
        """Generate a whole answer that nobody waits for."""
        async with self._intake.admitted(answer.generation, answer_id, None) as admitted:
            return await whole(answer, admitted)

    async def stream_of(self, answer: Answer, answer_id: str) -> AsyncIterator[bytes]:
        """Generate the events of an answer that go nowhere yet."""
        async with self._intake.admitted(answer.generation, answer_id, None) as admitted:
            async for events in streamed(answer, admitted):
                yield events


async def whole(answer: Answer, admitted: Admitted) -> Document:
    """Return the JSON of a whole answer."""
    generation = answer.generation
    deltas = await _all(generation, admitted.stream)
    besides = admitted.done()
    if generation.tells_first_token:
        besides = {**besides, "first_token_unix_seconds": admitted.stream.began_unix}
    return answer.whole(deltas, _cache(admitted)) | besides


async def streamed(answer: Answer, admitted: Admitted) -> AsyncIterator[bytes]:
    """Yield the events of an answer.

    Raises:
        Unavailable: The engine stopped before the answer was complete.
        InternalError: The request failed, and the API has no event that says so.
    """
    stream = admitted.stream
    for event in answer.greeting():
        yield event
    opened = False
    while not stream.drained:
        try:
            deltas = await stream.read()
        except InternalError as error:
            events = answer.failure(error)
            if events is None:
                raise
            yield b"".join(events)
            return
        opening = [] if opened else answer.opening()
        opened = True
        yield b"".join([*opening, *(event for delta in deltas for event in answer.delta(delta))])
    admitted.done()  # a stream has no place for what it gives
    yield b"".join(answer.closing(_cache(admitted)))


def with_priority(generation: Generation, http: web.Request) -> Generation:
    """Return a request with the priority of vLLM's header, if it has an integer there."""
    given = http.headers.get("X-Vllm-Priority")
    try:
        return generation if given is None else replace(generation, priority=int(given))
    except ValueError:
        return generation


def request_id(http: web.Request) -> str:
    """Return the id that the client chose, or a new one."""
    return http.headers.get("X-Request-Id") or uuid.uuid4().hex


def _cache(admitted: Admitted) -> CacheUse:
    return CacheUse(admitted.cached_tokens, admitted.written_tokens)


async def _all(generation: Generation, stream: TokenStream) -> list[ChoiceDelta]:
    collected = [ChoiceDelta(index, [], 0, None) for index in range(generation.choices)]
    while any(delta.finish_reason is None for delta in collected):
        for delta in await stream.read():
            collected[delta.choice].tokens.extend(delta.tokens)
            collected[delta.choice] = collected[delta.choice]._replace(finish_reason=delta.finish_reason)
    return collected
