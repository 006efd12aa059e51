"""One replica on a real stream: where it begins, what it keeps, and what it does when the stream changes below it."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import nats.errors
import pytest
from nats.js.errors import NotFoundError
from support.indexer_client import MODEL, IndexerClient, local_indexer
from support.processes import eventually
from support.seeds import test_seed
from support.stream_world import (
    BUCKET,
    CLEARED,
    NAMES,
    RESET,
    STREAM,
    TENANT,
    Publisher,
    World,
    overlap,
    register,
    removed,
    state_events,
    stored,
    stream_world,
    unregister,
    until,
    until_overlap,
)

from kvscout.v1 import bridge_pb2, indexer_pb2
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_blocks.source.recovery import RecoveryService, serve_recovery
from kvscout_common.registry import nats as registry_nats
from kvscout_common.shards import WHOLE, Shard
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.feeds import publisher_feed
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.streams import pull as stream_pull
from kvscout_indexer.streams import reader as stream_reader
from kvscout_indexer.streams import snapshotter
from kvscout_indexer.streams.jetstream import JetStream
from kvscout_indexer.streams.position import SnapshotId
from kvscout_indexer.streams.reader import StreamReader
from kvscout_indexer.streams.snapshot import Snapshot
from kvscout_indexer.streams.snapshots import Snapshots
from kvscout_indexer.streams.snapshotter import HeldLock, Snapshotter

LIVE = indexer_pb2.SOURCE_STATE_LIVE
INCOMPLETE = indexer_pb2.SOURCE_STATE_INCOMPLETE
NEVER = 1_000_000


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(registry_nats, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(stream_reader, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(stream_reader, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(snapshotter, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(snapshotter, "RETRY_SECONDS", 0.1)
    monkeypatch.setattr(publisher_feed, "UNANSWERED", 1)
    async with stream_world() as started:
        yield started


def config(world: World, **fields: object) -> IndexerConfig:
    return replace(IndexerConfig(nats=world.config, snapshot_threshold=NEVER), **fields)  # type: ignore[arg-type]


def jetstream(indexer: Indexer) -> JetStream:
    assert indexer.jetstream is not None
    return indexer.jetstream


def reader(indexer: Indexer) -> StreamReader:
    return jetstream(indexer).readers[TENANT, MODEL]


def taker(indexer: Indexer) -> Snapshotter:
    return jetstream(indexer).snapshotters[TENANT, MODEL]


async def snapshot(indexer: Indexer) -> int:
    """Has a snapshot taken now; returns its S."""
    await taker(indexer)._take()
    return reader(indexer).schedule.covered


async def dump(client: IndexerClient, indexer: Indexer, worker_id: str = "w") -> list[bytes]:
    spec = indexer.registry.get(TENANT, worker_id).spec
    return [message for rank in spec.ranks for message in await indexer.dump_messages(spec, rank)]


async def test_a_new_replica_reads_the_stream_from_its_first_message(world: World) -> None:
    w = world.publisher()
    await w.grow(5)
    async with local_indexer(config(world)) as (client, _):
        await register(client)
        await until_overlap(client, 5)
        await w.grow(2)
        await w.publish(removed([7]))
        await until_overlap(client, 6)
        assert (await client.status()).state == LIVE


async def test_a_request_that_was_filled_is_followed_by_the_next_without_a_break(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    w = world.publisher()
    async with local_indexer(config(world)) as (client, _):
        await register(client)
        for number in range(3 * stream_pull.BATCH):
            await w.publish(stored([number + 1]))
        await client.until_applied(3 * stream_pull.BATCH - 1)
    assert not [record for record in caplog.records if "the server says" in record.getMessage()]


async def test_events_before_registration_count_once_the_worker_is_registered(world: World) -> None:
    w, other = world.publisher(), world.publisher("other")
    async with local_indexer(config(world)) as (client, indexer):
        await w.grow(4)
        last = await other.grow(1)
        await until(lambda: position(indexer), last)
        await register(client, "other")
        await until_overlap(client, 1, "other")
        assert await overlap(client, 4, "w") == 0
        await register(client)
        await until_overlap(client, 4)


async def position(indexer: Indexer) -> int:
    found = jetstream(indexer).readers.get((TENANT, MODEL))
    return found.position if found is not None else -1


async def test_a_worker_that_comes_back_has_what_its_engine_still_holds(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(3)
        await until_overlap(client, 3)
        await unregister(client)
        assert await overlap(client, 3) == 0
        last = await w.publish(removed([3]))
        await until(lambda: position(indexer), last)
        await register(client)
        await until_overlap(client, 2)
        assert (await client.status()).last_event_id == 3


async def test_a_replica_begins_after_the_newest_snapshot_whatever_was_acknowledged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscout_indexer.streams.jetstream.replica_name", lambda: "replica")
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(4)
        await until_overlap(client, 4)
        await until(lambda: snapshot(indexer), 4)  # a block is found a moment before its message is done
        await w.publish(removed([4]))
        last = await w.grow(0) or (await world.js.stream_info(STREAM)).state.last_seq
        await until(lambda: acknowledged(world, "replica"), last)
        monkeypatch.setattr(StreamReader, "leave", _stays)  # it is killed
        before = await dump(client, indexer)
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await until_overlap(client, 3)
        assert await dump(client, indexer) == before


async def _stays(_: StreamReader) -> None:
    """Nothing is said."""


async def acknowledged(world: World, consumer: str) -> int:
    info = await world.js.consumer_info(STREAM, consumer)
    assert info.ack_floor is not None
    return int(info.ack_floor.stream_seq)


async def test_what_is_purged_is_in_both_snapshots_that_are_kept(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world, snapshot_threshold=4)) as (client, indexer):
        await register(client)
        for done in (4, 8, 12):
            await w.grow(4)
            await until(world.snapshots, [done - 4, done] if done > 4 else [4])
        await until(world.first_sequence, 9)
        await w.publish(CLEARED)
        await w.publish(stored([1, 2]))
        await until_overlap(client, 2)
        before = await dump(client, indexer)
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await until_overlap(client, 2)
        assert await dump(client, indexer) == before


async def test_snapshots_of_a_former_number_of_shards_are_dropped(world: World) -> None:
    w = world.publisher()
    bucket = NAMES.snapshots_bucket(TENANT, MODEL)
    whole, *halves = [Snapshots(world.js, bucket, shard) for shard in (WHOLE, Shard(0, 2), Shard(1, 2))]
    async with local_indexer(config(world, snapshot_threshold=4)) as (client, _):
        await register(client)
        await w.grow(4)
        await until(world.snapshots, [4])
        [(incarnation, _)] = (await whole.complete())[WHOLE]
        for sequence, half in ((2, halves[0]), (4, halves[1]), (20, halves[1])):
            await half.write(Snapshot(SnapshotId(incarnation, sequence), 0.0, ()))
        await w.grow(4)
        await until(world.first_sequence, 5)

        async def left() -> list[int]:
            return [each.sequence for half in (0, 1) for each in (await halves[0].complete())[Shard(half, 2)]]

        await until(left, [20])
        assert (await whole.complete())[WHOLE] == [SnapshotId(incarnation, each) for each in (4, 8)]


async def test_a_snapshot_comes_before_events_are_old(world: World) -> None:
    w = world.publisher()
    # What the indexer was told is for streams that it makes.
    await world.js.update_stream(name=STREAM, subjects=[NAMES.stream_subjects(TENANT, MODEL)], max_age=2.0)
    async with local_indexer(config(world)) as (client, _):
        await register(client)
        await w.grow(3)
        await until(world.snapshots, [3])


async def test_a_worker_whose_name_is_too_long_for_nats_is_listed_and_not_read(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        indexer.registry.register(replace(indexer.registry.get(TENANT, "w").spec, worker_id="x" * 256))
        assert (await client.status("x" * 256)).state != LIVE
        await w.grow(1)
        await until_overlap(client, 1)


async def test_a_replica_that_is_overtaken_by_a_purge_loads_the_newest_snapshot(world: World) -> None:
    w, silent = world.publisher(), world.publisher("silent")
    async with local_indexer(config(world)) as (fast, ahead), local_indexer(config(world)) as (slow, behind):
        for client in (fast, slow):
            await register(client)
            await register(client, "silent")
        await w.grow(2)
        await silent.grow(2)
        await until_overlap(slow, 2)
        await until_overlap(slow, 2, "silent")
        async with reader(behind).sources.delivery:
            await silent.grow(1)
            for _ in range(2):
                await w.grow(300)
                await until_overlap(fast, w.blocks)
                await snapshot(ahead)
            assert await world.first_sequence() > reader(behind).position + 300
            await w.publish(removed([w.blocks]))
        await until_overlap(slow, w.blocks - 1)
        await until_overlap(slow, 3, "silent")
        await until_overlap(fast, w.blocks - 1)
        assert reader(behind).reloads == 1
        for worker_id in ("w", "silent"):
            assert await dump(slow, behind, worker_id) == await dump(fast, ahead, worker_id)
            assert (await slow.status(worker_id)).state == LIVE


async def test_a_purge_beyond_the_position_that_no_snapshot_covers_is_reported(world: World) -> None:
    w, silent = world.publisher(), world.publisher("silent")
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await register(client, "silent")
        await silent.grow(1)
        await w.grow(2)
        await until_overlap(client, 2)
        async with reader(indexer).sources.delivery:
            await w.grow(600)  # more than a reader has asked for
            await world.js.purge_stream(STREAM)
        for worker_id in ("w", "silent"):
            await client.until(lambda s: s.state == INCOMPLETE, worker_id)
        await w.publish(CLEARED)
        await w.publish(stored([1, 2, 3]))
        await until_overlap(client, 3)
        assert (await client.status()).state == LIVE


async def test_a_consumer_that_an_operator_deletes_is_made_again(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, _):
        await register(client)
        await w.grow(2)
        await until_overlap(client, 2)
        (consumer,) = await world.consumers()
        await world.js.delete_consumer(STREAM, consumer)
        await w.grow(3)
        await until_overlap(client, 5)
        assert (await client.status()).gaps == 0
        await until(world.consumers, [consumer])


async def test_a_replica_that_stops_takes_its_consumer_along(world: World) -> None:
    async with local_indexer(config(world)) as (client, _):
        await register(client)
        await until(lambda: number_of_consumers(world), 1)
    assert await world.consumers() == []


async def number_of_consumers(world: World) -> int:
    return len(await world.consumers())


async def test_a_stream_that_is_deleted_is_made_again_and_read_from_its_beginning(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(5)
        await until_overlap(client, 5)
        await snapshot(indexer)
        await world.js.delete_stream(STREAM)
        await until(lambda: exists(world), True)
        # Whether something was lost nobody can say: there is no publisher to ask.
        await client.until(lambda s: s.state == INCOMPLETE)
        await w.publish(CLEARED)
        await w.publish(stored([1, 2]))
        await until_overlap(client, 2)
        assert await position(indexer) == 2
        assert (await client.status()).state == LIVE
        await snapshot(indexer)
        before = await dump(client, indexer)
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await until_overlap(client, 2)
        assert await dump(client, indexer) == before


async def exists(world: World) -> bool:
    try:
        await world.js.stream_info(STREAM)
    except NotFoundError:
        return False
    return True


async def test_a_restart_of_nats_with_its_store_loses_nothing(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, _):
        await register(client)
        await w.grow(3)
        await until_overlap(client, 3)
        await world.server.kill()
        await world.server.start()
        await until(lambda: published(w), True)
        await until_overlap(client, 4)
        status = await client.status()
        assert (status.state, status.gaps, status.demotions) == (LIVE, 0, 0)


async def published(w: Publisher) -> bool:
    """Publishes one block more, once the server is back."""
    try:
        await w.grow(1)
    except (nats.errors.Error, TimeoutError, OSError):
        w.blocks, w.next_id = w.blocks - 1, w.next_id - 1
        return False
    return True


async def test_a_restart_of_nats_without_its_store_is_noticed(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(3)
        await until_overlap(client, 3)
        await world.server.kill()
        shutil.rmtree(world.server.store)
        world.server.store.mkdir()
        await world.server.start()
        await client.until(lambda s: s.state == INCOMPLETE)
        await until(lambda: published(w), True)
        await client.until(lambda s: s.last_event_id == w.next_id - 1)
        assert reader(indexer).reloads == 1


async def test_messages_that_cannot_be_read_cost_themselves_only(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(2)
        await world.js.publish(w.subject, b"\xff\xff")
        unread = w.message(stored([77]), event_id=2)
        unread.version = 9
        await world.js.publish(w.subject, unread.SerializeToString())
        await world.js.publish(w.subject.rpartition(".")[0] + ".x", b"")
        last = await w.grow(1)
        await until_overlap(client, 3)
        status = await client.status()
        assert (status.malformed, status.gaps, status.state) == (2, 0, LIVE)
        await until(lambda: position(indexer), last)
        assert reader(indexer).sources.ignored == 1


@pytest.mark.parametrize("batch_bytes", [4 * 1024 * 1024, 100_000])
async def test_large_messages_are_read_a_few_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(stream_pull, "BATCH_BYTES", batch_bytes)
    w = world.publisher()
    for event_id in range(10):
        large = w.message(stored(range(event_id * 30_000 + 1, (event_id + 1) * 30_000 + 1), event_id * 30_000 or None))
        await w.send(large.SerializeToString(), event_id)
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await client.until_applied(9)
        assert (await client.status()).blocks == 10 * 30_000
        assert reader(indexer).reloads == 0


async def test_a_defect_met_in_a_message_ends_nothing_and_is_not_met_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world.publisher()
    receive = publisher_feed.PublisherFeed.receive

    def defective(self: publisher_feed.PublisherFeed, message: bytes) -> None:
        if message == poison:
            raise RuntimeError("a defect of ours")
        receive(self, message)

    monkeypatch.setattr(publisher_feed.PublisherFeed, "receive", defective)
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(2)
        poison = w.message(stored([3], 2)).SerializeToString()
        await w.send(poison, 2)
        last = await w.publish(stored([4], 3))
        await until(lambda: position(indexer), last)
        # What it said is missing, and nobody can be asked.
        await client.until(lambda s: s.state == INCOMPLETE)
        assert (await client.status()).last_event_id == 3


async def test_a_gap_that_nobody_can_fill_is_reported_until_a_state_comes(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, _):
        await register(client)
        await w.grow(2)
        w.next_id = 10
        await w.publish(stored([3], 2))
        await client.until(lambda s: s.state == INCOMPLETE and s.last_event_id == 10)
        await w.publish_state(range(1, 8), chunks=3)
        await until_overlap(client, 7)
        assert (await client.status()).state == LIVE
        await w.publish(RESET, stored([1]))
        await until_overlap(client, 1)


async def recovery(world: World, publisher: Publisher) -> RecoveryService:
    """Answers for a publisher, with its whole state."""

    async def answer(_: bridge_pb2.RecoverRequest) -> list[bridge_pb2.RecoverResponse]:
        last_id = publisher.next_id - 1
        state = publisher.message(*state_events(range(1, publisher.blocks + 1)), event_id=last_id)
        dump = bridge_pb2.RECOVER_OUTCOME_DUMP
        return [bridge_pb2.RecoverResponse(outcome=dump, batch=state, last=True, last_event_id=last_id)]

    return await serve_recovery(world.client, NAMES.recover(TENANT, publisher.rank), answer)


async def test_what_the_stream_lost_is_requested_from_the_publisher(world: World) -> None:
    w, silent = world.publisher(), world.publisher("silent")
    services = [await recovery(world, publisher) for publisher in (w, silent)]
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await register(client, "silent")
        await w.grow(2)
        await silent.grow(1)
        await until_overlap(client, 2)
        async with reader(indexer).sources.delivery:
            await silent.grow(3)
            await w.grow(600)
            await world.js.purge_stream(STREAM)
        await w.grow(1)
        await until_overlap(client, w.blocks)
        await until_overlap(client, 4, "silent")
        for worker_id in ("w", "silent"):
            status = await client.status(worker_id)
            assert (status.state, status.demotions) == (LIVE, 0)
    for service in services:
        await service.close()


async def test_a_snapshot_amid_the_chunks_of_a_state_does_not_lose_it(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(2)
        first, *rest = await w.state(range(1, 30), chunks=3)
        last = (await world.js.publish(w.subject, first)).seq
        await until(lambda: position(indexer), last)
        assert await snapshot(indexer) == 2
        for message in rest:
            await world.js.publish(w.subject, message)
        await until_overlap(client, 29)
        before = await dump(client, indexer)
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await until_overlap(client, 29)
        assert await dump(client, indexer) == before


async def test_a_holder_of_the_lock_that_was_stopped_beyond_its_life_does_no_harm(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter, "LOCK_SECONDS", 2.0)
    monkeypatch.setattr(snapshotter, "LOOK_SECONDS", 3600)
    w = world.publisher()
    async with local_indexer(config(world)) as (one, holder), local_indexer(config(world)) as (_, other):
        await register(one)
        await w.grow(5)
        await until_overlap(one, 5)
        await until(lambda: position(other), 5)
        for indexer in (holder, other):
            monkeypatch.setattr(taker(indexer), "_due", lambda: True)
        stopped, resumed = asyncio.Event(), asyncio.Event()
        write = reader(holder).snapshots.write

        async def stop(cut: Snapshot) -> int:
            stopped.set()
            await resumed.wait()
            return await write(cut)

        monkeypatch.setattr(reader(holder).snapshots, "write", stop)
        # What is stopped does not renew its lock either.
        monkeypatch.setattr(HeldLock, "renew", AsyncMock())
        taking = asyncio.create_task(taker(holder).take())
        await stopped.wait()
        assert not await taker(other).take(), "the lock is held"
        await until(taker(other).take, True)
        last = await w.grow(5)
        await until(lambda: position(other), last)
        assert await taker(other).take()
        assert await world.snapshots() == [5, 10]
        last = await w.grow(5)
        await until(lambda: position(other), last)
        assert await taker(other).take()
        assert (await world.snapshots(), await world.first_sequence()) == ([10, 15], 11)
        resumed.set()
        assert await taking
        assert (await world.snapshots(), await world.first_sequence()) == ([10, 15], 11)
        before = await dump(one, holder)
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await until_overlap(client, 15)
        assert await dump(client, indexer) == before


async def test_a_worker_that_registers_late_is_read_from_the_snapshot_of_a_trimmed_stream(world: World) -> None:
    w, other = world.publisher(), world.publisher("other")
    async with local_indexer(config(world)) as (ahead, indexer), local_indexer(config(world)) as (behind, late):
        await register(behind, "other")
        for worker_id in ("w", "other"):
            await register(ahead, worker_id)
        for _ in range(2):
            await w.grow(3)
            await other.grow(3)
            await until_overlap(ahead, w.blocks)
            await until_overlap(ahead, other.blocks, "other")
            await snapshot(indexer)
        last = await w.publish(removed([w.blocks]))
        assert await world.first_sequence() > 1
        await until(lambda: position(late), last)
        await register(behind)
        await until_overlap(behind, w.blocks - 1)
        await until_overlap(ahead, w.blocks - 1)
        status = await behind.status()
        assert (status.state, status.gaps, status.demotions, status.last_event_id) == (LIVE, 0, 0, 6)
        assert await dump(behind, late) == await dump(ahead, indexer)
        await w.grow(1)
        await until_overlap(behind, w.blocks - 2)
        assert (await behind.status("other")).state == LIVE


async def test_a_worker_that_is_in_the_older_snapshot_alone_is_read_from_there(world: World) -> None:
    w, other = world.publisher(), world.publisher("other")
    async with local_indexer(config(world)) as (client, indexer):
        for publisher in (w, other):
            await register(client, publisher.worker_id)
            await publisher.grow(3)
            await until_overlap(client, 3, publisher.worker_id)
        await snapshot(indexer)
        await w.grow(1)
        await until_overlap(client, 4)
        await unregister(client)
        await other.grow(1)
        await until_overlap(client, 4, "other")
        await snapshot(indexer)
        assert await world.first_sequence() > 1
        await register(client)
        await until_overlap(client, 4)
        assert (await client.status()).state == LIVE


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "unanswered"])
async def test_a_worker_that_registers_late_and_is_in_no_snapshot_is_requested_from_its_publisher(
    world: World, answered: bool
) -> None:
    w, unknown = world.publisher(), world.publisher("unknown")
    async with local_indexer(config(world)) as (client, indexer), AsyncExitStack() as stack:
        await register(client)
        for _ in range(2):
            await unknown.grow(3)
            await w.grow(3)
            await until_overlap(client, w.blocks)
            await snapshot(indexer)
        assert await world.first_sequence() > 4
        if answered:
            service = await recovery(world, unknown)
            stack.push_async_callback(service.close)
        await register(client, "unknown")
        if answered:
            await until_overlap(client, 6, "unknown")
            assert (await client.status("unknown")).state == LIVE
        else:
            await client.until(lambda s: s.state == INCOMPLETE, "unknown")
            await unknown.publish(CLEARED)
            await unknown.publish(stored([1, 2]))
            await until_overlap(client, 2, "unknown")
            assert (await client.status("unknown")).state == LIVE


@pytest.mark.parametrize("step", ["_load", "_make_consumer", "state"])
async def test_a_worker_that_registers_while_another_catches_up_is_caught_up_as_well(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    w, late = world.publisher(), world.publisher("late")
    original = getattr(StreamReader, step)
    registered = False
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(3)
        await until_overlap(client, 3)
        await snapshot(indexer)
    await late.grow(4)
    async with local_indexer(config(world)) as (client, indexer):

        async def register_late(self: StreamReader, *args: Any, **kwargs: Any) -> Any:
            nonlocal registered
            result = await original(self, *args, **kwargs)
            # A consumer of the past, and the state once that was read.
            if not registered and (step == "_load" or "subjects" in kwargs or self._past is not None):
                registered = True
                await register(client, "late")
            return result

        monkeypatch.setattr(StreamReader, step, register_late)
        await register(client)
        await until_overlap(client, 3)
        await until_overlap(client, 4, "late")
        assert registered


async def test_a_snapshot_that_is_not_complete_is_passed_over(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        for _ in range(2):
            await w.grow(3)
            await until_overlap(client, w.blocks)
            await snapshot(indexer)
        before = await dump(client, indexer)
    info = await (await world.js.object_store(BUCKET)).get_info(await newest(world))
    await world.js.purge_stream(f"OBJ_{BUCKET}", subject=f"$O.{BUCKET}.C.{info.nuid}")
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await until_overlap(client, 6)
        assert await dump(client, indexer) == before


async def newest(world: World) -> str:
    infos = await (await world.js.object_store(BUCKET)).list()
    return max((info.name for info in infos), key=lambda name: int(name.split("-")[1]))


async def test_reset_states_forgets_streams_snapshots_and_consumers(world: World) -> None:
    w = world.publisher()
    async with local_indexer(config(world)) as (client, indexer):
        await register(client)
        await w.grow(4)
        await until_overlap(client, 4)
        await snapshot(indexer)
    await world.js.add_consumer(STREAM, durable_name="left")
    async with local_indexer(config(world, reset_states=True)) as (client, _):
        await register(client)

        async def forgotten() -> bool:
            return "left" not in await world.consumers() and await world.snapshots() == []

        # What is published before that goes with the rest.
        await eventually(forgotten)
        await w.publish(CLEARED)
        await w.publish(stored([1]))
        await until_overlap(client, 1)


async def test_a_replica_reads_the_workers_of_its_shard_only(world: World) -> None:
    publishers = [world.publisher(f"w{number}") for number in range(8)]
    shards = [Shard(0, 2), Shard(1, 2)]
    async with local_indexer(config(world, shard=shards[0])) as (client, indexer):
        for w in publishers:
            await register(client, w.worker_id)
            await w.grow(1)
        last = await publishers[0].grow(1)
        await until(lambda: position(indexer), last)
        ours = [w for w in publishers if shards[0].has(TENANT, w.worker_id)]
        for w in ours:
            await until_overlap(client, w.blocks, w.worker_id)
        others = [w for w in publishers if w not in ours]
        assert reader(indexer).sources.ignored == sum(w.blocks for w in others) > 0
        await snapshot(indexer)
        # The other shard has no snapshots yet: nothing may be purged.
        await w.grow(1)
        await until(lambda: position(indexer), last + 1)
        await snapshot(indexer)
        assert await world.first_sequence() == 1


async def test_replicas_that_join_at_any_time_have_the_same_state(world: World) -> None:
    chance = random.Random(test_seed())
    publishers = [world.publisher(f"w{number}") for number in range(4)]

    async def publish() -> None:
        for _ in range(150):
            w = chance.choice(publishers)
            if w.blocks > 3 and chance.random() < 0.2:
                await w.publish(removed([chance.randrange(1, w.blocks + 1)]))
            elif chance.random() < 0.03:
                w.epoch, w.next_id, w.blocks = w.epoch + 1, 0, 0
                await w.publish(RESET)
            elif w.next_id and chance.random() < 0.05:
                w.blocks = 12
                await w.publish_state(range(1, 13), chunks=3)
            else:
                await w.grow(1)

    async with AsyncExitStack() as stack:
        client, indexer = await stack.enter_async_context(local_indexer(config(world)))
        replicas = [(client, indexer)]
        for w in publishers:
            await register(client, w.worker_id)
            service = await serve_recovery(world.client, NAMES.recover(TENANT, w.rank), partial(state_of, indexer, w))
            stack.push_async_callback(service.close)
        for _ in range(3):
            client, indexer = await stack.enter_async_context(local_indexer(config(world)))
            for w in chance.sample(publishers, chance.randrange(5)):
                await register(client, w.worker_id)
            await indexer.warm()
            replicas.append((client, indexer))
            publishing = asyncio.create_task(publish())
            while not publishing.done():
                await asyncio.sleep(chance.random() / 50)
                await snapshot(chance.choice(replicas)[1])
            await publishing
        for client, _ in replicas:
            for w in publishers:
                await register(client, w.worker_id)
        last = (await world.js.stream_info(STREAM)).state.last_seq
        for client, indexer in replicas:
            await until(partial(position, indexer), last)
            for w in publishers:
                if w.next_id:
                    status = await client.until_applied(w.next_id - 1, w.worker_id)
                    assert status.state == LIVE
        for w in publishers:
            dumps = [await dump(client, indexer, w.worker_id) for client, indexer in replicas]
            assert all(each == dumps[0] for each in dumps), w.worker_id


async def state_of(
    indexer: Indexer, publisher: Publisher, _: bridge_pb2.RecoverRequest
) -> list[bridge_pb2.RecoverResponse]:
    """Answers for a publisher with the state that a replica has of it."""
    messages = await reader(indexer).sources.live[publisher.subject].feed.dump()
    return [
        bridge_pb2.RecoverResponse(
            outcome=bridge_pb2.RECOVER_OUTCOME_DUMP,
            batch=parse_batch(message),
            part=part,
            last=part + 1 == len(messages),
        )
        for part, message in enumerate(messages)
    ]
