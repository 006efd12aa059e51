"""OpenAI's API as vLLM serves it, over the ranks of one process; handlers translate, the engines decide.

Kinder than vLLM: one process serves both completions and embeddings; an embedding takes the time of its tokens but no
place in a batch and no block. Without `max_tokens` a chat completion ends by itself after a fixed number of tokens.
Tools are read into the prompt and never called, sampling fields have no effect.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from kvscout_common.errors import InternalError, Unavailable
from kvscout_mocker.answers import Answer, ChatAnswer, CompletionAnswer
from kvscout_mocker.chat import parse_chat, parse_detokenize, parse_tokenize
from kvscout_mocker.completions import parse_completion
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.embeddings import embedding_answer, parse_embedding
from kvscout_mocker.engine import ChoiceDelta
from kvscout_mocker.event_stream import DONE, begin_stream, break_off, only_pings, sse
from kvscout_mocker.faults import Faults
from kvscout_mocker.generation import Generation
from kvscout_mocker.intake import Admitted, Intake
from kvscout_mocker.rank import TokenStream
from kvscout_mocker.server import Document, error_document, json_body
from kvscout_mocker.tokenizer import WordTokenizer


class OpenAiRoutes:
    """`/v1/…`, `/tokenize` and `/detokenize`.

    Args:
        config: Configuration of the process.
        intake: Into its engines.
        faults: Faults of the process.
    """

    def __init__(self, config: MockerConfig, intake: Intake, faults: Faults) -> None:
        self._config = config
        self._intake = intake
        self._faults = faults
        self._tokenizer = WordTokenizer(config.engine.vocab_size)
        self._started = int(time.time())

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
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
        generation = parse_completion(await json_body(http), self._config, self._tokenizer)
        return await self._generate(http, generation, "cmpl", CompletionAnswer)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """Generate the next message of a conversation, as `completions` does."""
        generation = parse_chat(await json_body(http), self._config, self._tokenizer)
        return await self._generate(http, generation, "chatcmpl", ChatAnswer)

    async def embeddings(self, http: web.Request) -> web.StreamResponse:
        """Vectors of one or several inputs."""
        generation = parse_embedding(await json_body(http), self._config, self._tokenizer)
        await asyncio.sleep(self._config.engine.cost.step_seconds(generation.prompt_tokens, 0))
        return web.json_response(embedding_answer(generation, f"embd-{_request_id(http)}", int(time.time())))

    async def models(self, _: web.Request) -> web.StreamResponse:
        """Return the base model and its adapters."""
        base, length = self._config.model, self._config.engine.max_model_len
        cards = [self._card(base, None) | {"max_model_len": length}]
        cards += [self._card(name, base) for name in self._config.lora_names]
        return web.json_response({"object": "list", "data": cards})

    async def tokenize(self, http: web.Request) -> web.StreamResponse:
        """Return the token ids of a prompt or of a conversation."""
        tokens = parse_tokenize(await json_body(http), self._config, self._tokenizer).tolist()
        length = self._config.engine.max_model_len
        return web.json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})

    async def detokenize(self, http: web.Request) -> web.StreamResponse:
        """Return the text of token ids."""
        tokens = parse_detokenize(await json_body(http), self._config)
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})

    async def _generate(
        self, http: web.Request, generation: Generation, prefix: str, shape: Callable[..., Answer]
    ) -> web.StreamResponse:
        if generation.stream and self._faults.mutes():
            return await only_pings(http)
        answer_id = f"{prefix}-{_request_id(http)}"
        dp_rank = http.headers.get("X-data-parallel-rank")
        answer = shape(generation, answer_id, int(time.time()), self._tokenizer, self._config.prompt_tokens_details)
        async with self._intake.admitted(generation, answer_id, dp_rank) as admitted:
            if generation.stream:
                return await _streamed(http, answer, admitted)
            deltas = await _whole(generation, admitted.stream)
            besides = admitted.done()
            if generation.tells_first_token:
                besides = {**besides, "first_token_unix_seconds": admitted.stream.began_unix}
            return web.json_response(answer.whole(deltas, admitted.cached_tokens) | besides)

    def _card(self, name: str, parent: str | None) -> Document:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvscout-mocker",
            "root": name,
            "parent": parent,
        }


async def _whole(generation: Generation, stream: TokenStream) -> list[ChoiceDelta]:
    collected = [ChoiceDelta(index, [], 0, None) for index in range(generation.choices)]
    while any(delta.finish_reason is None for delta in collected):
        for delta in await stream.read():
            collected[delta.choice].tokens.extend(delta.tokens)
            collected[delta.choice] = collected[delta.choice]._replace(finish_reason=delta.finish_reason)
    return collected


async def _streamed(http: web.Request, answer: Answer, admitted: Admitted) -> web.StreamResponse:
    stream = admitted.stream
    response = await begin_stream(http)
    opened = False
    while not stream.drained:
        try:
            deltas = await stream.read()
        except Unavailable:
            return break_off(http, response)
        except InternalError as error:
            await response.write(sse(error_document(error)))
            break
        opening = [] if opened else answer.opening()
        opened = True
        for chunk in [*opening, *map(answer.chunk, deltas)]:
            await response.write(sse(chunk))
    else:
        admitted.done()  # a stream has no place for what it gives
        if answer.generation.include_usage:
            await response.write(sse(answer.usage_chunk(admitted.cached_tokens)))
    await response.write(DONE)
    await response.write_eof()
    return response


def _request_id(http: web.Request) -> str:
    return http.headers.get("X-Request-Id") or uuid.uuid4().hex
