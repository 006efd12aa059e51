"""Anthropic's API as vLLM serves it: `/v1/messages` and `/v1/messages/count_tokens`.

As in vLLM, an error is in Anthropic's shape only once the body is read: a body that is not one of a message is refused
in OpenAI's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from kvscout_common.errors import InternalError, NotFound, ResourceExhausted, Unavailable
from kvscout_mocker.answers.message_answers import MessageAnswer, error_message
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.requests.generation import ContextExceeded
from kvscout_mocker.requests.messages import count_tokens, parse_messages
from kvscout_mocker.routes.answering import Answering, request_id
from kvscout_mocker.server import json_body, retry_headers, status_of
from kvscout_mocker.tokens.tokenizer import WordTokenizer

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AnthropicRoutes:
    """`/v1/messages` and what is below it.

    Args:
        config: Configuration of the process.
        answering: Generates answers.
    """

    def __init__(self, config: MockerConfig, answering: Answering) -> None:
        self._config = config
        self._answering = answering
        self._tokenizer = WordTokenizer(config.engine.vocab_size)

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.add_routes(
            [
                web.post("/v1/messages", _anthropic_errors(self.messages)),
                web.post("/v1/messages/count_tokens", _anthropic_errors(self.count_tokens)),
            ]
        )

    async def messages(self, http: web.Request) -> web.StreamResponse:
        """Generate the next message of a conversation, streamed or not."""
        generation = parse_messages(await json_body(http), self._config, self._tokenizer)
        answer_id = f"chatcmpl-{request_id(http)}"
        answer = MessageAnswer(generation, answer_id, self._tokenizer, self._config.prompt_tokens_details)
        return await self._answering.respond(http, answer, answer_id)

    async def count_tokens(self, http: web.Request) -> web.StreamResponse:
        """Return the tokens of a prompt."""
        tokens = count_tokens(await json_body(http), self._config, self._tokenizer)
        return web.json_response({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


def _anthropic_errors(handler: _Handler) -> _Handler:
    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            return await handler(http)
        except (ContextExceeded, NotFound, ResourceExhausted, Unavailable, InternalError) as error:
            status, _ = status_of(error)
            return web.json_response(error_message(error), status=status, headers=retry_headers(error))

    return handle
