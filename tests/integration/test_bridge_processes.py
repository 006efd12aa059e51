"""Engine, bridge, NATS, indexers as real processes: an index behind a bridge is what it is at the engine."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import pytest
from support.indexer_client import MODEL, IndexerClient, indexer_process
from support.mocker_process import MockerProcess, running_mocker
from support.nats_server import NatsServer, nats_server
from support.processes import Running, eventually, start
from support.scripted_publisher import read_dump

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_common.errors import NotFound
from kvscout_common.rpc.channel import open_channel, stream

BLOCK = 16
RANKS = 2


class Rank(NamedTuple):
    """Where a rank of the engine publishes."""

    endpoint: str
    replay_endpoint: str


async def bridge(server: NatsServer, mocker: MockerProcess, transport: str) -> Running:
    """A bridge that is told the engine's address and nothing of its events."""
    return await start(
        "kvscout_bridge.main", "--nats-server", server.url, "--transport", transport, "--worker-id", "w",
        "--model", MODEL, "--block-size", str(BLOCK), "--engine", "mock", "--http-endpoint", mocker.url,
    )  # fmt: skip


@asynccontextmanager
async def following(server: NatsServer) -> AsyncIterator[tuple[IndexerClient, Running]]:
    """An indexer that learns of the worker from NATS."""
    async with indexer_process("--nats-server", server.url) as (client, running):
        yield client, running


async def dumps(running: Running) -> list[WorkerDump | None]:
    """What an indexer holds of each rank; epochs and cursors aside."""
    channel = open_channel(running.address)
    found: list[WorkerDump | None] = []
    try:
        for rank in range(RANKS):
            request = indexer_pb2.DumpRequest(worker_id="w", dp_rank=rank)
            messages = [
                part.SerializeToString()
                async for part in stream(indexer_pb2_grpc.IndexerStub(channel).Dump, request, timeout=10)
            ]
            found.append(replace(read_dump(messages), epoch=0) if messages else None)
    finally:
        await channel.close()
    return found


@pytest.mark.parametrize("transport", ["nats-core", "jetstream"])
async def test_behind_a_bridge_an_index_is_what_it_is_at_the_engine(transport: str) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(1000) for _ in range(BLOCK * rng.randrange(2, 12))] for _ in range(40)]
    async with (
        nats_server() as server,
        running_mocker("--dp-size", str(RANKS), "--num-gpu-blocks", "128", "--model", MODEL) as mocker,
        indexer_process() as (direct, at_engine),
    ):
        await direct.register(*(Rank(rank["events"], rank["replay"]) for rank in mocker.ranks), block_size=BLOCK)
        bridged = await bridge(server, mocker, transport)
        try:
            async with following(server) as (_, behind):

                async def equal() -> bool:
                    truth = await dumps(at_engine)
                    return all(dump is not None and dump.blocks for dump in truth) and await _or_none(behind) == truth

                for prompt in prompts[:20]:
                    await mocker.complete(prompt, max_tokens=2)
                await eventually(equal, what="equal dumps")
                bridged.process.kill()
                await bridged.process.wait()
                for prompt in prompts[20:30]:
                    await mocker.complete(prompt, max_tokens=2)
                bridged = await bridge(server, mocker, transport)
                await server.kill()
                await server.start()
                for prompt in prompts[30:]:
                    await mocker.complete(prompt, max_tokens=2)
                await eventually(equal, what="equal dumps")
            async with following(server) as (_, behind):
                await eventually(equal, what="equal dumps in one that came later")
        finally:
            await bridged.stop()


async def _or_none(running: Running) -> list[WorkerDump | None]:
    """The dumps; none while the worker is not known there."""
    try:
        return await dumps(running)
    except NotFound:
        return []
