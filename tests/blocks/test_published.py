"""Messages of a publisher as a source takes them: batches, states in chunks, and what is neither."""

from __future__ import annotations

import random

import pytest
from support.index_scenarios import IndexFactory
from support.seeds import test_seed

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.codec import encode_dump
from kvscout_blocks.bytes.dump import Copies, DumpedBlock, WorkerDump
from kvscout_blocks.bytes.events import Tier
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.source import published
from kvscout_blocks.source.decisions import SequencedBatch, digest
from kvscout_blocks.source.feed import SourceState
from kvscout_blocks.source.published import PublishedReader, with_last_digest
from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError
from kvscout_common.worker import PoolKey, WorkerRank

SEED = test_seed()
RANK = WorkerRank("w", 1)
POOL = PoolKey("m", "t", 4, False)


@pytest.fixture
def index(index_factory: IndexFactory) -> BlockIndex:
    return index_factory(4)


@pytest.fixture
def reader(index: BlockIndex) -> PublishedReader:
    return PublishedReader(index, RANK, POOL)


def message(*events: events_pb2.KvEvent, **fields: object) -> bytes:
    header: dict[str, object] = {
        "version": 1, "worker_id": "w", "dp_rank": 1, "model": "m", "tenant": "t", "block_size": 4, "epoch": 7,
        "event_id": 3,
    }  # fmt: skip
    return events_pb2.KvEventBatch(**{**header, **fields}, events=events).SerializeToString()  # type: ignore[arg-type]


CLEARED = events_pb2.KvEvent(cleared=events_pb2.CacheCleared())
RESET = events_pb2.KvEvent(reset=events_pb2.SourceReset())
REMOVED = events_pb2.KvEvent(removed=events_pb2.BlocksRemoved(engine_hashes=[1]))


