"""A real engine process and a real indexer: what is predicted before each request is what the engine then reports."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from support.indexer_client import MODEL, IndexerClient, indexer_process
from support.mocker_process import MockerProcess, cached_tokens, running_mocker
from support.seeds import test_seed

from kvscout.v1 import indexer_pb2

BLOCK = 16
REQUESTS = 60


class Rank(NamedTuple):
    """Where a rank of the mocker publishes."""

    endpoint: str
    replay_endpoint: str


async def register(client: IndexerClient, mocker: MockerProcess) -> None:
    if mocker.grpc_port:
        stream = Rank(f"grpc://127.0.0.1:{mocker.grpc_port}", "")
        await client.register(stream, block_size=BLOCK, dp_size=len(mocker.ranks))
        await client.until(lambda s: s.state == indexer_pb2.SOURCE_STATE_WAITING)
        return
    ranks = [Rank(rank["events"], rank["replay"]) for rank in mocker.ranks]
    await client.register(*ranks, block_size=BLOCK)
    for number in range(len(ranks)):
        await client.until(lambda s: s.replays > 0 and s.state != indexer_pb2.SOURCE_STATE_REPLAYING, dp_rank=number)


async def settled(client: IndexerClient, mocker: MockerProcess, rank: int) -> None:
    """Waits until the indexer has applied everything that a rank has published."""
    last = [int.from_bytes(frames[-2], "big") for frames in await mocker.replay(0, rank)][-2:-1]
    await client.until_applied(last[0] if last else -1, dp_rank=rank)


@pytest.mark.parametrize(
    "kind", [(), ("--sliding-window", "40"), ("--state-space",), ("--grpc-port", "0")], ids=" ".join
)
@pytest.mark.parametrize("form", ["map", "array"])
async def test_random_prompts_under_eviction_are_predicted_exactly(form: str, kind: tuple[str, ...]) -> None:
    seed = test_seed()
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(BLOCK * 4)] for _ in range(6)]
    flags = ("--model", MODEL, "--block-size", str(BLOCK), "--num-gpu-blocks", "40", "--dp-size", "2", *kind)
    hits = 0
    async with indexer_process() as (client, _), running_mocker(*flags, "--event-format", form) as mocker:
        await register(client, mocker)
        for number in range(REQUESTS):
            prefix = rng.choice(prefixes)[: BLOCK * rng.randrange(1, 5)]
            prompt = prefix + [rng.randrange(1000) for _ in range(rng.randrange(0, 2 * BLOCK))]
            rank = rng.randrange(2)
            await settled(client, mocker, rank)
            predicted = min(await client.overlap(prompt, dp_rank=rank), (len(prompt) - 1) // BLOCK) * BLOCK
            answer = await mocker.complete(prompt, {"X-data-parallel-rank": str(rank)}, max_tokens=rng.randrange(1, 20))
            assert cached_tokens(answer) == predicted, f"request {number}"
            hits += predicted > 0
        states = [await client.status(dp_rank=rank) for rank in range(2)]
    print(f"{REQUESTS} requests, {hits} of them with cached tokens")
    assert hits > REQUESTS / 10
    assert all(status.state == indexer_pb2.SOURCE_STATE_LIVE for status in states)
    assert all(not status.ignored for status in states)
