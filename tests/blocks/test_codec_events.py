"""Events as messages: the reference reads them, the native backend reads the same, and what is wrong costs itself."""

from __future__ import annotations

import random

import pytest
from support.seeds import test_seed

from kvscout.v1 import events_pb2, types_pb2
from kvscout_blocks.bytes.codec import decode_events
from kvscout_blocks.bytes.events import FAULT_LIMIT, EventBatch, FaultKind, Removed, Stored, Tier
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

SEED = test_seed()
WORKER = WorkerRank("w", 1)


def message(*events: events_pb2.KvEvent, **fields: object) -> events_pb2.KvEventBatch:
    header: dict[str, object] = {"version": 1, "worker_id": "w", "dp_rank": 1, "model": "m", "block_size": 4}
    return events_pb2.KvEventBatch(**{**header, **fields}, events=events)  # type: ignore[arg-type]


def stored(**fields: object) -> events_pb2.KvEvent:
    return events_pb2.KvEvent(stored=events_pb2.BlocksStored(**fields))  # type: ignore[arg-type]


def test_every_field_reaches_the_event() -> None:
    full = stored(engine_hashes=[1, 2], parent_engine_hash=0, local_hashes=[3, 4], tier=2, group=5, attention_kind=1)
    removed = events_pb2.KvEvent(removed=events_pb2.BlocksRemoved(engine_hashes=[1], tier=types_pb2.TIER_DISK, group=5))
    read = decode_events(message(full, removed, epoch=7, event_id=0, tenant="t", made_unix_seconds=1.5, eagle=True))
    assert (read.worker, read.pool, read.epoch, read.event_id) == (WORKER, PoolKey("m", "t", 4, True), 7, 0)
    assert read.batch == EventBatch(
        (
            Stored((1, 2), 0, block_size=4, tier=Tier.HOST, group=5, full_attention=True, local_hashes=(3, 4)),
            Removed((1,), Tier.DISK, 5),
        ),
        1.5,
        1,
    )


def test_a_reset_comes_first_and_a_wrong_event_costs_itself() -> None:
    reset = events_pb2.KvEvent(reset=events_pb2.SourceReset())
    cleared = events_pb2.KvEvent(cleared=events_pb2.CacheCleared())
    wrong = stored(engine_hashes=[1, 2], local_hashes=[3])
    read = decode_events(message(reset, wrong, events_pb2.KvEvent(), cleared))
    assert read.reset
    assert read.batch.cleared
    assert [kind for kind, _ in read.batch.faults] == [FaultKind.BAD_EVENT, FaultKind.UNKNOWN_TAG]
    with pytest.raises(InvalidArgument, match="a reset comes first"):
        decode_events(message(cleared, reset))
    with pytest.raises(InvalidArgument, match="by themselves"):
        decode_events(message(events_pb2.KvEvent(state=events_pb2.StateChunk())))
    with pytest.raises(FailedPrecondition, match="version 9"):
        decode_events(message(version=9))


@pytest.mark.skipif(not native_available(), reason="the extension is not built: there is no other backend")
def test_both_give_up_a_message_of_nothing_but_events_of_no_kind() -> None:
    for index in (NativeIndex(4), ReferenceIndex(4)):
        some = message(*[events_pb2.KvEvent()] * FAULT_LIMIT).SerializeToString()
        assert len(index.decode_message(some).batch.faults) == FAULT_LIMIT
        many = message(*[events_pb2.KvEvent()] * (FAULT_LIMIT + 2)).SerializeToString()
        with pytest.raises(InvalidArgument, match="more than 1024"):
            index.decode_message(many)


def random_message(rng: random.Random, known: list[int]) -> events_pb2.KvEventBatch:
    events = []
    for _ in range(rng.randrange(1, 4)):
        kind = rng.randrange(12)
        if kind == 0:
            events.append(events_pb2.KvEvent(cleared=events_pb2.CacheCleared()))
        elif kind == 1:
            events.append(events_pb2.KvEvent())
        elif kind < 5:
            gone = events_pb2.BlocksRemoved(engine_hashes=[rng.choice(known)], tier=rng.choice([0, 1, 2, 4, 9]))  # type: ignore[arg-type]
            events.append(events_pb2.KvEvent(removed=gone))
        else:
            length = rng.randrange(1, 5)
            run = events_pb2.BlocksStored(
                engine_hashes=[rng.getrandbits(64) for _ in range(length)],
                local_hashes=[rng.randrange(4) for _ in range(rng.choice([length, length, length, 0, 2]))],
                tier=rng.choice([0, 1, 2, 4]),  # type: ignore[arg-type]
                group=rng.choice([0, 0, 3]),
                attention_kind=rng.choice([0, 1, 2]),  # type: ignore[arg-type]
            )
            if rng.random() < 0.6:
                run.parent_engine_hash = rng.choice(known)
            known.extend(run.engine_hashes)
            events.append(events_pb2.KvEvent(stored=run))
    return message(*events)


@pytest.mark.skipif(not native_available(), reason="the extension is not built: there is no other backend")
def test_both_read_random_messages_to_the_same_state() -> None:
    rng = random.Random(SEED)
    native, reference = NativeIndex(4), ReferenceIndex(4)
    known = [0]
    for index in (native, reference):
        index.add_worker(WORKER, WorkerOptions())
    for event_id in range(600):
        raw = random_message(rng, known).SerializeToString()
        read = [index.decode_message(raw) for index in (native, reference)]
        assert read[0][:5] == read[1][:5], f"KVSCOUT_TEST_SEED={SEED}"
        kinds = [[str(kind) for kind, _ in one.batch.faults] for one in read]
        assert kinds[0] == kinds[1], f"KVSCOUT_TEST_SEED={SEED}"
        native.apply(WORKER, read[0].batch, epoch=0, event_id=event_id)
        reference.apply(WORKER, read[1].batch, epoch=0, event_id=event_id)
        if event_id % 20 == 0:
            assert native.dump(WORKER) == reference.dump(WORKER), f"KVSCOUT_TEST_SEED={SEED}"
    native.check_invariants()


@pytest.mark.skipif(not native_available(), reason="the extension is not built: there is no other backend")
def test_damaged_messages_are_read_or_refused_by_the_native_backend() -> None:
    rng = random.Random(SEED)
    index = NativeIndex(4)
    whole = random_message(rng, [0]).SerializeToString()
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            index.decode_message(bytes(damaged))
        except (InvalidArgument, FailedPrecondition):
            continue
