"""Events of a custom engine through every transport, read by real indexers, which are killed and come late."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest
from support.free_ports import free_ports
from support.indexer_client import BLOCK_SIZE, MODEL, IndexerClient, local_indexer
from support.nats_server import NatsServer, nats_server
from support.processes import eventually
from support.scripted_publisher import dumped
from support.seeds import test_seed

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import Cleared, EventBatch
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_client import KvEventPublisher
from kvscout_client.kv_publisher_rank import removed_events, stored_events
from kvscout_common.errors import Cancelled, FailedPrecondition, InvalidArgument
from kvscout_common.nats.config import NatsConfig
from kvscout_common.rpc.channel import open_channel
from kvscout_common.rpc.guard import Guard
from kvscout_common.worker import WorkerRank
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.rpc.servicer import IndexerServicer

SEED = test_seed()
PROMPT = list(range(100, 112))
FLUSH_SECONDS = 20.0


class Truth:
    """A publisher's events, applied to an index of the test's own in the same order."""

    def __init__(self, events: Any, *, seed: int = 0) -> None:
        self.events = events
        self.rank = WorkerRank("w", 0)
        self.index = make_index(BLOCK_SIZE)
        self.index.add_worker(self.rank, WorkerOptions())
        self.last = -1
        self._rng = random.Random(seed)
        self._held: list[int] = []
        self._next = 1

    def step(self) -> None:
        """A random event."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.7 or not self._held:
            parent = rng.choice([None, *self._held])
            number = rng.randint(1, 4)
            hashes = list(range(self._next, self._next + number))
            self._next += number
            tokens = [rng.randrange(1000) for _ in range(number * BLOCK_SIZE)]
            self.stored(tokens, hashes, parent, medium=rng.choice([None, None, "CPU"]))
            self._held += hashes
        elif kind < 0.98:
            gone = rng.sample(self._held, min(len(self._held), rng.randint(1, 3)))
            self._held = [number for number in self._held if number not in gone]
            self.last = self.events.publish_removed(gone)
            self._apply(*removed_events(gone, medium=None))
        else:
            self.last = self.events.publish_cleared()
            self._apply(Cleared())
            self._held = []

    def stored(self, tokens: list[int], hashes: list[int], parent: int | None, **fields: Any) -> None:
        """Stores blocks."""
        sizes = [BLOCK_SIZE] * len(hashes)
        self.last = self.events.publish_stored(tokens, sizes, hashes, parent, **fields)
        given = {"lora_name": None, "medium": None, "cache_salt": None, "mm_items": (), **fields}
        self._apply(*stored_events(tokens, sizes, hashes, parent, block_size=BLOCK_SIZE, **given))

    def dump(self) -> WorkerDump:
        """What a reader must know, incarnation aside."""
        dump = self.index.dump(self.rank)
        assert dump is not None
        return replace(dump, epoch=0, last_event_id=self.last)

    def _apply(self, *events: Any) -> None:
        self.index.apply(self.rank, EventBatch(tuple(events)), event_id=self.last)


@dataclass
class Reader:
    """An indexer behind a real gRPC server."""

    client: IndexerClient
    stub: indexer_pb2_grpc.IndexerStub

    async def equals(self, truth: WorkerDump, dp_rank: int = 0) -> None:
        """Waits until it holds exactly this, and knows that it does."""

        async def equal() -> bool:
            try:
                status = await self.client.status("w", dp_rank)
                held = await dumped(self.stub, "w", dp_rank)
            except (StopIteration, RuntimeError, grpc.aio.AioRpcError):
                return False
            return held == truth and status.state == indexer_pb2.SOURCE_STATE_LIVE

        try:
            await eventually(equal, what="the truth")
        except AssertionError as error:
            status = await self.client.rpc("GetStatus", types_pb2.GetStatusRequest())
            raise AssertionError(f"{error}\n{status.sources}\n{await dumped(self.stub)}\n{truth}") from error


