"""The native codec writes the reference's bytes and reads them back; both refuse the same damage."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.seeds import test_seed

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.codec import DumpReader, encode_dump
from kvscout_blocks.bytes.events import EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError, NotFound
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: there is no other backend")

SEED = test_seed()
POOL = PoolKey("model", "tenant", 4, False)
WORKER = WorkerRank("worker", 2)


def filled(rng: random.Random, events: int) -> NativeIndex:
    """An index whose worker has chains, copies, tiers, holes, groups and orphans."""
    index = NativeIndex(4)
    index.add_worker(WORKER, WorkerOptions())
    known = [0]
    for event_id in range(events):
        length = rng.randrange(1, 8)
        hashes = tuple(rng.getrandbits(64) for _ in range(length))
        parent = rng.choice([None, rng.choice(known), rng.choice(known), rng.getrandbits(64)])
        tokens = tuple(rng.randrange(3) for _ in range(4 * length))
        tier, group = rng.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK]), rng.choice([0, 0, 0, 3])
        stored = Stored(hashes, parent, tokens, 4, tier, group)
        repeats = [stored] * rng.choice([1, 1, 1, 4])
        if rng.random() < 0.3:
            repeats.append(replace(stored, group=5, full_attention=False, window=9))
        removed = Removed((rng.choice(known),), tier, group)
        index.apply(WORKER, EventBatch((*repeats, removed)), epoch=7, event_id=event_id)
        known.extend(hashes)
    return index


def messages_of(index: NativeIndex, history_incomplete: bool = False) -> list[bytes]:
    cut = index.cut(WORKER)
    messages = cut.messages(POOL, history_incomplete=history_incomplete) if cut is not None else None
    assert messages is not None
    return messages


@pytest.mark.parametrize("round_", range(20))
def test_both_write_the_same_bytes_and_each_reads_them(round_: int) -> None:
    rng = random.Random(SEED + round_)
    source = filled(rng, rng.choice([0, 1, 30, 400]))
    dump = source.dump(WORKER)
    assert dump is not None
    incomplete = rng.random() < 0.5
    native = messages_of(source, incomplete)
    reference = [m.SerializeToString() for m in encode_dump(POOL, dump, history_incomplete=incomplete)]
    assert native == reference, f"KVSCOUT_TEST_SEED={SEED}"
    reader = DumpReader()
    read = [reader.feed(events_pb2.KvEventBatch.FromString(message)) for message in native][-1]
    assert read is not None
    assert (read.dump, read.pool, read.history_incomplete) == (dump, POOL, incomplete), f"KVSCOUT_TEST_SEED={SEED}"
    loaded = NativeIndex(4)
    loaded.add_worker(WORKER, WorkerOptions())
    loaded.load_messages(reference)
    assert loaded.dump(WORKER) == dump, f"KVSCOUT_TEST_SEED={SEED}"


@pytest.mark.slow
def test_large_states_are_cut_at_the_same_blocks() -> None:
    source = NativeIndex(4)
    source.add_worker(WORKER, WorkerOptions())
    hashes = tuple(range(1, 60_001))
    source.apply(WORKER, EventBatch((Stored(hashes, None, tuple(range(240_000)), 4),)))
    dump = source.dump(WORKER)
    assert dump is not None
    native = messages_of(source)
    assert native == [m.SerializeToString() for m in encode_dump(POOL, dump)]
    assert len(native) > 1
    assert max(map(len, native)) <= 512 * 1024


def damage(rng: random.Random, message: bytes) -> bytes:
    data = bytearray(message)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data))
        choice = rng.randrange(3)
        if choice == 0:
            data[place] = rng.randrange(256)
        elif choice == 1:
            del data[place : place + rng.randrange(1, 9)]
        else:
            data[place:place] = rng.randbytes(rng.randrange(1, 5))
        if not data:
            return b"\0"
    return bytes(data)


def outcome(load: Callable[[], object]) -> str:
    try:
        load()
    except KvscoutError as error:
        return type(error).__name__
    return "loaded"


@pytest.mark.slow
def test_damaged_messages_never_crash_and_change_nothing_when_refused() -> None:
    rng = random.Random(SEED)
    source = filled(rng, 30)
    messages = messages_of(source)
    target = NativeIndex(4)
    target.add_worker(WORKER, WorkerOptions())
    refused = 0
    for _ in range(3000):
        before = target.dump(WORKER)
        damaged = damage(rng, messages[0])
        what = outcome(lambda damaged=damaged: target.load_messages([damaged]))  # type: ignore[misc]
        if what != "loaded":
            refused += 1
            assert target.dump(WORKER) == before, f"KVSCOUT_TEST_SEED={SEED}"
    target.check_invariants()
    assert refused > 1000


def test_what_is_no_dump_is_refused_with_the_field() -> None:
    source = filled(random.Random(1), 5)
    messages = messages_of(source)
    batch = events_pb2.KvEventBatch.FromString(messages[0])
    target = NativeIndex(4)
    with pytest.raises(NotFound, match="worker rank 2 is not known"):
        target.load_messages(messages)
    target.add_worker(WORKER, WorkerOptions())
    with pytest.raises(InvalidArgument, match="last message is missing"):
        target.load_messages([])
    with pytest.raises(InvalidArgument, match="after the last one"):
        target.load_messages([*messages, *messages])
    batch.version = 2
    with pytest.raises(FailedPrecondition, match="version 2"):
        target.load_messages([batch.SerializeToString()])
    batch.version = 1
    batch.events[0].state.index = 3
    with pytest.raises(InvalidArgument, match="chunk 3 where 0 comes next"):
        target.load_messages([batch.SerializeToString()])
