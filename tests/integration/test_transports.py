"""Recordings of real engines through every transport: whatever brings the events, what is known in the end is the same.

The truth is the publisher's own index, which was given the engine's bytes. Another transport takes a function that
brings a recording into an indexer, and a line in `TRANSPORTS`.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgpack
import pytest
from support.indexer_client import MODEL, IndexerClient, indexer_process
from support.nats_server import nats_server
from support.processes import eventually, running
from support.recorded_engine import recorded_engine
from support.scripted_publisher import (
    CorePublisher,
    FaultyChannel,
    Life,
    ScriptedPublisher,
    address_of,
    core_publisher,
    dumped,
    follow,
    greeting,
    nats_config,
    pushing,
    served_indexer,
)
from support.seeds import test_seed
from support.subscribed_engine import Keeps, SubscribedEngine, subscribed_engine

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_common.rpc.channel import open_channel
from kvscout_common.worker import EventEndpoint, Transport
from kvscout_indexer.config import IndexerConfig

SEED = test_seed()
CAPTURES = Path(__file__).parents[1] / "data" / "captures"
BLOCK_SIZES = {"vllm-0.23.0-array": 16, "vllm-0.32.0": 32, "vllm-0.32.0-dp2": 32, "vllm-0.32.0-lora-chunked": 32}
BRIDGED = ("vllm-0.23.0-array", "vllm-0.32.0-dp2")


@dataclass(frozen=True)
class Recording:
    """What an engine's ranks published."""

    block_size: int
    ranks: list[list[bytes]]

    def publishers(self) -> list[ScriptedPublisher]:
        """One a rank; nothing is published yet."""
        return [ScriptedPublisher(dp_rank=rank, block_size=self.block_size) for rank in range(len(self.ranks))]


def recording(name: str) -> Recording:
    ranks = []
    for path in [CAPTURES / name / "events.bin", *sorted((CAPTURES / name).glob("events.[0-9]*.bin"))]:
        with path.open("rb") as file:
            ranks.append([record[1][2] for record in msgpack.Unpacker(file)])
    return Recording(BLOCK_SIZES[name], ranks)


async def all_of(client: IndexerClient, stub: object, recorded: Recording) -> list[WorkerDump]:
    """The dump of each rank, once everything is there."""
    dumps = []
    for rank, batches in enumerate(recorded.ranks):
        await client.until_applied(len(batches) - 1, "w", rank)
        dumps.append(await dumped(stub, "w", rank))
    return dumps


async def direct(recorded: Recording) -> list[WorkerDump]:
    """The engine's own sockets."""
    async with AsyncExitStack() as stack:
        client, indexer, stub = await stack.enter_async_context(served_indexer())
        engines = [await stack.enter_async_context(recorded_engine()) for _ in recorded.ranks]
        endpoints = tuple(EventEndpoint(rank, e.endpoint, e.replay_endpoint) for rank, e in enumerate(engines))
        follow(
            indexer,
            Transport.ZMQ,
            block_size=recorded.block_size,
            dp_size=len(engines),
            event_endpoints=endpoints,
        )
        for engine, batches in zip(engines, recorded.ranks, strict=True):
            await engine.subscribed()
            # What is lost here and there is replayed.
            for number, payload in enumerate(batches):
                if number % 7 == 3 and number + 1 < len(batches):
                    engine.lose(payload)
                else:
                    await engine.publish(payload)
        return await all_of(client, stub, recorded)


