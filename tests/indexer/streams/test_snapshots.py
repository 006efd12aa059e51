"""Snapshots: their bytes, and what an object store that loses some of them does."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from nats.js.api import ObjectMeta
from support.stream_world import BUCKET, World, stream_world

from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError
from kvscout_common.shards import WHOLE, Shard
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams import snapshots as snapshots_module
from kvscout_indexer.streams.position import SnapshotId
from kvscout_indexer.streams.snapshot import (
    MAX_MESSAGE_BYTES,
    Snapshot,
    SnapshotDecoder,
    SourceCut,
    decode_positions,
    encode,
    header_bytes,
)
from kvscout_indexer.streams.snapshots import SnapshotBroken, Snapshots

INCARNATION = 1_700_000_000_000_000


def snapshot(sequence: int = 7, payload: bytes = b"chunk") -> Snapshot:
    cuts = [
        SourceCut(WorkerRank("a", 0), sequence, (payload, b"", payload * 2)),
        SourceCut(WorkerRank("b", 3), sequence + 2, (payload,), unverified=True),
    ]
    return Snapshot(SnapshotId(INCARNATION, sequence), 1000.25, cuts)


def decode(data: bytes, chunk: int = 1_000) -> list[SourceCut]:
    """Return the sources of a snapshot that comes in chunks."""
    decoder, cuts = SnapshotDecoder(), []
    for at in range(0, len(data), chunk):
        cuts += decoder.feed(data[at : at + chunk])
    decoder.end()
    return cuts


async def read(store: Snapshots, one: SnapshotId) -> list[SourceCut]:
    return [cut async for cut in store.read(one)]


@pytest.mark.parametrize("chunk", [1, 2, 7, 1_000])
def test_a_snapshot_is_read_as_it_was_written_wherever_it_is_cut(chunk: int) -> None:
    assert decode(b"".join(encode(snapshot())), chunk) == snapshot().sources


def test_a_message_above_the_limit_is_refused_before_it_comes() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        SnapshotDecoder().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


def test_messages_of_no_source_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="more messages than its sources"):
        decode(b"".join(encode(snapshot())) + bytes(4))


def test_the_header_has_the_positions_of_the_sources() -> None:
    data = b"".join(encode(snapshot()))
    assert decode_positions(data[: header_bytes(data)]) == {WorkerRank("a", 0): 7, WorkerRank("b", 3): 9}


def test_every_snapshot_that_was_cut_short_is_refused() -> None:
    data = b"".join(encode(snapshot()))
    for length in range(len(data)):
        with pytest.raises(KvscoutError):
            decode(data[:length])


def test_a_version_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscout_indexer.streams.snapshot.VERSION", 3)
    data = b"".join(encode(snapshot()))
    monkeypatch.undo()
    with pytest.raises(FailedPrecondition):
        decode(data)
    with pytest.raises(InvalidArgument):
        decode(b"\x02\x00\x00\x00\xff\xff")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with stream_world() as started:
        yield started


@pytest.fixture
def store(world: World) -> Snapshots:
    return Snapshots(world.js, BUCKET, WHOLE)


async def test_an_empty_store_has_none(store: Snapshots) -> None:
    assert await store.complete() == {WHOLE: []}
    with pytest.raises(SnapshotBroken):
        await read(store, SnapshotId(INCARNATION, 1))
    await store.clear()


async def test_a_snapshot_of_many_chunks_is_stored_and_read(store: Snapshots) -> None:
    large = snapshot(payload=bytes(range(256)) * 4096)
    size = await store.write(large)
    assert size == len(b"".join(encode(large))) > 4 * snapshots_module.CHUNK_BYTES
    assert await store.complete() == {WHOLE: [large.id]}
    assert await read(store, large.id) == large.sources


async def test_a_snapshot_is_never_written_over(store: Snapshots) -> None:
    await store.write(snapshot(payload=b"first"))
    await store.write(snapshot(payload=b"second"))
    assert await read(store, snapshot().id) == snapshot(payload=b"first").sources


async def test_dropped_snapshots_leave_no_trace(world: World, store: Snapshots) -> None:
    ids = [snapshot(sequence).id for sequence in (3, 5)]
    for each in (3, 5):
        await store.write(snapshot(each))
    await store.drop(WHOLE, [ids[0], SnapshotId(INCARNATION, 99)])
    assert await store.complete() == {WHOLE: [ids[1]]}
    await store.drop(WHOLE, [ids[1]])
    assert (await world.js.stream_info(f"OBJ_{BUCKET}")).state.messages == 0


async def test_a_snapshot_whose_content_was_lost_or_changed_is_broken(world: World, store: Snapshots) -> None:
    await store.write(snapshot())
    objects = await world.js.object_store(BUCKET)
    (info,) = await objects.list()
    content = f"$O.{BUCKET}.C.{info.nuid}"
    await world.js.purge_stream(f"OBJ_{BUCKET}", subject=content)
    with pytest.raises(SnapshotBroken):
        await read(store, snapshot().id)
    await world.js.publish(content, bytes(info.size or 0))
    with pytest.raises(SnapshotBroken):
        await read(store, snapshot().id)


async def test_what_a_broken_upload_left_is_swept_up_later(world: World, store: Snapshots) -> None:
    await store.write(snapshot())
    await world.js.publish(f"$O.{BUCKET}.C.abandoned", b"half a snapshot")
    assert await store.sweep(time.time()) == 0
    assert await store.sweep(time.time() + snapshots_module.SWEEP_AFTER_SECONDS + 1) == 1
    assert await read(store, snapshot().id) == snapshot().sources


async def test_shards_have_snapshots_of_their_own(world: World) -> None:
    halves = [Shard(0, 2), Shard(1, 2)]
    stores = [Snapshots(world.js, BUCKET, half) for half in halves]
    await stores[0].write(snapshot(4))
    await stores[1].write(snapshot(6))
    expected = {halves[0]: [snapshot(4).id], halves[1]: [snapshot(6).id]}
    assert await stores[0].complete() == await stores[1].complete() == expected
    whole = Snapshots(world.js, BUCKET, WHOLE)
    assert await whole.complete() == {WHOLE: [], **expected}
    with pytest.raises(SnapshotBroken):
        await read(whole, snapshot(4).id)
    await whole.drop(halves[0], [snapshot(4).id])
    assert await whole.complete() == {WHOLE: [], halves[1]: [snapshot(6).id]}


async def test_objects_of_others_are_left_alone(world: World, store: Snapshots) -> None:
    await store.write(snapshot())
    objects = await world.js.object_store(BUCKET)
    await objects.put("notes", b"of an operator", meta=ObjectMeta(name="notes"))
    assert await store.complete() == {WHOLE: [snapshot().id]}


async def test_a_snapshot_that_is_not_kept_while_it_is_verified_is_read_once_more(
    store: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = snapshot(payload=bytes(range(256)) * 4096)
    await store.write(large)
    monkeypatch.setattr(snapshots_module, "KEPT_BYTES", 0)
    assert await read(store, large.id) == large.sources


async def test_a_snapshot_that_nobody_could_read_is_not_written(
    store: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "MAX_SNAPSHOT_BYTES", 10)
    with pytest.raises(SnapshotBroken, match="divide the workers with --shard"):
        await store.write(snapshot())
    assert await store.complete() == {WHOLE: []}


async def test_a_snapshot_that_cannot_be_read_back_does_not_stay(
    world: World, store: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = store._put

    async def losing(name: str, one: Snapshot) -> int:
        size = await put(name, one)
        (info,) = await (await world.js.object_store(BUCKET)).list()
        await world.js.purge_stream(f"OBJ_{BUCKET}", subject=f"$O.{BUCKET}.C.{info.nuid}")
        return size

    monkeypatch.setattr(store, "_put", losing)
    with pytest.raises(SnapshotBroken):
        await store.write(snapshot())
    assert await store.complete() == {WHOLE: []}


async def test_reading_takes_no_more_memory_for_ten_times_the_sources(
    store: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "KEPT_BYTES", 0)
    peaks = []
    for count in (10, 100):
        cuts = [SourceCut(WorkerRank("w", rank), count, (bytes(1 << 18),)) for rank in range(count)]
        one = Snapshot(SnapshotId(INCARNATION, count), 0.0, cuts)
        await store.write(one)
        tracemalloc.start()
        read_bytes = 0
        async for cut in store.read(one.id):
            read_bytes += len(cut.messages[0])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert read_bytes == count << 18
    assert peaks[1] <= 2 * peaks[0]
