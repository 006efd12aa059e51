"""A renderer tells the tokens of requests over HTTP; one that is slow, gone or wrong costs them little, and shows."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.openai_stack import CHAT, Engine, Front, engine, front, spec
from support.trained_tokenizers import byte_level, save

from kvscout_common.hashing import MmItem, block_hashes_packed
from kvscout_common.rpc.service_info import text_of
from kvscout_gateway.tokens.parity import MAX_MISMATCHES
from kvscout_gateway.values.prompt import Geometry, hash_prompt

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAA"}}
ASKS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, IMAGE]}], "model": "m"}
TOKENS = list(range(40))
FEATURES = {"mm_hashes": {"image": ["ab" * 32]}, "mm_placeholders": {"image": [{"offset": 20, "length": 9}]}}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
WAIT: dict[str, Any] = {"tokenize_timeout_seconds": 20.0}


class Renderer:
    """Answers render endpoints."""

    def __init__(self) -> None:
        self.tokens, self.hangs = TOKENS, False
        self.features: dict[str, Any] | None = None
        self.asked: list[tuple[str, Any]] = []

    async def __call__(self, request: web.Request, body: bytes) -> web.StreamResponse:
        self.asked.append((request.path, json.loads(body)))
        if self.hangs:
            await asyncio.Event().wait()
        answer = {"request_id": "r", "token_ids": self.tokens, "features": self.features}
        return web.json_response(
            [answer] if "completions/render" in request.path and "chat" not in request.path else answer
        )


async def answers(request: web.Request, _: bytes) -> web.StreamResponse:
    """An engine without tokens of its own, which counts those of `TOKENS`."""
    if request.path not in PATHS.values():
        return web.json_response({"error": {"message": "no such path"}}, status=404)
    count = len(TOKENS)
    usage = {"prompt_tokens": count, "input_tokens": count, "output_tokens": 1, "completion_tokens": 1}
    return web.json_response({"id": "1", "type": "message", "object": "response", "choices": [], "usage": usage})


@pytest.fixture
def renderer() -> Renderer:
    return Renderer()


@pytest.fixture
async def both(renderer: Renderer) -> AsyncIterator[tuple[Engine, Engine]]:
    async with engine(answers) as one, engine(renderer) as renders:
        yield one, renders


async def prompt_of(served: Front, request: dict[str, Any], dialect: str = "chat") -> Any:
    return await served.gateway.tokens.prompts.of_chat(request, size=1, model="m", tenant="default", dialect=dialect)


async def test_a_renderer_is_asked_in_the_dialect_of_the_request(
    both: tuple[Engine, Engine], renderer: Renderer
) -> None:
    one, renders = both
    async with front(spec("w", one.url), renderers={"": renders.url}, **WAIT) as served:
        for dialect, path in PATHS.items():
            body = {"model": "m", "input": "hi"} if dialect == "responses" else {**CHAT, "max_tokens": 3}
            status, headers, _ = await served.post(path, body)
            assert (status, headers["x-kvscout-degraded"]) == (200, "scheduler")
        assert [path for path, _ in renderer.asked] == [f"{path}/render" for path in PATHS.values()]
        # Beside the requests themselves, the first is compared token by token.
        assert [r.target for r in one.received if r.target != "/tokenize"] == list(PATHS.values())
        assert served.sample("kvscout_token_parity_total", outcome="length_match") == 3.0


async def test_engines_that_restart_cost_no_request_the_tokens_that_others_have() -> None:
    async def tokenizes(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"count": len(TOKENS), "tokens": TOKENS})
        return await answers(request, body)

    async with engine(tokenizes) as one:
        gone = [spec(f"gone-{number}", "http://127.0.0.1:9") for number in range(2)]
        async with front(spec("w", one.url), *gone, **WAIT) as served:
            for number in range(24):
                asks = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
                prompt = await prompt_of(served, asks)
                assert array("I", prompt.token_ids).tolist() == TOKENS, prompt.unknown
            assert not served.gateway.tokens.prompts.late.total


async def test_an_image_is_placed_by_its_content(both: tuple[Engine, Engine], renderer: Renderer) -> None:
    one, renders = both
    renderer.features = FEATURES
    async with front(spec("w", one.url), renderers={"m": renders.url}, **WAIT) as served:
        prompt = await prompt_of(served, ASKS)
        assert prompt.mm_items == (MmItem("ab" * 32, 20, 9),)
        pool = Geometry(16, eagle=False)
        expected = block_hashes_packed(array("I", TOKENS).tobytes(), 16, mm_items=prompt.mm_items)
        assert hash_prompt(prompt, [pool], "") == {pool: expected}
        assert renderer.asked[0][1]["mm_payload"] == "none"
        await prompt_of(served, ASKS)
        assert len(renderer.asked) == 1  # the same conversation is known


async def test_without_a_renderer_an_image_is_placed_by_the_text_before_it_and_the_answer_says_so(
    both: tuple[Engine, Engine], tmp_path: Path
) -> None:
    save(tmp_path, byte_level())
    async with front(spec("w", both[0].url), tokenizers={"": tmp_path}, **WAIT) as served:
        before = byte_level().encode("<|im_start|>user\n").ids  # its template shows images before texts
        prompt = await prompt_of(served, ASKS)
        assert array("I", prompt.token_ids).tolist() == before[:-1]
        assert prompt.isl_tokens > len(before)
        status, headers, _ = await served.post(PATHS["chat"], ASKS)
        assert (status, headers["x-kvscout-degraded"]) == (200, "tokenizer; scheduler")
        assert served.sample("kvscout_degraded_decisions_total", helper="tokenizer") == 1.0


async def test_a_renderer_that_is_slow_costs_a_request_its_time_at_most_and_shows(
    both: tuple[Engine, Engine], renderer: Renderer
) -> None:
    one, renders = both
    renderer.hangs = True
    async with front(spec("w", one.url), renderers={"": renders.url}, tokenize_timeout_seconds=0.2) as served:
        status, headers, _ = await served.post(PATHS["chat"], CHAT)
        assert (status, headers["x-kvscout-degraded"]) == (200, "tokenizer; scheduler")
        warnings = [text_of(warning) for warning in served.gateway.tokens.warnings()]
        assert [text for text in warnings if "renderer" in text and "within" in text]
        await served.post(PATHS["messages"], {**CHAT, "max_tokens": 3})
        await served.post(PATHS["chat"], CHAT)
        assert len(renderer.asked) == 2  # each of its paths rests


async def test_a_renderer_that_is_gone_gives_way_to_the_engines(renderer: Renderer) -> None:
    async def tokenizes(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"tokens": TOKENS})
        return await answers(request, body)

    async with engine(tokenizes) as one:
        async with front(spec("w", one.url), renderers={"": "http://127.0.0.1:9"}, **WAIT) as served:
            prompt = await prompt_of(served, CHAT)
            assert (array("I", prompt.token_ids).tolist(), prompt.token_class.source) == (TOKENS, "engine's tokenize")
            assert any("127.0.0.1:9" in text_of(warning) for warning in served.gateway.tokens.warnings())


async def test_a_renderer_whose_tokens_are_not_the_engines_is_left_for_the_next_source_and_named(
    both: tuple[Engine, Engine], renderer: Renderer, tmp_path: Path
) -> None:
    one, renders = both
    renderer.tokens = TOKENS[:-1]
    save(tmp_path, byte_level())
    async with front(spec("w", one.url), renderers={"": renders.url}, **WAIT) as served:
        for turn in range(MAX_MISMATCHES + 1):
            await served.post(PATHS["messages"], {"model": "m", "max_tokens": 3, "messages": [
                {"role": "user", "content": str(turn)}]})  # fmt: skip
        [warning] = served.gateway.tokens.parity.warnings()
        assert "messages without tools, by renderer: 39 tokens here, 40 in the engine" in text_of(warning)
        assert (await prompt_of(served, CHAT)).token_class.source == "renderer"  # another class
        assert one.received[-2].target == "/tokenize"  # it was asked before the renderer for the last of them


async def test_what_a_renderer_says_of_places_that_are_not_in_the_prompt_is_no_answer(
    both: tuple[Engine, Engine], renderer: Renderer
) -> None:
    one, renders = both
    renderer.features = {**FEATURES, "mm_placeholders": {"image": [{"offset": 35, "length": 9}]}}
    async with front(spec("w", one.url), renderers={"": renders.url}, **WAIT) as served:
        prompt = await prompt_of(served, ASKS)
        assert (prompt.token_ids, "features" in prompt.unknown) == (b"", True)