async def core(recorded: Recording) -> list[WorkerDump]:
    """NATS core."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(nats_server())
        client, indexer, stub = await stack.enter_async_context(served_indexer(nats_config(server.url)))
        follow(indexer, Transport.NATS_CORE, block_size=recorded.block_size, dp_size=len(recorded.ranks))
        for publisher, batches in zip(recorded.publishers(), recorded.ranks, strict=True):
            sending = await stack.enter_async_context(core_publisher(server.url, publisher))
            for number, payload in enumerate(batches):
                if number % 7 == 3 and number + 1 < len(batches):
                    sending.lose(payload)
                else:
                    await sending.publish(payload)
        return await all_of(client, stub, recorded)


async def bridge(recorded: Recording, transport: Transport = Transport.NATS_CORE) -> list[WorkerDump]:
    """A real bridge before the engine's sockets, killed and started again in the midst."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(nats_server())
        client, indexer, stub = await stack.enter_async_context(served_indexer(nats_config(server.url)))
        follow(indexer, transport, block_size=recorded.block_size, dp_size=len(recorded.ranks))
        engines = [await stack.enter_async_context(recorded_engine()) for _ in recorded.ranks]
        flags = ["--worker-id", "w", "--model", MODEL, "--block-size", str(recorded.block_size), "--no-register"]
        flags += ["--transport", str(transport), "--nats-server", server.url]
        for engine in engines:
            flags += ["--event-endpoint", engine.endpoint, "--replay-endpoint", engine.replay_endpoint]
        half = [len(batches) // 2 for batches in recorded.ranks]
        async with running("kvscout_bridge.main", *flags) as first:
            for rank, engine in enumerate(engines):
                await engine.publish(*recorded.ranks[rank][: half[rank]])
            for rank, number in enumerate(half):
                await client.until_applied(number - 1, "w", rank)
            first.process.kill()
            await first.process.wait()
        await stack.enter_async_context(running("kvscout_bridge.main", *flags))
        for rank, engine in enumerate(engines):
            await engine.publish(*recorded.ranks[rank][half[rank] :])
        return await all_of(client, stub, recorded)


async def push(recorded: Recording) -> list[WorkerDump]:
    """gRPC push."""
    async with AsyncExitStack() as stack:
        client, indexer, stub = await stack.enter_async_context(served_indexer())
        follow(indexer, Transport.GRPC, block_size=recorded.block_size, dp_size=len(recorded.ranks))
        for publisher, batches in zip(recorded.publishers(), recorded.ranks, strict=True):
            stream = await stack.enter_async_context(pushing(stub, publisher))
            for number, payload in enumerate(batches):
                message = publisher.make(payload)
                if number % 7 != 3 or number + 1 == len(batches):
                    await stream.send(message)
        return await all_of(client, stub, recorded)


async def subscribed(recorded: Recording, keeps: Keeps = Keeps.NOTHING) -> list[WorkerDump]:
    """The stream of a gRPC server beside the engine; one that keeps something is there before the indexer."""
    async with AsyncExitStack() as stack:
        client, indexer, stub = await stack.enter_async_context(served_indexer())
        engine = await stack.enter_async_context(subscribed_engine(SubscribedEngine(len(recorded.ranks), keeps)))
        batches = [(rank, payload) for rank, payloads in enumerate(recorded.ranks) for payload in payloads]
        late = batches[len(batches) // 2 :] if keeps is not Keeps.NOTHING else batches
        for rank, payload in batches[: len(batches) - len(late)]:
            engine.make(payload, rank)
        follow(
            indexer,
            Transport.SUBSCRIBE,
            block_size=recorded.block_size,
            dp_size=len(recorded.ranks),
            event_endpoints=(EventEndpoint(0, engine.endpoint),),
        )

        async def begun() -> bool:
            return engine.streams == 1

        await eventually(begun, what="the stream")
        for rank, payload in late:
            engine.publish_payload(payload, rank)
        return await all_of(client, stub, recorded)


async def peer(recorded: Recording) -> list[WorkerDump]:
    """Another indexer, of engines without a replay socket that have fallen silent."""
    async with AsyncExitStack() as stack:
        client, indexer, stub = await stack.enter_async_context(served_indexer())
        address = await stack.enter_async_context(address_of(indexer))
        engines = [await stack.enter_async_context(recorded_engine(has_replay=False)) for _ in recorded.ranks]
        endpoints = tuple(EventEndpoint(rank, e.endpoint) for rank, e in enumerate(engines))
        late_config = IndexerConfig(peers=(address,))
        late, late_indexer, late_stub = await stack.enter_async_context(served_indexer(late_config))
        for one in (indexer, late_indexer):
            follow(
                one,
                Transport.ZMQ,
                block_size=recorded.block_size,
                dp_size=len(engines),
                event_endpoints=endpoints,
            )
            if one is indexer:
                for engine, batches in zip(engines, recorded.ranks, strict=True):
                    await engine.subscribed()
                    await engine.publish(*batches)
                await all_of(client, stub, recorded)
        return await all_of(late, late_stub, recorded)


TRANSPORTS: dict[str, Callable[[Recording], Awaitable[list[WorkerDump]]]] = {
    "ZMQ direct": direct,
    "NATS core": core,
    "bridge": bridge,
    "bridge, JetStream": partial(bridge, transport=Transport.JETSTREAM),
    "gRPC push": push,
    "gRPC stream": subscribed,
    "gRPC stream, batches kept": partial(subscribed, keeps=Keeps.BATCHES),
    "gRPC stream, state kept": partial(subscribed, keeps=Keeps.STATE),
    "peer": peer,
}


@pytest.mark.parametrize(
    ("transport", "name"),
    # Processes take seconds to start: two recordings are enough for those.
    [
        (transport, name)
        for transport in TRANSPORTS
        for name in BLOCK_SIZES
        if "bridge" not in transport or name in BRIDGED
    ],
)
async def test_a_recording_ends_in_the_same_state_whatever_brings_it(transport: str, name: str) -> None:
    recorded = recording(name)
    publishers = recorded.publishers()
    for publisher, batches in zip(publishers, recorded.ranks, strict=True):
        for payload in batches:
            publisher.make(payload)
    truth = [publisher.truth() for publisher in publishers]
    # There is something to compare in the end.
    assert all(dump.blocks for dump in truth)
    assert await TRANSPORTS[transport](recorded) == truth


@asynccontextmanager
async def calling(address: str) -> AsyncIterator[indexer_pb2_grpc.IndexerStub]:
    """A stub for a process."""
    channel = open_channel(address)
    try:
        yield indexer_pb2_grpc.IndexerStub(channel)
    finally:
        await channel.close()


class World:
    """A worker over NATS core and one that pushes, each with events of its own, and an indexer process that dies."""

    def __init__(self, seed: int, url: str, workers_file: Path) -> None:
        self.rng = random.Random(seed)
        self.url = url
        self.flags = ("--workers-file", str(workers_file), "--nats-server", url, "--log-level", "warning")
        self.core, self.pushed = ScriptedPublisher("core", ring=32), ScriptedPublisher("pushed", ring=32)
        self.lives = {publisher: Life(self.rng) for publisher in (self.core, self.pushed)}
        self.channels = {publisher: FaultyChannel(self.rng) for publisher in (self.core, self.pushed)}
        workers_file.write_text(
            "workers:\n"
            f"  - {{worker_id: core, model: {MODEL}, block_size: 4, transport: nats-core}}\n"
            f"  - {{worker_id: pushed, model: {MODEL}, block_size: 4, transport: grpc}}\n"
        )

    def payload(self, publisher: ScriptedPublisher) -> bytes:
        """The next batch; sometimes the engine restarts before it."""
        if self.rng.random() < 0.01:
            publisher.restart()
            self.lives[publisher] = Life(self.rng)
        return self.lives[publisher].payload()

    async def live(self, sending: CorePublisher, stub: indexer_pb2_grpc.IndexerStub | None, batches: int) -> None:
        """Publishes for a while; without an indexer nobody hears it."""
        async with AsyncExitStack() as stack:
            stream = await stack.enter_async_context(pushing(stub, self.pushed)) if stub is not None else None
            if stream is not None:
                await stream.send(greeting(self.pushed))
            for _ in range(batches):
                await sending.publish(self.payload(self.core))
                message = self.pushed.make(self.payload(self.pushed))
                for arriving in self.channels[self.pushed].through(message) if stream is not None else ():
                    await stream.send(arriving)  # type: ignore[union-attr]  # without a stream nothing arrives

    async def quiet(self, sending: CorePublisher, stub: indexer_pb2_grpc.IndexerStub, client: IndexerClient) -> None:
        """Nothing is lost any more: a last batch each, and both are known exactly."""
        for channel in self.channels.values():
            channel.loss = 0.0
        async with pushing(stub, self.pushed) as stream:
            await stream.send(greeting(self.pushed), self.pushed.make(self.lives[self.pushed].payload()))
            await sending.publish(self.lives[self.core].payload())
            for publisher in (self.core, self.pushed):
                await client.until(
                    lambda s, publisher=publisher: (  # type: ignore[misc]
                        (s.epoch, s.last_event_id, s.state)
                        == (publisher.epoch, publisher.last_id, indexer_pb2.SOURCE_STATE_LIVE)
                    ),
                    publisher.rank.worker_id,
                )
                assert await dumped(stub, publisher.rank.worker_id) == publisher.truth()


async def test_losses_repeats_restarts_and_kills_of_indexer_and_nats_end_in_the_publishers_truth(
    tmp_path: Path,
) -> None:
    async with nats_server() as server:
        world = World(SEED, server.url, tmp_path / "workers.yaml")
        channel = world.channels[world.core]
        async with core_publisher(server.url, world.core, channel=channel) as sending:
            async with indexer_process(*world.flags) as (client, process), calling(process.address) as stub:
                await client.until(lambda s: s.states == 1, "core")
                await world.live(sending, stub, 150)
                await server.kill()
                await world.live(sending, stub, 20)
                await server.start()
                await world.live(sending, stub, 50)
                process.process.kill()
                await process.process.wait()
            await world.live(sending, None, 50)
            async with indexer_process(*world.flags) as (client, process), calling(process.address) as stub:
                await world.live(sending, stub, 100)
                await world.quiet(sending, stub, client)
