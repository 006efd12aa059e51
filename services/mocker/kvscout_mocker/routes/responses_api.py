"""OpenAI's Responses API as vLLM serves it: `/v1/responses`, and with a store, what is below it.

As in vLLM, `X-data-parallel-rank` has no effect, responses are stored only if the engine was started so, and a response
that is not stored is not found. There is no `/v1/responses/input_tokens`, and none is deleted.
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from kvscout_common.errors import KvscoutError
from kvscout_mocker.answers.event_stream import begin_stream
from kvscout_mocker.answers.response_answers import ResponseAnswer
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import optional_integer
from kvscout_mocker.requests.responses import PreviousResponse, ResponseRequest, parse_response, previous_id
from kvscout_mocker.routes.answering import Answering
from kvscout_mocker.routes.response_store import ResponseStore, StoredResponse
from kvscout_mocker.server import Document, json_body
from kvscout_mocker.tokens.tokenizer import WordTokenizer

_NO_BACKGROUND = (
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)


class ResponsesRoutes:
    """`/v1/responses` and what is below it.

    Args:
        config: Configuration of the process.
        answering: Generates answers.
    """

    def __init__(self, config: MockerConfig, answering: Answering) -> None:
        self._config = config
        self._answering = answering
        self._tokenizer = WordTokenizer(config.engine.vocab_size)
        self._store = ResponseStore()

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.add_routes(
            [
                web.post("/v1/responses", self.create),
                web.get("/v1/responses/{response_id}", self.retrieve),
                web.post("/v1/responses/{response_id}/cancel", self.cancel),
            ]
        )

    async def create(self, http: web.Request) -> web.StreamResponse:
        """Generate a response, streamed or not, now or in the background."""
        body = await json_body(http)
        continued = previous_id(body)
        previous = self._store.get(continued) if continued else None
        if continued and previous is None:
            return _not_found(continued)
        history = None if previous is None else PreviousResponse(previous.messages, previous.document["output"])
        request = parse_response(body, self._config, self._tokenizer, history)
        if request.background and not self._config.store_responses:
            return _refused(400, _NO_BACKGROUND, "background")
        if request.background:
            return await self._in_background(http, request)

        def completed(response: Document) -> None:
            if request.stores and self._config.store_responses:
                self._store.put(request.response_id, StoredResponse(response, request.messages))

        answer = ResponseAnswer(request, int(time.time()), self._tokenizer, completed)
        return await self._answering.respond(http, answer, request.response_id, ranked=False)

    async def retrieve(self, http: web.Request) -> web.StreamResponse:
        """Return a stored response, or with `stream=true` the events of one from the background."""
        response_id = http.match_info["response_id"]
        stored = self._store.get(response_id)
        if stored is None:
            return _not_found(response_id)
        if http.query.get("stream") not in ("true", "True", "1"):
            return web.json_response(stored.document)
        if not stored.events and stored.task is None:
            return _refused(400, f"Unknown response_id: {response_id}", "response_id", kind="BadRequestError")
        given = http.query.get("starting_after")
        after = {"starting_after": int(given)} if given is not None and given.isdecimal() else {}
        first = optional_integer(after, "starting_after", minimum=0)
        return await _relayed(http, stored, 0 if first is None else first + 1)

    async def cancel(self, http: web.Request) -> web.StreamResponse:
        """Break off a response from the background."""
        response_id = http.match_info["response_id"]
        stored = self._store.get(response_id)
        if stored is None:
            return _not_found(response_id)
        if stored.document["status"] not in ("queued", "in_progress"):
            return _refused(400, "Cannot cancel a synchronous response.", "response_id")
        stored.document = stored.document | {"status": "cancelled"}
        if stored.task is not None:
            stored.task.cancel()
        return web.json_response(stored.document)

    async def _in_background(self, http: web.Request, request: ResponseRequest) -> web.StreamResponse:
        def completed(response: Document) -> None:
            stored.document = response

        answer = ResponseAnswer(request, int(time.time()), self._tokenizer, completed)
        stored = StoredResponse(answer.response("queued", [], None), request.messages)
        self._store.put(request.response_id, stored)
        stored.task = asyncio.get_running_loop().create_task(
            self._generate(stored, request, answer), name=f"response-{request.response_id}"
        )
        if request.generation.stream:
            return await _relayed(http, stored, 0)
        return web.json_response(stored.document)

    async def _generate(self, stored: StoredResponse, request: ResponseRequest, answer: ResponseAnswer) -> None:
        try:
            if request.generation.stream:
                async for events in self._answering.stream_of(answer, request.response_id):
                    for event in events.split(b"\n\n")[:-1]:
                        stored.add_event(event + b"\n\n")
            else:
                await self._answering.whole_of(answer, request.response_id)
        except KvscoutError:
            stored.document = stored.document | {"status": "failed"}


async def _relayed(http: web.Request, stored: StoredResponse, first: int) -> web.StreamResponse:
    response = await begin_stream(http)
    async for event in stored.stream(first):
        await response.write(event)
    await response.write_eof()
    return response


def _not_found(response_id: str) -> web.Response:
    return _refused(404, f"Response with id '{response_id}' not found.", "response_id")


def _refused(status: int, message: str, field: str, *, kind: str = "invalid_request_error") -> web.Response:
    error: Document = {"message": message, "type": kind, "param": field, "code": status}
    return web.json_response({"error": error}, status=status)
