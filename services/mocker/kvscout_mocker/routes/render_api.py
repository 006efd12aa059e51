"""vLLM's render endpoints: the tokens that a body has in the engine, without running it."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig, Render
from kvscout_mocker.requests.chat import parse_chat
from kvscout_mocker.requests.completions import parse_completion
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.requests.messages import parse_messages
from kvscout_mocker.requests.responses import parse_response, previous_id
from kvscout_mocker.server import Document, json_body
from kvscout_mocker.tokens.tokenizer import WordTokenizer

_DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
Parse = Callable[[object, MockerConfig, WordTokenizer], Generation]


class RenderRoutes:
    """`/v1/…/render`.

    Args:
        config: Configuration of the process.
    """

    def __init__(self, config: MockerConfig) -> None:
        self._config = config
        self._tokenizer = WordTokenizer(config.engine.vocab_size)

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        routes: dict[str, tuple[str, Parse]] = {
            "/v1/completions/render": ("cmpl", parse_completion),
            "/v1/chat/completions/render": ("chatcmpl", parse_chat),
        }
        if self._config.render is not Render.CHAT:
            routes["/v1/messages/render"] = ("chatcmpl", parse_messages)
            routes["/v1/responses/render"] = ("resp", _stateless)
        for path, (prefix, parse) in routes.items():
            app.router.add_post(path, self._handler(prefix, parse))

    def _handler(self, prefix: str, parse: Parse) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(http: web.Request) -> web.StreamResponse:
            if self._config.render is Render.OFF:
                error = {"message": _DISABLED, "type": "PermissionDeniedError", "param": None, "code": 403}
                return web.json_response({"error": error}, status=403)
            generation = parse(await json_body(http), self._config, self._tokenizer)
            document = _rendered(generation, f"{prefix}-{uuid.uuid4().hex}")
            return web.json_response([document] if prefix == "cmpl" else document)

        return handle


def _stateless(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> Generation:
    if previous_id(body):
        raise InvalidArgument(
            "previous_response_id is not supported by the stateless render endpoint.", field="previous_response_id"
        )
    return parse_response(body, config, tokenizer).generation


def _rendered(generation: Generation, request_id: str) -> Document:
    return {
        "request_id": request_id,
        "token_ids": generation.prompt.tolist(),
        "token_offsets": None,
        "features": None,
        "sampling_params": {"max_tokens": generation.max_tokens, "n": generation.choices},
        "model": generation.model,
        "stream": generation.stream,
        "cache_salt": generation.scope.cache_salt or None,
        "priority": generation.priority,
        "kv_transfer_params": None,
    }