@dataclass
class World:
    """A transport, and where it leads to."""

    transport: str
    nats: NatsServer | None
    ports: list[int] = field(default_factory=lambda: free_ports(2))

    def publisher(self, **fields: Any) -> KvEventPublisher:
        """A publisher of worker "w"."""
        given: dict[str, Any] = {"worker_id": "w", "model": MODEL, "block_size": BLOCK_SIZE, "lease_seconds": 2}
        if self.nats is not None:
            given["nats_servers"] = [self.nats.url]
        else:
            given["indexers"] = [f"127.0.0.1:{self.ports[0]}"]
        return KvEventPublisher(transport=self.transport, **{**given, **fields})

    @asynccontextmanager
    async def publishing(self, **fields: Any) -> AsyncIterator[KvEventPublisher]:
        """A publisher for the length of a block, which may outlive its indexers: nobody waits for them."""
        events = await self.publisher(**fields).open()
        try:
            yield events
        finally:
            await events.close(timeout=0.1)

    @asynccontextmanager
    async def indexer(self, number: int = 0) -> AsyncIterator[Reader]:
        """An indexer for the length of a block; then it is gone as if killed."""
        config = IndexerConfig(nats=NatsConfig((self.nats.url,))) if self.nats is not None else IndexerConfig()
        async with local_indexer(config) as (client, indexer):
            server = grpc.aio.server(interceptors=(Guard(),))
            IndexerServicer(indexer, indexer.queries).add_to(server)
            address = f"127.0.0.1:{self.ports[number]}"
            assert server.add_insecure_port(address)
            await server.start()
            channel = open_channel(address)
            try:
                yield Reader(client, indexer_pb2_grpc.IndexerStub(channel))
            finally:
                await channel.close()
                await server.stop(None)


@asynccontextmanager
async def world_of(transport: str) -> AsyncIterator[World]:
    if transport == "grpc":
        yield World(transport, None)
        return
    async with nats_server() as server:
        yield World(transport, server)


