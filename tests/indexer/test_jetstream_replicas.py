"""Several replicas as real processes, killed and stopped at any time: they have the same state again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support import processes
from support.indexer_client import MODEL, IndexerClient, indexer_process
from support.process_metrics import scrape
from support.processes import eventually
from support.seeds import test_seed
from support.stream_world import TENANT, World, register, removed, stream_world, until, until_overlap

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2
from kvscout_common.rpc.channel import open_channel, stream


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with stream_world() as started:
        yield started


async def dumps(running: processes.Running) -> list[bytes]:
    """Everything that a replica knows."""
    channel = open_channel(running.address)
    try:
        answers = stream(indexer_pb2_grpc.IndexerStub(channel).Dump, indexer_pb2.DumpRequest(model=MODEL), timeout=10)
        return [message.SerializeToString(deterministic=True) async for message in answers]
    finally:
        await channel.close()


async def serving(running: processes.Running) -> bool:
    """What health says."""
    channel = open_channel(running.address)
    try:
        probe = health_pb2_grpc.HealthStub(channel)
        answer = await probe.Check(health_pb2.HealthCheckRequest(), timeout=10)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
    finally:
        await channel.close()


async def known_workers(client: IndexerClient) -> int:
    """How many workers a replica has learned of."""
    return len((await client.rpc("GetStatus", types_pb2.GetStatusRequest())).sources)


class Traffic:
    """What engines do, at random; their truth is what every replica must show."""

    def __init__(self, world: World, chance: random.Random, workers: int) -> None:
        self.publishers = [world.publisher(f"w{number}") for number in range(workers)]
        self._chance = chance

    async def some(self, messages: int) -> None:
        """Publishes a few messages of a few workers."""
        for _ in range(messages):
            w = self._chance.choice(self.publishers)
            if w.blocks > 3 and self._chance.random() < 0.25:
                await w.publish(removed([self._chance.randrange(1, w.blocks + 1)]))
            else:
                await w.grow(1)

    async def shown_by(self, client: IndexerClient) -> None:
        """Waits until a replica knows every worker, and has applied everything."""
        await until(lambda: known_workers(client), len(self.publishers))
        for w in self.publishers:
            await client.until_applied(w.next_id - 1, w.worker_id)


async def test_replicas_killed_at_any_time_have_equal_states_and_so_has_one_that_starts_alone(
    world: World,
) -> None:
    chance = random.Random(test_seed())
    traffic = Traffic(world, chance, workers=4)
    flags = (*world.flags, "--router-snapshot-threshold", "60")

    async def purged() -> bool:
        return await world.first_sequence() > 1

    async with AsyncExitStack() as stack:
        stays, process = await stack.enter_async_context(indexer_process(*flags))
        for w in traffic.publishers:
            await register(stays, w.worker_id)
        for _ in range(3):
            async with indexer_process(*flags) as (_, victim):
                publishing = asyncio.create_task(traffic.some(120))
                await asyncio.sleep(chance.random())
                victim.process.kill()
                await victim.process.wait()
                await publishing
        await eventually(purged, what="a purged stream")
        comes, other = await stack.enter_async_context(indexer_process(*flags))
        for client in (stays, comes):
            await traffic.shown_by(client)
        before = await dumps(process)
        assert before == await dumps(other)
        assert len(before) == 4
        for each in (process, other):
            each.process.kill()
            await each.process.wait()
    async with indexer_process(*flags) as (alone, late):
        await traffic.shown_by(alone)
        assert await dumps(late) == before


async def test_a_replica_that_was_stopped_while_others_went_on_has_the_same_state(world: World) -> None:
    traffic = Traffic(world, random.Random(7), workers=3)
    flags = (*world.flags, "--router-snapshot-threshold", "50")
    async with indexer_process(*flags) as (stops, stopped), indexer_process(*flags) as (goes_on, other):
        for w in traffic.publishers:
            await register(stops, w.worker_id)
        await traffic.some(40)
        await traffic.shown_by(stops)
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            purged_before = await world.first_sequence()
            while await world.first_sequence() < purged_before + 100:
                await traffic.some(20)
                await traffic.shown_by(goes_on)
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        await traffic.some(10)
        for client in (stops, goes_on):
            await traffic.shown_by(client)
        assert await dumps(stopped) == await dumps(other)


async def test_health_says_serving_once_everything_was_read_that_the_stream_had(world: World) -> None:
    w = world.publisher()
    last = await w.grow(500)
    async with indexer_process(*world.flags) as (client, running):
        await until(lambda: serving(running), True)
        samples = await scrape(running)
        assert samples[f'kvscout_stream_position{{model="{MODEL}",tenant="{TENANT}"}}'] == last
        assert samples[f'kvscout_stream_lag_messages{{model="{MODEL}",tenant="{TENANT}"}}'] == 0
        await register(client)
        await until_overlap(client, 500)
