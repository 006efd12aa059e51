"""What a publisher sends does to an index what the engine's own bytes would have done; both encoders send the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import msgpack
import pytest
from support.seeds import test_seed

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.codec import decode_events, encode_events
from kvscout_blocks.bytes.dump import Copies, DumpedBlock
from kvscout_blocks.bytes.events import Cleared, Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.bytes.frames import MalformedBatch, parse_message
from kvscout_blocks.bytes.messages import parse_batch
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

SEED = test_seed()
DATA = Path(__file__).parents[1] / "data"
RANK = WorkerRank("engine.0", 3)
ADAPTERS = {7: "sql-lora"}
NATIVE_ONLY = pytest.mark.skipif(not native_available(), reason="the extension is not built")


def golden_payloads() -> Iterator[bytes]:
    def texts(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        elif isinstance(node, dict):
            for value in node.values():
                yield from texts(value)
        elif isinstance(node, list):
            for value in node:
                yield from texts(value)

    for text in texts(json.loads((DATA / "golden_payloads.json").read_text())):
        try:
            yield bytes.fromhex(text)
        except ValueError:
            continue


def recorded_payloads(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return [parse_message([bytes(f) for f in record[1]]).payload for record in msgpack.Unpacker(file, raw=True)]


def relayed(kind: type[BlockIndex], pool: PoolKey, payloads: Iterable[bytes]) -> tuple[BlockIndex, BlockIndex]:
    """An index fed with the engine's payloads, and one fed with what a publisher makes of them."""
    direct, behind = (kind(pool.block_size, pool.eagle) for _ in range(2))
    for index in (direct, behind):
        index.add_worker(RANK, WorkerOptions(adapters=ADAPTERS))
    for event_id, payload in enumerate(payloads):
        try:
            batch = direct.decode(payload)
        except MalformedBatch:
            continue
        direct.apply(RANK, batch, epoch=9, event_id=event_id)
        message = kind.encode_batch(RANK, pool, ADAPTERS, batch, epoch=9, event_id=event_id)
        published = behind.decode_message(message)
        assert (published.worker, published.pool, published.epoch, published.event_id) == (RANK, pool, 9, event_id)
        behind.apply(RANK, published.batch, epoch=9, event_id=event_id)
    return direct, behind


def messages_of(index: BlockIndex, pool: PoolKey, *, history_incomplete: bool, epoch: int) -> list[bytes]:
    cut = index.cut(RANK)
    messages = cut.messages(pool, history_incomplete=history_incomplete, epoch=epoch) if cut is not None else None
    assert messages is not None
    return messages


def assert_alike(direct: BlockIndex, behind: BlockIndex) -> None:
    assert behind.dump(RANK) == direct.dump(RANK)
    one, other = direct.worker_stats(RANK), behind.worker_stats(RANK)
    assert one is not None
    assert other is not None
    for field in fields(one):
        if field.name != "ignored":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    behind.check_invariants()


