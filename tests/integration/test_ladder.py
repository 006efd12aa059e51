"""A fleet with one loss built in: the ladder names it as the largest."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import zmq.asyncio
from support.free_ports import free_ports
from support.gateway_stack import (
    CALL_SECONDS,
    MODEL,
    GatewayClient,
    connected,
    fresh_prompt,
    mocker_worker,
    running_services,
    together,
)
from support.mocker_process import running_mocker
from support.trained_tokenizers import byte_level, save

from kvscout.v1 import gateway_pb2
from kvscout_common import errors
from kvscout_common.enum_words import word_of
from kvscout_common.rpc.channel import call

TOKENS, BLOCKS = 320, 19
"""Of a prompt; the last token is computed always."""
PROMPTS, ROUNDS = 6, 4
UNCONTESTED = PROMPTS * (ROUNDS - 1) * BLOCKS * 16
"""Tokens that could be cached where nothing is lost."""


@asynccontextmanager
async def fleet(
    *gateway_flags: str,
    mocker_flags: Sequence[str] = (),
    blocks: int = 4095,
    scheduler_flags: Sequence[str] = (),
    slow: bool = False,
    events_late_by: float = 0.0,
) -> AsyncIterator[GatewayClient]:
    speedup = "2" if slow else "20"
    engines = [
        running_mocker("--speedup", speedup, "--num-gpu-blocks", str(blocks + 1), *mocker_flags) for _ in range(2)
    ]
    services = running_services(*gateway_flags, scheduler_flags=scheduler_flags)
    async with together(services, *engines) as (served, *mockers):
        async with connected(served.gateway, served.scheduler, served.indexer) as client:
            async with AsyncExitStack() as stack:
                for index, mocker in enumerate(mockers):
                    worker = mocker_worker(f"w{index}", mocker, total_kv_blocks=blocks)
                    if events_late_by:
                        [events] = worker.event_endpoints
                        events.endpoint = await stack.enter_async_context(late_events(events.endpoint, events_late_by))
                        events.replay_endpoint = ""
                    await client.register(worker)
                yield client


@asynccontextmanager
async def late_events(endpoint: str, seconds: float) -> AsyncIterator[str]:
    """Where an engine's events come so many seconds later."""
    context = zmq.asyncio.Context()
    come, go = context.socket(zmq.SUB), context.socket(zmq.PUB)
    come.connect(endpoint)
    come.subscribe(b"")

    async def deliver(frames: list[bytes]) -> None:
        await asyncio.sleep(seconds)
        await go.send_multipart(frames)

    async def carry() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(deliver(await come.recv_multipart()))

    carrying = asyncio.create_task(carry())
    try:
        yield f"tcp://127.0.0.1:{go.bind_to_random_port('tcp://127.0.0.1')}"
    finally:
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
        context.destroy(linger=0)


async def ladders(client: GatewayClient) -> dict[str, gateway_pb2.Ladder]:
    """By session class; "" = all of them."""
    answer = await call(client.stub.GetLadder, gateway_pb2.GetLadderRequest(), timeout=CALL_SECONDS)
    return {word_of(gateway_pb2.SessionClass, one.session_class): one for one in answer.ladders}


def losses(ladder: gateway_pb2.Ladder) -> dict[str, int]:
    """Tokens by kind; what was new is no loss of anybody's."""
    found = {word_of(gateway_pb2.LadderLossKind, one.kind): one.tokens for one in ladder.losses}
    assert found.pop("never seen") == ladder.prompt_tokens - ladder.ideal_tokens
    return found


def largest(ladder: gateway_pb2.Ladder) -> str:
    rungs = [ladder.prompt_tokens, ladder.ideal_tokens, ladder.capacity_tokens, ladder.routing_tokens]
    assert sorted([*rungs, ladder.predicted_tokens], reverse=True) == [*rungs, ladder.predicted_tokens]
    found = losses(ladder)
    assert ladder.ideal_tokens - sum(found.values()) + ladder.unpredicted_tokens == ladder.actual_tokens
    return max(found, key=lambda name: found[name])


@pytest.mark.timeout(120)
async def test_nothing_is_lost_where_prompts_return_to_roomy_caches() -> None:
    prompts = [fresh_prompt(TOKENS) for _ in range(PROMPTS)]
    async with fleet() as client:
        for round_ in range(ROUNDS):
            for prompt in prompts:
                await client.generate(prompt, session=f"s{prompt[0]}")
                if not round_:
                    await client.until_indexed(prompt, BLOCKS)
        by_class = await ladders(client)
        ladder = by_class[""]
        assert ladder.requests == PROMPTS * ROUNDS
        assert ladder.prompt_tokens == PROMPTS * ROUNDS * TOKENS
        assert ladder.ideal_tokens == UNCONTESTED
        assert ladder.actual_tokens >= 0.9 * UNCONTESTED, losses(ladder)
        assert (ladder.workers, ladder.capacity_blocks, ladder.sample_weight) == (2, 2 * 4095, 1)
        assert {name: one.requests for name, one in by_class.items() if name} == {
            "first turn": PROMPTS,
            "later turn": PROMPTS * (ROUNDS - 1),
        }
        with pytest.raises(errors.InvalidArgument, match="at most 3600"):
            await call(client.stub.GetLadder, gateway_pb2.GetLadderRequest(window_seconds=3601), timeout=CALL_SECONDS)
        with pytest.raises(errors.NotFound, match="gpt"):
            await call(client.stub.GetLadder, gateway_pb2.GetLadderRequest(model="gpt"), timeout=CALL_SECONDS)


