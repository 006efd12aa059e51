"""An engine that empties its cache without an event, through real gateway, indexer, scheduler and engines."""

from __future__ import annotations

import asyncio

from support.gateway_stack import Stack, fresh_prompt, running_stack
from support.process_metrics import scrape
from support.processes import eventually

from kvscout.v1 import indexer_pb2
from kvscout_gateway.values.cache_reports import LATEST, PROVEN, SUSPECT

SESSIONS = 4 * SUSPECT
BLOCKS = 6
TOKENS = 16 * BLOCKS + 1


async def source_of(stack: Stack) -> indexer_pb2.SourceStatus:
    return (await stack.client.sources())["w0"]


async def until_read(stack: Stack) -> None:
    """Waits until the gateway has read the indexer's status from beginning to end."""
    name = 'grpc_server_handled_total{grpc_code="OK",grpc_method="GetStatus",grpc_service="kvscout.v1.Indexer"}'

    async def readings() -> float:
        return (await scrape(stack.indexer)).get(name, 0.0)

    before = await readings()

    async def two_more() -> bool:
        return await readings() >= before + 2

    await eventually(two_more, what="the status read twice")


async def test_a_cache_that_was_emptied_without_an_event_is_noticed_fenced_and_trusted_again() -> None:
    async with running_stack(mockers=[()]) as stack:
        prompts = [fresh_prompt(TOKENS) for _ in range(SESSIONS)]
        for prompt in prompts:
            await stack.client.generate(prompt)
            await stack.client.until_indexed(prompt, BLOCKS)
        for prompt in prompts[:PROVEN]:
            usage = (await stack.client.generate(prompt)).usage
            assert usage is not None
            assert usage.cached_tokens == 16 * BLOCKS
        await until_read(stack)
        await stack.client.generate(prompts[0])
        assert await stack.mockers[0].post("/mock/faults", {"empty_cache": True}) == (
            200,
            {"dropped": 0, "duplicated": 0},
        )

        again, lost = prompts[: 2 * SUSPECT], prompts[2 * SUSPECT :]
        for sent, prompt in enumerate(again):
            answer = await stack.client.generate(prompt)
            # From then on the indexer may have heard of it.
            if sent < SUSPECT:
                assert answer.route.confirmed_overlap_blocks == BLOCKS, "nothing says so yet"
            assert answer.usage is not None
            assert answer.usage.cached_tokens == 0

        async def fenced() -> bool:
            return (await source_of(stack)).fenced

        await eventually(fenced, what="the rank fenced")
        source = await source_of(stack)
        assert (source.fences, source.resets) == (1, 1)
        assert source.state in (indexer_pb2.SOURCE_STATE_INCOMPLETE, indexer_pb2.SOURCE_STATE_REPLAYING)
        # What the engine has computed since is known, and what it lost is not.
        for prompt in again:
            await stack.client.until_indexed(prompt, BLOCKS)
        assert [await stack.client.overlap(prompt) for prompt in lost] == [{}] * len(lost)

        async def complete() -> bool:
            """Whether the fence has ended, after another round of requests that had what is known."""
            for prompt in again[: LATEST // 2]:
                await stack.client.generate(prompt)
            return (await source_of(stack)).state == indexer_pb2.SOURCE_STATE_LIVE

        await eventually(complete, what="the fence ended")
        source = await source_of(stack)
        assert (source.fences, source.fenced, source.reason) == (1, False, "")
        for prompt in again:
            assert await stack.client.overlap(prompt) == {"w0": BLOCKS}


async def test_evictions_while_requests_wait_fence_nothing() -> None:
    async with running_stack(mockers=[("--num-gpu-blocks", "64")]) as stack:
        prompts = [fresh_prompt(TOKENS) for _ in range(SESSIONS)]
        for prompt in prompts[:PROVEN]:
            for _ in range(2):
                await stack.client.generate(prompt)
                await stack.client.until_indexed(prompt, BLOCKS)
        for _ in range(3):
            await asyncio.gather(*map(stack.client.generate, prompts))
        await until_read(stack)
        source = await source_of(stack)
        assert (source.fences, source.state) == (0, indexer_pb2.SOURCE_STATE_LIVE)
