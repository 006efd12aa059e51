"""OpenAI's API as vLLM serves it, over the ranks of one process; handlers translate, the engines decide.

Kinder than vLLM: one process serves both completions and embeddings; an embedding takes the time of its tokens but no
place in a batch and no block. Without `max_tokens` a chat completion ends by itself after a fixed number of tokens.
Tools are read into the prompt and never called, sampling fields have no effect.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from array import array
from collections.abc import Callable, Sequence

from aiohttp import web

from kvscout_common.errors import InternalError, InvalidArgument, Unavailable
from kvscout_mocker.answers import Answer, ChatAnswer, CompletionAnswer, Document, Piece
from kvscout_mocker.chat import parse_chat, parse_detokenize, parse_tokenize
from kvscout_mocker.completions import parse_completion
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.embeddings import embedding_answer, parse_embedding
from kvscout_mocker.engine import Finish, Request
from kvscout_mocker.faults import Faults
from kvscout_mocker.generation import Generation
from kvscout_mocker.rank import Rank, TokenStream
from kvscout_mocker.sequence import Sequence as TokenSequence
from kvscout_mocker.server import error_document, json_body
from kvscout_mocker.tokenizer import WordTokenizer

PING_SECONDS = 0.1


class OpenAiRoutes:
    """`/v1/…`, `/tokenize` and `/detokenize`.

    Args:
        config: Of the process.
        ranks: In order of their number.
        faults: Of the process.
    """

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank], faults: Faults) -> None:
        self._config = config
        self._faults = faults
        self._ranks = ranks
        self._tokenizer = WordTokenizer(config.engine.vocab_size)
        self._next_rank = 0
        self._started = int(time.time())

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application."""
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat_completions),
                web.post("/v1/embeddings", self.embeddings),
                web.get("/v1/models", self.models),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
            ]
        )

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """Generate from a prompt, streamed or not; a client that goes away frees its request's blocks."""
        asked = parse_completion(await json_body(http), self._config, self._tokenizer)
        return await self._generate(http, asked, "cmpl", CompletionAnswer)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """Generate the next message of a conversation, as `completions` does."""
        asked = parse_chat(await json_body(http), self._config, self._tokenizer)
        return await self._generate(http, asked, "chatcmpl", ChatAnswer)

    async def embeddings(self, http: web.Request) -> web.StreamResponse:
        """Vectors of one or several inputs."""
        asked = parse_embedding(await json_body(http), self._config, self._tokenizer)
        await asyncio.sleep(self._config.engine.cost.step_seconds(asked.prompt_tokens, 0))
        return web.json_response(embedding_answer(asked, f"embd-{_request_id(http)}", int(time.time())))

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
        return web.json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        """The text of token ids."""
        tokens = parse_detokenize(await json_body(http), self._config)
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})

    async def _generate(
        self, http: web.Request, asked: Generation, prefix: str, shape: Callable[..., Answer]
    ) -> web.StreamResponse:
        if asked.stream and self._faults.mutes():
            return await _only_pings(http)
        rank = self._rank(http.headers.get("X-data-parallel-rank"))
        answer_id = f"{prefix}-{_request_id(http)}"
        stream = rank.submit([self._request(asked, answer_id, index, rank.hash_seed) for index in range(asked.choices)])
        answer = shape(asked, answer_id, int(time.time()), self._tokenizer, self._config.prompt_tokens_details)
        try:
            if asked.stream:
                return await _streamed(http, answer, stream)
            return web.json_response(answer.whole(await _whole(asked, stream), _cached(stream)))
        finally:
            rank.abort(stream)

    def _request(self, asked: Generation, answer_id: str, index: int, hash_seed: int) -> Request:
        return Request(
            answer_id,
            TokenSequence(
                array("I", asked.prompt),  # of its own: it grows by what is generated
                block_size=self._config.engine.block_size,
                hash_seed=hash_seed,
                scope=asked.scope,
            ),
            asked.max_tokens,
            asked.seed + index & 2**64 - 1,
            asked.report_prefix,
            Finish.STOP if asked.ends_early else Finish.LENGTH,
            self._faults.fails_after(),
        )

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

    def _card(self, name: str, parent: str | None) -> Document:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvscout-mocker",
            "root": name,
            "parent": parent,
        }


async def _whole(asked: Generation, stream: TokenStream) -> list[Piece]:
    collected = [Piece(index, [], 0, None) for index in range(asked.choices)]
    while any(piece.finish_reason is None for piece in collected):
        for piece in await stream.read():
            collected[piece.choice].tokens.extend(piece.tokens)
            collected[piece.choice] = collected[piece.choice]._replace(finish_reason=piece.finish_reason)
    return collected


async def _streamed(http: web.Request, answer: Answer, stream: TokenStream) -> web.StreamResponse:
    response = await begin_stream(http)
    opened = False
    while not stream.drained:
        try:
            pieces = await stream.read()
        except Unavailable:
            # The status is out already: a body that breaks off is the one unmistakable way to fail.
            if http.transport is not None:
                http.transport.abort()
            return response
        except InternalError as error:
            await response.write(sse(error_document(error)))
            break
        opening = [] if opened else answer.opening()
        opened = True
        for chunk in [*opening, *map(answer.chunk, pieces)]:
            await response.write(sse(chunk))
    else:
        if answer.asked.include_usage:
            await response.write(sse(answer.usage_chunk(_cached(stream))))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _cached(stream: TokenStream) -> int:
    return stream.requests[0].cached_tokens or 0


def _request_id(http: web.Request) -> str:
    return http.headers.get("X-Request-Id") or uuid.uuid4().hex


async def begin_stream(http: web.Request) -> web.StreamResponse:
    """Sends the head of an answer made of server-sent events."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(http)
    return response


async def _only_pings(http: web.Request) -> web.StreamResponse:
    """Until the client goes away."""
    response = await begin_stream(http)
    while True:
        await response.write(b": ping\n\n")
        await asyncio.sleep(PING_SECONDS)


def sse(document: Document) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