@pytest.mark.timeout(120)
async def test_a_salt_of_each_request_is_named() -> None:
    prompt = fresh_prompt(TOKENS)
    async with fleet() as client:
        for number in range(12):
            await client.generate(prompt, cache_salt=f"user-{number}")
        ladder = (await ladders(client))[""]
        assert largest(ladder) == "other name"
        assert losses(ladder)["other name"] == 11 * BLOCKS * 16
        assert list((await client.status()).ladders) == [ladder]


@pytest.mark.timeout(120)
async def test_tiny_caches_are_named_with_what_larger_ones_would_hold() -> None:
    prompts = [fresh_prompt(TOKENS) for _ in range(PROMPTS)]
    async with fleet(blocks=40) as client:  # 80 blocks for 120
        for _ in range(ROUNDS):
            for prompt in prompts:
                await client.generate(prompt)
        ladder = (await ladders(client))[""]
        assert largest(ladder) == "capacity"
        gains = {gain.capacity_factor: gain.tokens for gain in ladder.gains}
        assert gains[1.25] < gains[1.5] == losses(ladder)["capacity"], gains


@pytest.mark.timeout(120)
async def test_a_balancer_in_front_that_names_the_worker_is_named() -> None:
    prompts = [fresh_prompt(TOKENS) for _ in range(PROMPTS)]
    async with fleet() as client:
        for number in range(2):
            for prompt in prompts:
                await client.generate(prompt, pinned_worker_id=f"w{number}")
                await client.until_indexed(prompt, BLOCKS)
        ladder = (await ladders(client))[""]
        assert largest(ladder) == "not placed"


@pytest.mark.timeout(120)
async def test_events_that_do_not_come_are_named() -> None:
    prompts = [fresh_prompt(TOKENS) for _ in range(PROMPTS)]
    async with fleet(mocker_flags=("--drop-events", "1.0", "--no-replay")) as client:
        for _ in range(ROUNDS):
            for prompt in prompts:
                await client.generate(prompt)
        ladder = (await ladders(client))[""]
        assert largest(ladder) == "not reported"


@pytest.mark.timeout(120)
async def test_events_that_come_late_are_named() -> None:
    prompts = [fresh_prompt(TOKENS) for _ in range(PROMPTS)]
    async with fleet(events_late_by=3_600.0) as client:
        for _ in range(ROUNDS):
            for prompt in prompts:
                await client.generate(prompt)
        ladder = (await ladders(client))[""]
        assert largest(ladder) == "not reported"


@pytest.mark.timeout(120)
async def test_a_policy_that_balances_is_named() -> None:
    prompts = [fresh_prompt(TOKENS) for _ in range(PROMPTS - 1)]
    async with fleet(scheduler_flags=("--router-mode", "round-robin")) as client:
        for _ in range(2):
            for prompt in prompts:  # an odd number: each goes to the other worker the second time
                await client.generate(prompt)
                await client.until_indexed(prompt, BLOCKS)
        ladder = (await ladders(client))[""]
        assert largest(ladder) == "moved"


@pytest.mark.timeout(120)
async def test_a_move_for_load_says_how_much_waiting_it_saved() -> None:
    shared = fresh_prompt(TOKENS)
    async with fleet(slow=True) as client:
        await client.generate(shared)
        await client.until_indexed(shared, BLOCKS)
        prompts = [[*shared, *fresh_prompt(2_000)] for _ in range(12)]
        await asyncio.gather(*(client.generate(prompt, max_tokens=1) for prompt in prompts))
        ladder = (await ladders(client))[""]
        moved = next(one for one in ladder.losses if one.kind == gateway_pb2.LADDER_LOSS_KIND_MOVED)
        assert moved.tokens >= BLOCKS * 16, "at once they are too many for the holder"
        assert moved.saved_seconds > 0.0
        assert [one.kind for one in ladder.losses if one.saved_seconds] == [moved.kind]


@pytest.mark.timeout(120)
async def test_a_tokenizer_that_is_not_the_engines_is_named(tmp_path: Path) -> None:
    tokenizer = save(tmp_path / "tokenizer", byte_level())
    [port] = free_ports(1)
    body = {"model": MODEL, "prompt": "a text of words that the engine reads as one token each " * 20, "max_tokens": 1}
    async with fleet("--http-port", str(port), "--tokenizer", f"{MODEL}={tokenizer}") as client:
        async with aiohttp.ClientSession() as http:
            for _ in range(3):
                async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
        ladder = (await ladders(client))[""]
        assert ladder.requests == 3
        assert largest(ladder) == "other tokens"


@pytest.mark.timeout(120)
async def test_switched_off_it_says_so() -> None:
    async with fleet("--no-ladder") as client:
        await client.generate(fresh_prompt(TOKENS))
        with pytest.raises(errors.FailedPrecondition, match="--no-ladder"):
            await ladders(client)


@pytest.mark.timeout(120)
async def test_the_command_names_the_largest_loss_within_80_columns() -> None:
    prompt = fresh_prompt(TOKENS)
    async with fleet() as client:
        for number in range(12):
            await client.generate(prompt, cache_salt=f"user-{number}")
        text = await why("--gateway", client.gateway)
        assert "87 points: same tokens, another salt or adapter." in text, text
        assert max(map(len, text.splitlines())) <= 80
        [ladder] = json.loads(await why("--gateway", client.gateway, "--json"))
        assert ladder["requests"] == "12"


async def why(*flags: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", "why", *flags), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()
