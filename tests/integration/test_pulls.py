"""Engines that fetch from others what these hold, over real services."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import web
from support.gateway_stack import MODEL, Stack, fresh_prompt, mocker_worker, running_stack
from support.scripted_engine import ScriptedEngine, begin, scripted_engine, send

from kvscout.v1 import workers_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = fresh_prompt(160)
SOURCE = "10.0.0.9:5710"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    """An engine that answers one token."""

    async def answer(request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        response = await begin(request)
        await send(response, choices=[{"index": 0, "token_ids": [7], "finish_reason": "length"}])
        await response.write(b"data: [DONE]\n\n")
        return response

    async with scripted_engine(answer) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None, engine: ScriptedEngine) -> AsyncIterator[Stack]:
    """One engine that holds the prompt and serves it to others, and one that fetches."""
    async with running_stack(mockers=((),)) as started:
        holder = mocker_worker("holder", started.mockers[0])
        holder.labels["kv_source"] = SOURCE
        await started.client.register(holder)
        fetching = workers_pb2.Worker(
            worker_id="fetching",
            model=MODEL,
            block_size=holder.block_size,
            http_endpoint=engine.url,
            transport=workers_pb2.EVENT_TRANSPORT_NONE,
            labels={"kv_source": "10.0.0.8:5710", "kv_source_blocks_per_second": "1000000"},
        )
        await started.client.register(fetching)
        await started.client.generate(PROMPT, pinned_worker_id="holder")
        await started.client.until_indexed(PROMPT, 10)
        yield started


async def test_a_route_says_from_whom_an_engine_fetches_what_it_lacks(stack: Stack) -> None:
    routed = await stack.client.route(PROMPT, pinned_worker_id="fetching", explain=True)
    assert (routed.pull.source.worker_id, routed.pull.address, routed.pull.blocks) == ("holder", SOURCE, 10)
    assert 0 < routed.pull.seconds < 0.001
    assert "160 tokens fetched from holder in 0.01 ms" in routed.explanation.summary
    held = await stack.client.route(PROMPT, pinned_worker_id="holder")
    assert not held.HasField("pull")
    cold = await stack.client.route(fresh_prompt(160), pinned_worker_id="fetching")
    assert not cold.HasField("pull")


async def test_an_engine_is_told_where_to_fetch(stack: Stack, engine: ScriptedEngine) -> None:
    await stack.client.generate(PROMPT, pinned_worker_id="fetching", max_tokens=1, request_id="fetches")
    source = engine.requests[-1]["kv_transfer_params"]["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("10.0.0.9", 5710)
    assert source["kv_request_id"]
    assert engine.headers[-1]["x-kv-cache-source-host-port"] == SOURCE
    await stack.client.generate(fresh_prompt(160), pinned_worker_id="fetching", max_tokens=1)
    assert "kv_transfer_params" not in engine.requests[-1]
    assert "x-kv-cache-source-host-port" not in engine.headers[-1]