def chunks(number: int = 3, *, epoch: int = 7, last: int | None = 9, incomplete: bool = False) -> list[bytes]:
    """A state of that many chunks."""
    blocks = tuple(
        DumpedBlock(position + 1, position - 1, position, (Copies(0, Tier.DEVICE, 1),)) for position in range(10)
    )
    dump = WorkerDump(RANK, epoch, last, ((0, True),), blocks, ())
    parts = list(encode_dump(POOL, dump, history_incomplete=incomplete, max_chunk_bytes=4096 + 70 + 21 * 10 // number))
    assert len(parts) >= number
    return [part.SerializeToString() for part in parts]


def batch_of(item: object) -> SequencedBatch[object]:
    assert isinstance(item, SequencedBatch)
    return item


def test_a_batch_has_its_place_its_digest_and_what_it_does(reader: PublishedReader) -> None:
    plain, cleared, reset = message(REMOVED), message(CLEARED), message(RESET, REMOVED)
    batch = batch_of(reader.read(plain))
    assert (batch.event_id, batch.epoch, batch.dp_rank, batch.digest) == (3, 7, 1, digest(plain))
    assert (batch.size_bytes, batch.cleared, batch.reset, batch.malformed) == (len(plain), False, False, False)
    batch = batch_of(reader.read(cleared))
    assert (batch.cleared, batch.reset) == (True, False)
    batch = batch_of(reader.read(reset))
    assert (batch.cleared, batch.reset) == (True, True)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"version": 0}, FailedPrecondition, "version 0"),
        ({"version": 2}, FailedPrecondition, "version 2"),
        ({"worker_id": "x"}, InvalidArgument, "x/1"),
        ({"dp_rank": 0}, InvalidArgument, "w/0"),
        ({"tenant": ""}, InvalidArgument, "default"),
        ({"block_size": 16}, FailedPrecondition, "16 tokens"),
        ({"model": "n"}, FailedPrecondition, "'n'"),
        ({"eagle": True}, FailedPrecondition, "eagle"),
        ({"event_id": None}, InvalidArgument, "event_id"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("content", [REMOVED, events_pb2.KvEvent(state=events_pb2.StateChunk(last=True))])
def test_what_is_of_another_source_or_version_is_refused(
    reader: PublishedReader, content: events_pb2.KvEvent, fields: dict[str, object], error: type, says: str
) -> None:
    if fields == {"event_id": None} and content.HasField("state"):
        assert isinstance(reader.read(message(content, **fields)), SourceState)
        return
    with pytest.raises(error, match=says):
        reader.read(message(content, **fields))


def test_bytes_that_are_no_message_have_no_place(reader: PublishedReader) -> None:
    with pytest.raises(InvalidArgument, match="not a message"):
        reader.read(b"\xff\xff")


@pytest.mark.parametrize("events", [(CLEARED, RESET), (REMOVED, events_pb2.KvEvent(state=events_pb2.StateChunk()))])
def test_a_batch_that_contradicts_itself_keeps_its_place(
    reader: PublishedReader, events: tuple[events_pb2.KvEvent, ...]
) -> None:
    batch = batch_of(reader.read(message(*events)))
    assert (batch.event_id, batch.epoch, batch.malformed, batch.cleared) == (3, 7, True, False)


@pytest.mark.parametrize("last", [9, None])
@pytest.mark.parametrize("incomplete", [False, True])
def test_a_state_comes_with_its_last_chunk(
    reader: PublishedReader, index: BlockIndex, last: int | None, *, incomplete: bool
) -> None:
    parts = chunks(last=last, incomplete=incomplete)
    for part in parts[:-1]:
        assert reader.read(part) is None
        assert reader.amid_state
    state = reader.read(parts[-1])
    assert state == SourceState(7, last, parts, incomplete)
    assert not reader.amid_state
    index.add_worker(RANK, WorkerOptions())
    index.load_messages(state.messages)
    stats = index.worker_stats(RANK)
    assert stats is not None
    assert stats.blocks == 10


def test_batches_may_come_between_chunks(reader: PublishedReader) -> None:
    parts = chunks()
    for part in parts[:-1]:
        assert reader.read(part) is None
        batch_of(reader.read(message(REMOVED)))
    assert isinstance(reader.read(parts[-1]), SourceState)


def test_a_lost_chunk_costs_its_state_and_the_next_state_is_read(reader: PublishedReader) -> None:
    parts = chunks()
    reader.read(parts[0])
    with pytest.raises(InvalidArgument, match="chunk 2 of"):
        reader.read(parts[2])
    assert not reader.amid_state
    with pytest.raises(InvalidArgument, match="where 0 comes next"):
        reader.read(parts[1])
    for part in parts[:-1]:
        reader.read(part)
    assert isinstance(reader.read(parts[-1]), SourceState)


def test_chunks_of_two_cuts_are_no_state(reader: PublishedReader) -> None:
    for other in (chunks(last=10), chunks(epoch=8), chunks(last=None)):
        reader.read(chunks()[0])
        with pytest.raises(InvalidArgument):
            reader.read(other[1])
    # One that begins anew is.
    reader.read(chunks()[0])
    for part in chunks(last=10)[:-1]:
        assert reader.read(part) is None
    assert isinstance(reader.read(chunks(last=10)[-1]), SourceState)


def test_a_state_is_bounded(reader: PublishedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = chunks()
    monkeypatch.setattr(published, "MAX_STATE_BYTES", len(parts[0]) + 1)
    reader.read(parts[0])
    with pytest.raises(InvalidArgument, match="over"):
        reader.read(parts[1])
    assert not reader.amid_state


def test_a_digest_is_added_without_reading_the_chunk(reader: PublishedReader) -> None:
    parts = chunks()
    parts[-1] = with_last_digest(parts[-1], 2**63 + 5)
    for part in parts[:-1]:
        reader.read(part)
    state = reader.read(parts[-1])
    assert isinstance(state, SourceState)
    assert state.last_digest == 2**63 + 5
    assert reader.read(message(REMOVED)) is not None


def test_damaged_messages_are_refused_or_read_and_never_crash(index: BlockIndex) -> None:
    rng = random.Random(SEED)
    whole = [message(REMOVED), message(RESET, REMOVED), *chunks()]
    reader = PublishedReader(index, RANK, POOL)
    for _ in range(2000):
        damaged = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            item = reader.read(bytes(damaged[: rng.randint(0, len(damaged))] if rng.random() < 0.3 else damaged))
        except KvscoutError:
            continue
        assert item is None or isinstance(item, SequencedBatch | SourceState)
