"""Generate on engines that speak SGLang's own API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.gateway_stack import GatewayClient, Stack, fresh_prompt, mocker_worker, running_stack

from kvscout.v1 import gateway_pb2, workers_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

SGLANG = ("--api", "both", "--model", "sg")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    async with running_stack(mockers=((*SGLANG, "--lora", "poet"), (*SGLANG, "--dp-size", "2"))) as started:
        for index, mocker in enumerate(started.mockers):
            worker = mocker_worker(f"w{index}", mocker, model="sg")
            worker.engine = workers_pb2.ENGINE_KIND_SGLANG
            if not index:
                worker.adapters.add(name="poet")
            await started.client.register(worker)
        yield started


@pytest.fixture
def client(stack: Stack) -> GatewayClient:
    return stack.client


async def test_tokens_and_usage_are_those_of_the_engine(stack: Stack, client: GatewayClient) -> None:
    prompt = fresh_prompt(100)
    direct = await stack.mockers[0].complete(prompt.tolist(), max_tokens=20, return_token_ids=True)
    got = await client.generate(prompt, model="sg", max_tokens=20, pinned_worker_id="w0")
    assert got.token_ids == direct["choices"][0]["token_ids"]
    assert got.usage == gateway_pb2.Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=96)
    assert got.finish_reason == gateway_pb2.FINISH_REASON_LENGTH
    await client.until_idle("sg")


async def test_adapters_salts_and_ranks_reach_the_engine(client: GatewayClient) -> None:
    prompt = fresh_prompt(64)
    cached = []
    variants: list[dict[str, Any]] = [{}, {"lora_name": "poet"}, {"cache_salt": "s"}, {"cache_salt": "s"}, {}]
    for fields in variants:
        got = await client.generate(prompt, model="sg", pinned_worker_id="w0", **fields)
        assert got.usage is not None
        cached.append(got.usage.cached_tokens)
    assert cached == [0, 0, 0, 48, 48]
    for rank in (0, 1, 1):
        got = await client.generate(prompt, model="sg", pinned_worker_id="w1", pinned_dp_rank=rank)
        assert got.usage is not None
        cached.append(got.usage.cached_tokens)
    assert cached[-3:] == [0, 0, 48]


async def test_each_token_comes_with_its_log_probability_where_it_is_asked_for(client: GatewayClient) -> None:
    output = gateway_pb2.OutputOptions(logprobs=0)
    told = 0
    async for message in client.start(
        fresh_prompt(40), model="sg", pinned_worker_id="w0", max_tokens=6, output_options=output
    ):
        assert len(message.logprobs) == len(message.token_ids)
        assert all(place.logprob < 0 for place in message.logprobs)
        told += len(message.logprobs)
    assert told == 6


async def test_what_the_engine_refuses_is_refused_with_its_words(client: GatewayClient) -> None:
    # The mocker's context is shorter than that.
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        await client.generate(fresh_prompt(60_000), model="sg", pinned_worker_id="w0")
    await client.until_idle("sg")
