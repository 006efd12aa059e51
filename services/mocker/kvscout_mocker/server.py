"""vLLM's HTTP API over the ranks of one process; handlers translate, the engines decide."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvscout_common.errors import (
    InvalidArgument,
    KvscoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvscout_mocker.completions import (
    CompletionRequest,
    choice,
    parse_completion,
    parse_tokenize,
    usage,
)
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.engine import Request
from kvscout_mocker.faults import Faults
from kvscout_mocker.metrics import engine_registry
from kvscout_mocker.publisher import SEND_HWM
from kvscout_mocker.rank import Rank, TokenStream
from kvscout_mocker.sequence import Sequence as TokenSequence
from kvscout_mocker.tokenizer import WordTokenizer

_log = logging.getLogger(__name__)

PING_SECONDS = 0.1
MAX_BODY_BYTES = 64 * 1024 * 1024
_HTTP_STATUS: dict[type[KvscoutError], tuple[int, str]] = {
    InvalidArgument: (400, "BadRequestError"),
    NotFound: (404, "NotFoundError"),
    ResourceExhausted: (503, "ServiceUnavailableError"),
    Unavailable: (503, "ServiceUnavailableError"),
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """The routes and what they share."""

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank], faults: Faults) -> None:
        """Serve the ranks, given in order of their number."""
        self._config = config
        self._faults = faults
        self._ranks = ranks
        self._tokenizer = WordTokenizer(config.engine.vocab_size)
        self._registry = engine_registry(config, ranks)
        self._next_rank = 0
        self._started = int(time.time())

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[_openai_errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.get("/v1/models", self.models),
                web.post("/tokenize", self.tokenize),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
            ]
        )
        return app

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """Generate, streamed or not; a client that goes away frees its request's blocks."""
        asked = parse_completion(await json_body(http), self._config, self._tokenizer)
        if asked.stream and self._faults.mutes():
            return await _only_pings(http)
        rank = self._rank(http.headers.get("X-data-parallel-rank"))
        request = Request(
            f"cmpl-{http.headers.get('X-Request-Id') or uuid.uuid4().hex}",
            TokenSequence(
                asked.prompt,
                block_size=self._config.engine.block_size,
                hash_seed=rank.hash_seed,
                scope=asked.scope,
            ),
            asked.max_tokens,
            asked.seed,
            asked.report_prefix,
        )
        stream = rank.submit(request)
        try:
            if asked.stream:
                return await self._streamed(http, asked, stream)
            return await self._whole(asked, stream)
        finally:
            rank.abort(request)

    async def models(self, _: web.Request) -> web.StreamResponse:
        """The base model and its adapters."""
        base, length = self._config.model, self._config.engine.max_model_len
        cards = [self._card(base, None) | {"max_model_len": length}]
        cards += [self._card(name, base) for name in self._config.lora_names]
        return web.json_response({"object": "list", "data": cards})

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        """The token ids of a prompt or of a conversation."""
        tokens = parse_tokenize(await json_body(http), self._config, self._tokenizer).tolist()
        length = self._config.engine.max_model_len
        return web.json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens})

    async def health(self, _: web.Request) -> web.StreamResponse:
        """200 while the engines step: a crashed one ends the process."""
        return web.Response()

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """Prometheus text."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def kv_event_sources(self, _: web.Request) -> web.StreamResponse:
        """Each rank's resolved publisher configuration, keyed by rank, as vLLM ≥ 0.31."""
        return web.json_response(
            {
                str(rank.dp_rank): {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": rank.publisher.endpoint,
                    "replay_endpoint": rank.publisher.replay_endpoint or None,
                    "buffer_steps": self._config.buffer_steps,
                    "hwm": SEND_HWM,
                    "topic": rank.publisher.topic,
                }
                for rank in self._ranks
            }
        )

    async def reset_prefix_cache(self, _: web.Request) -> web.StreamResponse:
        """Forget all cached blocks; `success` is false if a rank is busy and keeps its own."""
        done = [rank.engine.reset_prefix_cache() for rank in self._ranks]
        return web.json_response({"success": all(done)})

    def _rank(self, header: str | None) -> Rank:
        if header is not None:
            named = next((rank for rank in self._ranks if str(rank.dp_rank) == header), None)
            if named is None:
                raise InvalidArgument(
                    f"must be a rank between 0 and {len(self._ranks) - 1}, not {header!r}",
                    field="X-data-parallel-rank",
                )
            return named
        order = [*self._ranks[self._next_rank :], *self._ranks[: self._next_rank]]
        rank = min(order, key=lambda r: r.load)
        self._next_rank = (rank.dp_rank + 1) % len(self._ranks)
        return rank

    async def _whole(self, asked: CompletionRequest, stream: TokenStream) -> web.StreamResponse:
        tokens: list[int] = []
        while len(tokens) < asked.max_tokens:
            tokens += await stream.read()
        only = choice(self._tokenizer.decode(tokens), tokens if asked.return_token_ids else None, finished=True)
        if asked.return_token_ids:
            only["prompt_token_ids"] = asked.prompt[: stream.request.prompt_tokens].tolist()
        return web.json_response(
            self._envelope(asked, stream.request) | {"choices": [only], "usage": self._usage(stream.request)}
        )

    async def _streamed(self, http: web.Request, asked: CompletionRequest, stream: TokenStream) -> web.StreamResponse:
        response = await _begin(http)
        envelope = self._envelope(asked, stream.request)
        first = True
        finished = False
        while not finished:
            try:
                tokens = await stream.read()
            except Unavailable:
                # The status is out already: a body that breaks off is the one unmistakable way to fail.
                if http.transport is not None:
                    http.transport.abort()
                return response
            finished = stream.finished
            delta = choice(
                self._tokenizer.decode(tokens), tokens if asked.return_token_ids else None, finished=finished
            )
            if first and asked.return_token_ids:
                delta["prompt_token_ids"] = asked.prompt[: stream.request.prompt_tokens].tolist()
            first = False
            await response.write(_sse(envelope | {"choices": [delta]}))
        if asked.include_usage:
            await response.write(_sse(envelope | {"choices": [], "usage": self._usage(stream.request)}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _envelope(self, asked: CompletionRequest, request: Request) -> dict[str, Any]:
        return {
            "id": request.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }

    def _usage(self, request: Request) -> dict[str, Any]:
        cached = request.cached_tokens or 0
        return usage(request.prompt_tokens, cached, request.output_tokens, self._config.prompt_tokens_details)

    def _card(self, name: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvscout-mocker",
            "root": name,
            "parent": parent,
        }


async def _begin(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(http)
    return response


async def _only_pings(http: web.Request) -> web.StreamResponse:
    """Until the client goes away."""
    response = await _begin(http)
    while True:
        await response.write(b": ping\n\n")
        await asyncio.sleep(PING_SECONDS)


def _sse(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


async def json_body(http: web.Request) -> object:
    """The body of a request.

    Raises:
        InvalidArgument: It is not JSON.
    """
    try:
        body: object = json.loads(await http.read())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is not JSON: {error}", field="body") from None
    return body


def _error(status: int, kind: str, message: str, param: str | None, headers: dict[str, str]) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": param, "code": status}},
        status=status,
        headers=headers,
    )


@web.middleware
async def _openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error(error.status, error.reason.replace(" ", "") + "Error", error.reason, None, {})
    except KvscoutError as error:
        known = next((_HTTP_STATUS[k] for k in type(error).__mro__ if k in _HTTP_STATUS), None)
        if known is None:
            raise
        retry = error.retry_after_seconds
        headers = {} if retry is None else {"Retry-After": str(max(1, round(retry)))}
        return _error(*known, str(error), error.field, headers)
