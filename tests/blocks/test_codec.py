"""Dumps as messages: nothing is lost, equal dumps are equal bytes, chunks stay small, contradictions are refused."""

import random

import pytest
from support.seeds import test_seed

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.codec import DumpReader, encode_dump
from kvscout_blocks.bytes.dump import Copies, DumpedBlock, DumpedOrphan, WorkerDump
from kvscout_blocks.bytes.events import Tier
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.worker import PoolKey, WorkerRank

POOL = PoolKey("m", "t", 16, False)
WORKER = WorkerRank("w", 3)
SEED = test_seed()


def one(tier: Tier = Tier.DEVICE, number: int = 1, group: int = 0) -> tuple[Copies, ...]:
    return (Copies(group, tier, number),)


def read(messages: list[events_pb2.KvEventBatch]) -> WorkerDump:
    reader = DumpReader()
    for message in messages[:-1]:
        assert reader.feed(message) is None
    done = reader.feed(messages[-1])
    assert done is not None
    assert done.pool == POOL
    return done.dump


def random_dump(rng: random.Random, size: int) -> WorkerDump:
    blocks: list[DumpedBlock] = []
    for position in range(size):
        parent = position - 1 if rng.random() < 0.8 else rng.randrange(-1, position)
        tiers = rng.sample(sorted(Tier), rng.choice([1, 1, 1, 2, 3]))
        copies = tuple(sorted(Copies(rng.choice([0, 2]), tier, rng.choice([1, 1, 1, 5])) for tier in tiers))
        hole = rng.random() < 0.05
        blocks.append(
            DumpedBlock(None if hole else rng.getrandbits(64) | 1, parent, rng.getrandbits(64), () if hole else copies)
        )
    orphans = tuple(
        DumpedOrphan(rng.getrandbits(64), rng.getrandbits(64), rng.getrandbits(64), one(number=rng.randint(1, 3)))
        for _ in range(rng.randrange(20))
    )
    return WorkerDump(
        WORKER, rng.getrandbits(60), rng.getrandbits(60), ((0, True), (1, False), (2, True)), tuple(blocks), orphans
    )


@pytest.mark.parametrize("round_", range(30))
def test_a_dump_survives_its_way_through_messages(round_: int) -> None:
    rng = random.Random(SEED + round_)
    dump = random_dump(rng, rng.choice([0, 1, 10, 500]))
    limit = rng.choice([8192, 16384, 512 * 1024])
    messages = [
        events_pb2.KvEventBatch.FromString(m.SerializeToString())
        for m in encode_dump(POOL, dump, max_chunk_bytes=limit)
    ]
    assert read(messages) == dump, f"KVSCOUT_TEST_SEED={SEED}"
    assert all(message.ByteSize() <= limit for message in messages), f"KVSCOUT_TEST_SEED={SEED}"


def test_equal_dumps_are_equal_bytes_and_a_long_chain_is_one_run_a_chunk() -> None:
    chain = tuple(DumpedBlock(i + 1, i - 1, i * 7, one()) for i in range(100_000))
    dump = WorkerDump(WORKER, 0, 5, ((0, True),), chain)
    first, second = ([m.SerializeToString() for m in encode_dump(POOL, dump)] for _ in range(2))
    assert first == second
    assert sum(map(len, first)) < 100_000 * 16.2
    for raw in first:
        (event,) = events_pb2.KvEventBatch.FromString(raw).events
        assert len(event.state.runs) == 1


def test_an_empty_worker_is_one_message_with_its_cursor() -> None:
    (message,) = encode_dump(POOL, WorkerDump(WORKER, 4, None), history_incomplete=True)
    assert message.events[0].state.last
    done = DumpReader().feed(message)
    assert done is not None
    assert (done.history_incomplete, done.dump.epoch, done.dump.last_event_id) == (True, 4, None)


def two_chunks() -> list[events_pb2.KvEventBatch]:
    chain = tuple(DumpedBlock(i + 1, i - 1, i, one()) for i in range(600))
    messages = list(encode_dump(POOL, WorkerDump(WORKER, 0, 5, ((0, True),), chain), max_chunk_bytes=4096 + 9000))
    assert len(messages) == 2
    return messages


def test_versions_that_are_not_known_are_refused() -> None:
    for version in (0, 2):
        (message,) = encode_dump(POOL, WorkerDump(WORKER))
        message.version = version
        with pytest.raises(FailedPrecondition, match=f"version {version}"):
            DumpReader().feed(message)


def test_a_chunk_out_of_order_or_of_another_dump_is_refused() -> None:
    first, second = two_chunks()
    with pytest.raises(InvalidArgument, match="chunk 1 where 0 comes next"):
        DumpReader().feed(second)
    reader = DumpReader()
    reader.feed(first)
    second.event_id = 6
    with pytest.raises(InvalidArgument, match="two dumps"):
        reader.feed(second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.runs[0].engine_hashes.append(1), "different lengths"),
        (lambda state: state.runs[0].copies.extend([1]), "different lengths"),
        (lambda state: setattr(state.runs[0], "parent_position", 9), "position 9 comes later"),
        (lambda state: setattr(state.runs[0], "tier", 9), "unknown tier 9"),
        (lambda state: state.further_copies.add(position=99, copies=1), "no block at position 99"),
        (lambda state: state.further_copies.add(position=0, copies=0), "at least 1"),
    ],
)
def test_a_chunk_that_contradicts_itself_is_refused(change: object, message: str) -> None:
    (batch,) = encode_dump(
        POOL, WorkerDump(WORKER, 0, 1, ((0, True),), (DumpedBlock(1, -1, 1, one()), DumpedBlock(2, 0, 2, one())))
    )
    change(batch.events[0].state)  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match=message):
        DumpReader().feed(batch)


def test_events_are_no_state() -> None:
    with pytest.raises(InvalidArgument, match="state chunk"):
        DumpReader().feed(events_pb2.KvEventBatch(version=1))