KINDS: list[type[BlockIndex]] = [ReferenceIndex, *([NativeIndex] if native_available() else [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [4, 8, 2])
def test_golden_payloads_do_the_same_through_a_publisher(kind: type[BlockIndex], block_size: int) -> None:
    pool = PoolKey("m", "default", block_size, False)
    payloads = list(golden_payloads())
    assert len(payloads) > 40
    for payload in payloads:
        assert_alike(*relayed(kind, pool, [payload]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", sorted(DATA.glob("captures/*/events*.bin")), ids=lambda path: path.parent.name)
def test_recordings_do_the_same_through_a_publisher(kind: type[BlockIndex], path: Path) -> None:
    payloads = recorded_payloads(path)
    for block_size in (16, 32):
        direct, behind = relayed(kind, PoolKey("m", "t", block_size, False), payloads)
        assert_alike(direct, behind)


def random_event(rng: random.Random, known: list[int]) -> Event:
    kind = rng.randrange(20)
    if kind == 0:
        return Cleared()
    group = rng.choice([0, 0, 0, 1, 2, 3])
    if kind < 5:
        return Removed((rng.choice(known),), Tier(rng.randrange(4)), group)
    length = rng.randrange(1, 4)
    hashes = tuple(rng.getrandbits(64) for _ in range(length))
    known.extend(hashes)
    if kind < 8:
        # Which kind a group is of does not change.
        moved = Stored(tuple(rng.sample(known, 1)), tier=Tier(rng.randrange(4)), group=group)
        return replace(moved, full_attention=False, window=8) if group == 3 else moved
    # Mostly what an engine sends; else masked, short, unnamed or of another size.
    size = 4 if rng.random() < 0.97 else rng.choice([2, 8])
    tokens = length * size + rng.choice([0] * 12 + [-1, 1, -size])
    pairs = rng.random() < 0.05
    return Stored(
        hashes,
        rng.choice([None, *known[-20:]]),
        tuple(rng.randrange(4) for _ in range(max(0, tokens) + pairs)),
        size,
        rng.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
        group,
        full_attention=group == 0 or (group < 3 and rng.random() < 0.9),
        window=8 if group == 3 else 0,
        lora_id=rng.choice([0, 0, 0, 7, 8]),
        lora_name=rng.choice(["", "", "named"]),
        cache_salt=rng.choice(["", "", "salt"]),
        mm_items=rng.choice([(), (), (("image",), (), ())]),
        pairs=pairs,
        lookahead=rng.choice([None, 5]),
    )


@pytest.mark.parametrize("eagle", [False, True])
def test_random_batches_do_the_same_through_a_publisher(eagle: bool) -> None:
    rng = random.Random(SEED)
    pool = PoolKey("m", "t", 4, eagle)
    for _ in range(150):
        direct, behind = ReferenceIndex(4, eagle), ReferenceIndex(4, eagle)
        for index in (direct, behind):
            index.add_worker(RANK, WorkerOptions(adapters=ADAPTERS))
        known = [1]
        for event_id in range(12):
            events = tuple(random_event(rng, known) for _ in range(rng.randrange(4)))
            batch = EventBatch(events, rng.choice([0.0, 1.5]))
            direct.apply(RANK, batch, epoch=1, event_id=event_id)
            message = encode_events(pool, ADAPTERS, RANK, batch, epoch=1, event_id=event_id)
            read = decode_events(message)
            assert isinstance(read.batch, EventBatch)
            behind.apply(RANK, read.batch, epoch=1, event_id=event_id)
            assert_alike(direct, behind)
            if native_available():
                native = NativeIndex(4, eagle).decode_message(message.SerializeToString()).batch
                again = NativeIndex.encode_batch(RANK, pool, {}, native, epoch=1, event_id=event_id)
                assert parse_batch(again).events == message.events
                ours = NativeIndex.encode_batch(RANK, pool, ADAPTERS, batch, epoch=1, event_id=event_id)
                assert ours == message.SerializeToString()


@NATIVE_ONLY
@pytest.mark.parametrize("eagle", [False, True])
def test_both_encoders_write_the_same_bytes(eagle: bool) -> None:
    payloads = [*golden_payloads(), *recorded_payloads(DATA / "captures" / "vllm-0.32.0-lora-chunked" / "events.bin")]
    native, reference = NativeIndex(4, eagle), ReferenceIndex(4, eagle)
    for block_size in (2, 4, 8, 32):
        pool = PoolKey("m", "t", block_size, eagle)
        for event_id, payload in enumerate(payloads):
            messages = {
                index.encode_batch(RANK, pool, ADAPTERS, index.decode(payload), epoch=0, event_id=event_id)
                for index in (native, reference)
            }
            assert len(messages) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_another_block_size_makes_the_worker_incompatible_behind_a_publisher_too(kind: type[BlockIndex]) -> None:
    pool = PoolKey("m", "t", 16, False)
    eight = [True, [["BlockStored", [1, 2], None, list(range(16)), 8]], None]
    direct, behind = relayed(kind, pool, [msgpack.packb([1.0, *eight[1:]])])
    assert_alike(direct, behind)
    stats = behind.worker_stats(RANK)
    assert stats is not None
    assert "8 tokens, the registration says 16" in stats.incompatible
    assert stats.ignored == {Ignored.BLOCK_SIZE: 1}


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_leaves_with_a_message(kind: type[BlockIndex]) -> None:
    tokens = list(range(1_000_000, 1_000_016))
    payload = msgpack.packb([1.0, [["BlockStored", [1, 2, 3, 4], None, tokens, 4]], None])
    for block_size in (4, 5, 16, 32):
        index = kind(block_size)
        pool = PoolKey("m", "t", block_size, False)
        message = kind.encode_batch(RANK, pool, {}, index.decode(payload), epoch=1, event_id=0)
        assert not any(token.to_bytes(4, "little") in message for token in tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_carries_the_publishers_epoch(kind: type[BlockIndex]) -> None:
    index = kind(4)
    index.add_worker(RANK, WorkerOptions())
    index.apply(RANK, EventBatch((Stored((1,), None, (1, 2, 3, 4), 4),)), epoch=0, event_id=5)
    pool = PoolKey("m", "t", 4, False)
    (message,) = messages_of(index, pool, history_incomplete=True, epoch=77)
    batch = parse_batch(message)
    assert (batch.epoch, batch.event_id, batch.events[0].state.history_incomplete) == (77, 5, True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_a_state_says_that_its_worker_is_not_indexed(kind: type[BlockIndex], other: type[BlockIndex]) -> None:
    pool = PoolKey("m", "t", 16, False)
    payload = msgpack.packb([1.0, [["BlockStored", [1, 2], None, list(range(16)), 8]], None])
    direct, _ = relayed(kind, pool, [payload])
    behind = other(16)
    behind.add_worker(RANK, WorkerOptions())
    behind.load_messages(messages_of(direct, pool, history_incomplete=False, epoch=9))
    assert behind.dump(RANK) == direct.dump(RANK)
    stats = behind.worker_stats(RANK)
    assert stats is not None
    assert "8 tokens, the registration says 16" in stats.incompatible
    dump = behind.dump(RANK)
    assert dump is not None
    with pytest.raises(InvalidArgument, match="incompatible"):
        behind.load(replace(dump, blocks=(DumpedBlock(1, -1, 2, (Copies(0, Tier.DEVICE, 1),)),)))


@pytest.mark.parametrize("eagle", [False, True])
def test_damaged_payloads_do_the_same_through_a_publisher(eagle: bool) -> None:
    rng = random.Random(SEED)
    payloads = list(golden_payloads())
    for _ in range(400):
        damaged = []
        for payload in rng.choices(payloads, k=3):
            changed = bytearray(payload)
            for _ in range(rng.randrange(4)):
                changed[rng.randrange(len(changed))] = rng.choice([0, 1, 4, 0x7F, 0xC0, 0xCF, rng.randrange(256)])
            damaged.append(bytes(changed))
        for kind in KINDS:
            assert_alike(*relayed(kind, PoolKey("m", "t", 4, eagle), damaged))
