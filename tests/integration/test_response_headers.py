"""Headers that tell a client where its request went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.gateway_stack import MODEL, Stack, running_stack
from support.scripted_engine import scripted_engine

from kvscout.v1 import workers_pb2

WORKER, CACHED, TIME = "x-kvscout-worker", "x-kvscout-cached-tokens", "x-kvscout-decision-ms"
PROMPT = list(range(100, 200))
VLLM = workers_pb2.ENGINE_KIND_VLLM
MESSAGES = [{"role": "user", "content": "hello " * 50}]


async def post(stack: Stack, path: str, token: str = "", **body: Any) -> dict[str, str]:
    """The headers of an answer."""
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={"model": MODEL, "max_tokens": 4} | body, headers=headers) as answer,
    ):
        await answer.read()
        assert answer.status == 200
        return {name.lower(): value for name, value in answer.headers.items()}


async def test_every_path_says_worker_cached_tokens_and_time() -> None:
    async with running_stack("--http-port", "0") as stack:
        first = await post(stack, "/v1/completions", prompt=PROMPT)
        assert first[CACHED] == "0"
        await stack.client.until_indexed(PROMPT, 6)
        for streamed in (False, True):
            # The end of a request may come later than its answer, as load that turns the next decision.
            await stack.client.until_idle()
            again = await post(stack, "/v1/completions", prompt=PROMPT, stream=streamed)
            assert (again[WORKER], again[CACHED]) == (first[WORKER], "96")
            assert 0 < float(again[TIME]) < 60_000
        await stack.client.until_idle()
        whole = await post(stack, "/v1/completions", prompt=PROMPT[:96])
        assert whole[CACHED] == "80", "the engine computes the last token anew"
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/messages", {"messages": MESSAGES}),
            ("/v1/responses", {"input": "hello"}),
        ):
            answer = await post(stack, path, **body)
            assert {WORKER, CACHED, TIME} <= answer.keys(), path
        tokens = await post(stack, "/tokenize", prompt="hello")
        assert tokens[WORKER] in ("w0", "w1")
        assert CACHED not in tokens, "it was not placed"


async def says_so_itself(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An engine that is a gateway, too."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    answer = {"id": "x", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": usage}
    return web.json_response(answer, headers={WORKER: "inner", "X-Kvscout-Cached-Tokens": "7", "X-Other": "kept"})


async def test_headers_of_that_name_by_an_engine_are_replaced() -> None:
    async with scripted_engine(says_so_itself) as engine, running_stack("--http-port", "0", mockers=()) as stack:
        await stack.client.register(
            workers_pb2.Worker(worker_id="outer", model=MODEL, block_size=16, http_endpoint=engine.url, engine=VLLM)
        )
        url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}/v1/completions"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json={"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}) as answer,
        ):
            assert answer.headers.getall(WORKER) == ["outer"]
            assert answer.headers.getall(CACHED) == ["0"]
            assert answer.headers["X-Other"] == "kept"


@pytest.mark.parametrize(("flag", "admin_is_told", "user_is_told"), [("admins", 1, 0), ("all", 1, 1), ("none", 0, 0)])
async def test_the_flag_says_which_callers_are_told(
    tmp_path: Path, flag: str, admin_is_told: int, user_is_told: int
) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("tokens:\n  - {token: boss, role: admin, tenant: '*'}\n  - {token: user, role: client}\n")
    flags = ("--http-port", "0", "--auth-tokens", str(tokens), "--response-headers", flag)
    async with running_stack(*flags, mockers=()) as stack, scripted_engine(says_so_itself) as engine:
        worker = workers_pb2.Worker(worker_id="w", model=MODEL, block_size=16, http_endpoint=engine.url, engine=VLLM)
        await stack.client.stub.RegisterWorker(
            workers_pb2.RegisterWorkerRequest(worker=worker), metadata=(("authorization", "Bearer boss"),)
        )
        for token, is_told in (("boss", admin_is_told), ("user", user_is_told)):
            answer = await post(stack, "/v1/completions", token, prompt=PROMPT)
            said = {WORKER: "w", CACHED: "0"} if is_told else {}
            assert {name: answer[name] for name in (WORKER, CACHED) if name in answer} == said
            assert (TIME in answer) == bool(is_told)