@pytest.fixture(params=["nats-core", "jetstream", "grpc"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with world_of(request.param) as made:
        yield made


async def holds(reader: Reader, blocks: int, tokens: list[int], **fields: Any) -> None:
    """Waits until an indexer finds so many blocks of a prompt."""

    async def found() -> bool:
        try:
            return await reader.client.overlap(tokens, **fields) == blocks
        except Exception as error:
            # Before the worker is registered the model is not known.
            if type(error).__name__ != "NotFound":
                raise
            return False

    await eventually(found, what=f"{blocks} blocks")


async def test_what_is_stored_removed_and_cleared_is_what_indexers_find(world: World) -> None:
    async with world.indexer() as reader, world.publisher(total_kv_blocks=100) as events:
        assert events.publish_stored(PROMPT[:10], [4, 4, 2], [1, -2, 9]) == 0
        assert events.publish_stored(PROMPT[8:], [4], [3], parent_hash=-2) == 1
        await holds(reader, 3, PROMPT)
        events.publish_stored(PROMPT, [4, 4, 4], [11, 12, 13], lora_name="adapter")
        events.publish_stored(PROMPT, [4, 4, 4], [21, 22, 23], cache_salt="salt")
        await holds(reader, 3, PROMPT, cache_salt="salt")
        assert await reader.client.overlap(PROMPT, lora_name="adapter") == 3
        events.publish_stored([], [], [3], medium="CPU")
        events.publish_removed([-2])
        await holds(reader, 1, PROMPT)
        assert await events.flush(FLUSH_SECONDS)
        registered = (await reader.client.rpc("ListWorkers", workers_pb2.ListWorkersRequest())).workers[0]
        assert (registered.worker.engine, registered.worker.total_kv_blocks) == (5, 100)
        assert 0 < registered.lease_remaining_seconds <= 2
        last = events.publish_cleared()
        assert (await reader.client.until_applied(last or 0)).blocks == 0
        status = events.status
        assert (status.connected, status.dropped, status.last_event_id, status.problem) == (True, 0, 6, "")


async def test_an_indexer_that_comes_late_gets_everything_and_knows_that_it_is_everything(world: World) -> None:
    async with world.publishing() as events:
        truth = Truth(events, seed=SEED)
        for _ in range(40):
            truth.step()
        async with world.indexer() as reader:
            await reader.equals(truth.dump())
            truth.step()
            await reader.equals(truth.dump())


async def test_nothing_is_lost_or_doubled_when_nats_and_indexers_die_and_all_transports_end_equal(
    world: World,
) -> None:
    indexers = {"indexers": [f"127.0.0.1:{port}" for port in world.ports]} if world.nats is None else {}
    async with world.publishing(**indexers) as events, world.indexer(0) as steady:
        truth = Truth(events, seed=SEED)
        async with world.indexer(1) as dying:
            for _ in range(60):
                truth.step()
            await dying.equals(truth.dump())
            truth.step()
        if world.nats is not None:
            await world.nats.kill()
        for _ in range(30):
            truth.step()
        if world.nats is not None:
            await world.nats.start()
        async with world.indexer(1) as again:
            for _ in range(30):
                truth.step()
            for reader in (steady, again):
                await reader.equals(truth.dump())
        if world.nats is not None:
            assert await events.flush(FLUSH_SECONDS)
        assert events.status.dropped == 0


@pytest.mark.parametrize("transport", ["nats-core", "grpc"])
async def test_what_is_too_much_to_wait_becomes_the_state(transport: str) -> None:
    async with world_of(transport) as world, world.publishing(max_buffered_bytes=4000) as events:
        async with world.indexer() as reader:
            truth = Truth(events, seed=SEED)
            truth.step()
            await reader.equals(truth.dump())
            if world.nats is not None:
                await world.nats.kill()
        for _ in range(100):
            truth.step()
        assert events.status.buffered_bytes <= 4000
        if world.nats is not None:
            await world.nats.start()
        async with world.indexer() as reader:
            await reader.equals(truth.dump())
            assert events.status.states >= 2


@pytest.mark.parametrize("transport", ["nats-core", "jetstream", "grpc"])
async def test_without_a_local_index_what_was_lost_shows_and_what_comes_later_is_found(transport: str) -> None:
    async with world_of(transport) as world:
        fields = {"max_buffered_bytes": 2000, "enable_local_indexer": False}
        async with world.indexer() as reader, world.publisher(**fields) as events:
            # Over NATS core who does not know of the worker yet hears nothing of it.
            await known(reader)
            events.publish_stored(PROMPT, [4, 4, 4], [1, 2, 3])
            await holds(reader, 3, PROMPT)
            # Before the loop has its turn nothing can be sent.
            for number in range(1100):
                events.publish_stored([number] * 4, [4], [100 + number])
            assert events.status.buffered_bytes <= 2000
            last = events.publish_stored(PROMPT, [4, 4, 4], [7, 8, 9], lora_name="late")
            status = await reader.client.until(lambda s: s.last_event_id == last)
            assert events.status.dropped > 0
            await holds(reader, 3, PROMPT, lora_name="late")
            assert status.state in (indexer_pb2.SOURCE_STATE_INCOMPLETE, indexer_pb2.SOURCE_STATE_REPLAYING)
            assert (await reader.client.matches(PROMPT, lora_name="late")).lower_bound
            # Empty is empty: nothing is missing any more.
            last = events.publish_cleared()
            status = await reader.client.until_applied(last or 0)
            assert (status.state, status.blocks) == (indexer_pb2.SOURCE_STATE_LIVE, 0)


async def test_the_engines_own_numbers_are_kept_and_gaps_in_them_show(world: World) -> None:
    async with world.indexer() as reader, world.publisher(epoch=7) as events:
        events.publish_stored(PROMPT[:4], [4], [1], event_id=0)
        await holds(reader, 1, PROMPT)
        with pytest.raises(ValueError, match="event_id 0 must be at least 1"):
            events.publish_removed([1], event_id=0)
        assert events.publish_stored(PROMPT[4:8], [4], [2], parent_hash=1, event_id=5) == 5
        status = await reader.client.until(lambda s: s.last_event_id == 5)
        assert (status.epoch, status.state) == (7, indexer_pb2.SOURCE_STATE_INCOMPLETE)
        assert events.status.history_incomplete
        # The block before is not vouched for, but can still be named.
        assert await reader.client.overlap(PROMPT) == 0
        with pytest.raises(ValueError, match="epoch 7 must be above 7"):
            events.restart(epoch=7)
        events.restart()
        assert events.status.epoch > 7
        assert events.publish_stored(PROMPT, [4, 4, 4], [1, 2, 3]) == 0
        await holds(reader, 3, PROMPT)
        status = await reader.client.until_applied(0)
        assert (status.epoch, status.state) == (events.status.epoch, indexer_pb2.SOURCE_STATE_LIVE)


async def test_an_engine_that_restarted_is_known_to_be_empty_before_it_says_anything(world: World) -> None:
    async with world.indexer() as reader:
        first = world.publisher(lease_seconds=60)
        await first.open()
        first.publish_stored(PROMPT, [4, 4, 4], [1, 2, 3])
        await holds(reader, 3, PROMPT)
        # Its process dies: nothing is said, the lease runs on.
        for task in first._tasks:
            task.cancel()
        async with world.publisher() as second:
            assert second.status.epoch > first.status.epoch
            await holds(reader, 0, PROMPT)
        await first.close(timeout=0.1)


async def test_two_ranks_of_a_worker_have_a_publisher_each(world: World) -> None:
    async with world.indexer() as reader, world.publisher(dp_size=2) as first:
        async with world.publisher(dp_size=2, dp_rank=1) as second:
            first.publish_stored(PROMPT[:4], [4], [1])
            second.publish_stored(PROMPT, [4, 4, 4], [1, 2, 3])
            await holds(reader, 1, PROMPT)
            await holds(reader, 3, PROMPT, dp_rank=1)
        # One that ends does not take the other's registration with it.
        first.publish_removed([1])
        await holds(reader, 0, PROMPT)


async def test_threads_may_publish_together(world: World) -> None:
    async with world.indexer() as reader:
        with world.publisher().in_thread() as events:

            def store(first: int) -> None:
                for number in range(first, first + 30):
                    events.publish_stored([number] * 4, [4], [number])

            threads = [threading.Thread(target=store, args=(first,)) for first in (0, 100, 200)]
            for thread in threads:
                thread.start()
            status = await reader_has(reader, 89)
            for thread in threads:
                thread.join()
            assert (status.blocks, status.malformed) == (90, 0)
            with pytest.raises(ValueError, match="1 num_block_tokens for 2 block_hashes"):
                events.publish_stored([1] * 4, [4], [1, 2])
            # The indexer runs on this thread's loop; what must be acknowledged by it is waited for elsewhere.
            assert await in_background(lambda: events.flush(FLUSH_SECONDS))
            assert (events.status.last_event_id, events.status.dropped) == (89, 0)
            await in_background(events.close)
        with pytest.raises(ValueError, match="not open"):
            events.publish_cleared()


async def reader_has(reader: Reader, event_id: int) -> indexer_pb2.SourceStatus:
    async def status() -> indexer_pb2.SourceStatus | None:
        try:
            found = await reader.client.status()
        except (StopIteration, RuntimeError):
            return None
        return found if found.last_event_id == event_id else None

    found: indexer_pb2.SourceStatus = await eventually(status, what=f"event {event_id}")
    return found


async def known(reader: Reader) -> None:
    """Waits until the worker is registered."""

    async def listed() -> bool:
        return bool((await reader.client.rpc("ListWorkers", workers_pb2.ListWorkersRequest())).workers)

    await eventually(listed, what="a registration")


async def in_background(function: Any) -> Any:
    return await asyncio.to_thread(function)


async def test_an_indexer_that_forgot_the_worker_is_told_again_and_draining_is_kept() -> None:
    async with world_of("grpc") as world, world.publishing() as events:
        truth = Truth(events, seed=SEED)
        truth.step()
        async with world.indexer() as reader:
            await reader.equals(truth.dump())
            await reader.client.rpc("DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="w"))
            await reader.client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w"))
            await reader.equals(truth.dump())
            assert (
                not (await reader.client.rpc("ListWorkers", workers_pb2.ListWorkersRequest()))
                .workers[0]
                .worker.draining
            )
            await reader.client.rpc("DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="w"))
            async with world.publisher(epoch=2**50):
                await reader.client.until(lambda s: s.epoch == 2**50)
                worker = (await reader.client.rpc("ListWorkers", workers_pb2.ListWorkersRequest())).workers[0].worker
                assert worker.draining
                # The older publisher is told that it is none any more.
                await eventually(lambda: newer(events), what="a problem")


@pytest.mark.parametrize("transport", ["nats-core", "jetstream", "grpc"])
async def test_a_state_of_many_messages_is_whole_while_more_is_published(transport: str) -> None:
    async with world_of(transport) as world, world.publishing() as events:
        truth = Truth(events, seed=SEED)
        for number in range(40):
            first = 1_000_000 + number * 1000
            truth.stored(list(range(4 * first, 4 * first + 4000)), list(range(first, first + 1000)), None)
        async with world.indexer() as reader:
            while events.status.states < 2 and truth.last < 2000:
                truth.step()
                await asyncio.sleep(0)
            await reader.equals(truth.dump())


async def newer(events: KvEventPublisher) -> bool:
    return "newer than ours" in events.status.problem or "took over" in events.status.problem


async def test_a_worker_is_deregistered_when_its_publisher_closes(world: World) -> None:
    async with world.indexer() as reader:
        async with world.publisher(lease_seconds=60) as events:
            events.publish_stored(PROMPT, [4, 4, 4], [1, 2, 3])
            await holds(reader, 3, PROMPT)

        async def gone() -> bool:
            return not (await reader.client.rpc("ListWorkers", workers_pb2.ListWorkersRequest())).workers

        await eventually(gone, what="no registration")
        with pytest.raises(ValueError, match="not open"):
            events.publish_cleared()


async def test_nothing_has_arrived_while_the_worker_is_not_registered() -> None:
    async with world_of("nats-core") as world, world.indexer() as reader:
        async with world.publisher() as events:
            events.publish_cleared()
            assert await events.flush(FLUSH_SECONDS)
            await known(reader)
            await reader.client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w"))
            await eventually(lambda: "somebody removed it" in events.status.problem, what="a problem")
            with pytest.raises(FailedPrecondition, match="somebody removed it"):
                await events.flush()


async def test_whoever_waits_for_a_flush_is_told_of_the_end() -> None:
    async with world_of("grpc") as world:
        events = await world.publisher().open()
        events.publish_cleared()
        assert not await events.flush(0.01)
        waiting = asyncio.create_task(events.flush())
        await asyncio.sleep(0)
        await events.close(timeout=0.01)
        with pytest.raises(Cancelled):
            await waiting


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transport": "zmq"}, "transport 'zmq' is not one of nats-core, jetstream, grpc"),
        ({"transport": "grpc"}, "indexers must be given"),
        ({"indexers": ["a:1"]}, "indexers must be given for transport grpc, and only for it"),
        ({"dp_rank": 1}, "dp_rank 1 must be between 0 and dp_size - 1"),
        ({"max_buffered_bytes": 0}, "max_buffered_bytes"),
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"epoch": 0}, "epoch 0"),
        ({"copies": "some"}, "copies 'some'"),
        ({"nats_servers": []}, "nats_servers"),
    ],
)
def test_arguments_that_make_no_sense_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvEventPublisher(**{"worker_id": "w", "model": "m", "block_size": 4, **fields})


def test_a_worker_that_cannot_be_is_named() -> None:
    with pytest.raises(InvalidArgument, match="block_size"):
        KvEventPublisher(worker_id="w", model="m", block_size=0)
    with pytest.raises(InvalidArgument, match="nats_server"):
        KvEventPublisher(worker_id="w", model="m", block_size=4, nats_servers=["localhost"])


def test_events_that_make_no_sense_are_named() -> None:
    given: dict[str, Any] = {"block_size": 4, "lora_name": None, "medium": None, "cache_salt": None, "mm_items": ()}
    with pytest.raises(ValueError, match="medium 'TAPE' is unknown"):
        stored_events([1] * 4, [4], [1], None, **{**given, "medium": "TAPE"})
    with pytest.raises(ValueError, match="mm_items of 2 blocks for 1 block_hashes"):
        stored_events([1] * 4, [4], [1], None, **{**given, "mm_items": (("a",), ())})
    with pytest.raises(ValueError, match="not a 64-bit hash"):
        removed_events([2**64], medium=None)
