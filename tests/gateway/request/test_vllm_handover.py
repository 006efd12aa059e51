"""Prefill and decode on vLLM engines, whatever the prefill engine makes of the one token that it is asked for."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from support.openai_stack import CHAT, Engine, engine, front, spec

from kvscout_common.worker import EngineKind, Role

TOOLS = [{"type": "function", "function": {"name": "weather"}}]


async def prefill(request: web.Request, body: bytes) -> web.StreamResponse:
    """As releases of vLLM that parse the output of a demanded tool call whatever ended it: one token is no JSON."""
    fields = json.loads(body)
    if fields.get("tool_choice") not in (None, "auto", "none") and fields["max_tokens"] == 1:
        return web.json_response({"error": {"message": "1 validation error", "code": 400}}, status=400)
    return web.json_response({"choices": [], "kv_transfer_params": {"remote_engine_id": "p"}})


async def decode(request: web.Request, body: bytes) -> web.StreamResponse:
    if json.loads(body)["messages"] == []:
        return web.json_response({"error": {"message": "messages is empty", "code": 400}}, status=400)
    return web.json_response({"choices": [{"message": {"content": "done"}}], "usage": {"prompt_tokens": 3}})


def _fields(one: Engine) -> list[dict[str, object]]:
    return [json.loads(received.body) for received in one.received if received.target.startswith("/v1/")]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_demanded_tool_call_that_prefill_refuses_is_computed_by_decode(choice: object) -> None:
    async with engine(prefill) as first, engine(decode) as second:
        workers = (
            spec("p", first.url, role=Role.PREFILL, engine=EngineKind.VLLM),
            spec("d", second.url, role=Role.DECODE, engine=EngineKind.VLLM),
        )
        async with front(*workers) as served:
            body = {**CHAT, "tools": TOOLS, "tool_choice": choice}
            status, _, answer = await served.post("/v1/chat/completions", body)
            assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, "done")
            assert [fields["tool_choice"] for fields in _fields(first)] == [choice]
            assert [fields.get("kv_transfer_params") for fields in _fields(second)] == [None]
            status, _, _ = await served.post("/v1/chat/completions", {**CHAT, "tools": TOOLS})
            assert status == 200
            assert _fields(second)[-1]["kv_transfer_params"] == {"remote_engine_id": "p"}


async def test_a_request_that_both_refuse_is_answered_in_decodes_words() -> None:
    async with engine(prefill) as first, engine(decode) as second:
        workers = (
            spec("p", first.url, role=Role.PREFILL, engine=EngineKind.VLLM),
            spec("d", second.url, role=Role.DECODE, engine=EngineKind.VLLM),
        )
        async with front(*workers) as served:
            body = {**CHAT, "messages": [], "tools": TOOLS, "tool_choice": "required"}
            status, _, answer = await served.post("/v1/chat/completions", body)
            assert (status, json.loads(answer)["error"]["message"]) == (400, "messages is empty")
