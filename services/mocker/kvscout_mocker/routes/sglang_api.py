"""SGLang's own API: `/generate`, and the server's reports on itself.

A stream's events repeat everything so far (`text`, `output_ids`), as SGLang's do unless set to be incremental.
A request that fails says so as 500; once its stream has begun, the connection breaks off. Kinder than SGLang: KV events
are vLLM's, and a decode engine keeps a prefix cache.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import cast
from urllib.parse import SplitResult, urlsplit

from aiohttp import web

from kvscout_common.errors import InternalError, InvalidArgument, KvscoutError, Unavailable
from kvscout_mocker.answers.answers import logprob
from kvscout_mocker.answers.event_stream import DONE, begin_stream, break_off, only_pings, sse
from kvscout_mocker.config import MockerConfig, Role
from kvscout_mocker.engine.rank import Rank
from kvscout_mocker.engine.request import ChoiceDelta
from kvscout_mocker.faults import Faults
from kvscout_mocker.fields import Fields, boolean, integer, json_object, mapping, optional_integer, string, token_ids
from kvscout_mocker.requests.generation import Generation, read_generation
from kvscout_mocker.routes.intake import Admitted, Intake
from kvscout_mocker.server import Document, json_body, status_of
from kvscout_mocker.tokens.tokenizer import WordTokenizer

DEFAULT_MAX_NEW_TOKENS = 128


class SglangRoutes:
    """`/generate` and its neighbours.

    Args:
        config: Configuration of the process.
        intake: Into its engines.
        ranks: In order of their number.
        faults: Faults of the process.
        bootstrap_port: Port of its bootstrap server; 0: there is none.
    """

    def __init__(
        self,
        config: MockerConfig,
        intake: Intake,
        ranks: Sequence[Rank],
        faults: Faults,
        bootstrap_port: int,
    ) -> None:
        self._config = config
        self._intake = intake
        self._ranks = ranks
        self._faults = faults
        self._bootstrap_port = bootstrap_port
        self._tokenizer = WordTokenizer(config.engine.vocab_size)
        self._running: dict[str, asyncio.Task[object]] = {}

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.add_routes(
            [
                web.post("/generate", _sglang_errors(self.generate)),
                web.post("/abort_request", _sglang_errors(self.abort_request)),
                web.get("/server_info", self.server_info),
                web.get("/get_server_info", self.server_info),
                web.get("/get_model_info", self.model_info),
                web.get("/health_generate", self.health),
                web.post("/flush_cache", self.flush_cache),
            ]
        )

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """Generate, streamed or not; a client that goes away frees its request's blocks."""
        fields = json_object(await json_body(http))
        generation = self._generation(fields)
        rid = string(fields, "rid") or uuid.uuid4().hex
        if rid in self._running:
            raise InvalidArgument(f"Duplicate request ID detected: {rid}", field="rid")
        if generation.stream and self._faults.mutes():
            return await only_pings(http)
        dp_rank = optional_integer(fields, "routed_dp_rank", minimum=0)
        if dp_rank is None:
            dp_rank = optional_integer(fields, "data_parallel_rank", minimum=0)
        self._running[rid] = cast(asyncio.Task[object], asyncio.current_task())
        try:
            async with self._intake.admitted(generation, rid, None if dp_rank is None else str(dp_rank)) as admitted:
                answer = _Answer(generation, rid, admitted, self._tokenizer)
                if generation.stream:
                    return await _streamed(http, answer, admitted)
                while not admitted.stream.drained:
                    answer.add(await admitted.stream.read())
                admitted.done()
                return web.json_response(answer.document())
        finally:
            del self._running[rid]

    async def abort_request(self, http: web.Request) -> web.StreamResponse:
        """Break a request off; 200 whether or not there is such a one."""
        fields = json_object(await json_body(http))
        rid, everyone = string(fields, "rid"), boolean(fields, "abort_all")
        for running, task in self._running.items():
            if everyone or running == rid:
                task.cancel()
        return web.Response()

    async def server_info(self, _: web.Request) -> web.StreamResponse:
        """Return the server's arguments that other programs read."""
        config = self._config
        mode = "null" if config.role is Role.AGGREGATED else config.role.value
        return web.json_response(
            {
                "model_path": config.model,
                "served_model_name": config.model,
                "page_size": config.engine.block_size,
                "dp_size": config.dp_size,
                "disaggregation_mode": mode,
                "disaggregation_bootstrap_port": self._bootstrap_port,
                "max_total_num_tokens": (config.engine.num_gpu_blocks - 1) * config.engine.block_size,
                "kv_events": self._kv_events(),
            }
        )

    def _kv_events(self) -> Document | None:
        """Return where ranks publish: on the base port + rank. None: on other ports, as SGLang's never are."""
        ranks = [urlsplit(rank.publisher.endpoint) for rank in self._ranks]
        replays = [urlsplit(rank.publisher.replay_endpoint) for rank in self._ranks]
        base = _base_port(ranks)
        if base is None:
            return None
        replay_base = _base_port(replays)
        return {
            "publisher": "zmq",
            "endpoint_host": ranks[0].hostname,
            "endpoint_port_base": base,
            "topic": self._ranks[0].publisher.topic,
            "block_size": self._config.engine.block_size,
            "dp_size": len(ranks),
            **({} if replay_base is None else {"replay_endpoint_port_base": replay_base}),
        }

    async def model_info(self, _: web.Request) -> web.StreamResponse:
        """Return the model."""
        return web.json_response({"model_path": self._config.model, "is_generation": True})

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Return 200 while the engines step."""
        return web.Response()

    async def flush_cache(self, _: web.Request) -> web.StreamResponse:
        """Forget all cached blocks; 400 if a rank is busy and keeps its own."""
        done = [rank.engine.reset_prefix_cache() for rank in self._ranks]
        return web.Response(status=200 if all(done) else 400)

    def _generation(self, fields: Fields) -> Generation:
        sampling = mapping(fields, "sampling_params")
        text, ids = fields.get("text"), fields.get("input_ids")
        if (text is None) == (ids is None):
            raise InvalidArgument("one of text and input_ids is needed", field="input_ids")
        if isinstance(text, str):
            prompt = self._tokenizer.encode(text)
        elif isinstance(ids, list):
            prompt = token_ids(ids, "input_ids")
        else:
            raise InvalidArgument("must be one prompt", field="text" if ids is None else "input_ids")
        if not prompt:
            raise InvalidArgument("must not be empty", field="text" if ids is None else "input_ids")
        logprobs = integer(fields, "top_logprobs_num", 0, minimum=0) if boolean(fields, "return_logprob") else None
        limit = self._config.engine.max_model_len
        max_tokens = integer(sampling, "max_new_tokens", DEFAULT_MAX_NEW_TOKENS, minimum=1)
        if len(prompt) + max_tokens > limit:
            raise InvalidArgument(
                f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
                f"total of {len(prompt) + max_tokens} tokens.",
                field="max_new_tokens",
            )
        generation = read_generation(
            {
                "model": fields.get("lora_path"),
                "stream": fields.get("stream"),
                **{name: fields[name] for name in _BOOTSTRAP if name in fields},
            },
            self._config,
            prompt,
            max_tokens=max_tokens,
            logprobs=logprobs,
        )
        return replace(generation, scope=replace(generation.scope, extra_key=string(fields, "extra_key")))


_BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


class _Answer:
    """Everything that one request generated so far."""

    def __init__(self, generation: Generation, rid: str, admitted: Admitted, tokenizer: WordTokenizer) -> None:
        self._generation = generation
        self._rid = rid
        self._admitted = admitted
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._finish_reason: str | None = None
        self._began = time.monotonic()

    def add(self, deltas: Sequence[ChoiceDelta]) -> None:
        """Take what was generated since."""
        for delta in deltas:
            self._tokens += delta.tokens
            self._text.append(self._tokenizer.decode(delta.tokens))
            self._finish_reason = delta.finish_reason

    def document(self) -> Document:
        """Return the answer, or the next event of a stream."""
        finish = self._finish_reason
        meta: Document = {
            "id": self._rid,
            "finish_reason": None if finish is None else {"type": finish, "length": len(self._tokens)},
            "prompt_tokens": len(self._generation.prompt),
            "weight_version": "default",
            "total_retractions": 0,
            "completion_tokens": len(self._tokens),
            "cached_tokens": self._admitted.cached_tokens,
            "dp_rank": self._admitted.rank.dp_rank,
        }
        if self._generation.logprobs is not None:
            meta["output_token_logprobs"] = [
                [logprob(token, index), token, None] for index, token in enumerate(self._tokens)
            ]
        if finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._began
        return {"text": "".join(self._text), "output_ids": self._tokens, "meta_info": meta}


async def _streamed(http: web.Request, answer: _Answer, admitted: Admitted) -> web.StreamResponse:
    response = await begin_stream(http)
    while not admitted.stream.drained:
        try:
            answer.add(await admitted.stream.read())
        except (Unavailable, InternalError):
            return break_off(http, response)
        await response.write(sse(answer.document()))
    admitted.done()
    await response.write(DONE)
    await response.write_eof()
    return response


def _sglang_errors(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Answer errors in the form of `/generate`: a message, no type."""

    async def handle(http: web.Request) -> web.StreamResponse:
        try:
            return await handler(http)
        except KvscoutError as error:
            return web.json_response({"error": {"message": str(error)}}, status=status_of(error)[0])

    return handle


def _base_port(endpoints: Sequence[SplitResult]) -> int | None:
    """Return the port of the first, if each further one has the next; None = they have not, or there are none."""
    ports = [endpoint.port for endpoint in endpoints]
    return ports[0] if ports[0] and ports == list(range(ports[0], ports[0] + len(ports))) else None
