"""OpenAI's API as vLLM serves it, over the ranks of one process; handlers translate, the engines decide.

Kinder than vLLM: one process serves both completions and embeddings; an embedding takes the time of its tokens but no
place in a batch and no block. A chat completion without `max_tokens`, or with a constant that no answer reaches,
ends by itself after a fixed number of tokens. Sampling fields have no effect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from kvscout_mocker.answers.completion_answers import ChatAnswer, ChunkedAnswer, CompletionAnswer
from kvscout_mocker.answers.embeddings import embedding_answer, parse_embedding
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.requests.chat import parse_chat, parse_detokenize, parse_tokenize
from kvscout_mocker.requests.completions import parse_completion
from kvscout_mocker.requests.generation import Generation
from kvscout_mocker.routes.answering import Answering, request_id
from kvscout_mocker.server import Document, json_body
from kvscout_mocker.tokens.tokenizer import WordTokenizer


class OpenAiRoutes:
    """`/v1/…`, `/tokenize` and `/detokenize`.

    Args:
        config: Configuration of the process.
        answering: Generates answers.
    """

    def __init__(self, config: MockerConfig, answering: Answering) -> None:
        self._config = config
        self._answering = answering
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
        """Answer with the vectors of one or several inputs."""
        generation = parse_embedding(await json_body(http), self._config, self._tokenizer)
        await asyncio.sleep(self._config.engine.cost.step_seconds(generation.prompt_tokens, 0))
        return web.json_response(embedding_answer(generation, f"embd-{request_id(http)}", int(time.time())))

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
        self, http: web.Request, generation: Generation, prefix: str, shape: Callable[..., ChunkedAnswer]
    ) -> web.StreamResponse:
        answer_id = f"{prefix}-{request_id(http)}"
        answer = shape(generation, answer_id, int(time.time()), self._tokenizer, self._config.prompt_tokens_details)
        return await self._answering.respond(http, answer, answer_id)

    def _card(self, name: str, parent: str | None) -> Document:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvscout-mocker",
            "root": name,
            "parent": parent,
        }
