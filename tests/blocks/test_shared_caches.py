"""Caches that several workers read: what one stores there, all have, beyond what they hold themselves."""

from __future__ import annotations

import random

import msgpack
import pytest
from support.index_scenarios import IndexFactory
from support.seeds import test_seed

from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import Cleared, Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import BlockIndex, SharedCacheStats, SharedOptions, WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

A, B, C = (WorkerRank(name, 0) for name in "abc")
STRANGER = WorkerRank("stranger", 0)
SHARED = WorkerOptions(shared=SharedOptions("store"))
PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
EXTERNAL = Tier.EXTERNAL


def world(
    factory: IndexFactory, *members: WorkerRank, options: WorkerOptions = SHARED, max_blocks: int = 0
) -> BlockIndex:
    index = factory(4, max_blocks=max_blocks)
    for member in members or (A, B):
        index.add_worker(member, options)
    index.add_worker(STRANGER, WorkerOptions())
    return index


def run(*blocks: int, tier: Tier = EXTERNAL, salt: int = 0) -> Stored:
    """Consecutive blocks of `PROMPT`; an engine with another salt names them otherwise."""
    parent = blocks[0] - 1 + salt if blocks[0] > 1 else None
    return Stored(tuple(block + salt for block in blocks), parent=parent, local_hashes=blocks, tier=tier)


def payload(**fields: object) -> bytes:
    """An engine's batch that stores a block."""
    stored = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4}
    packed: bytes = msgpack.packb([0.0, [{"type": "BlockStored", **stored, **fields}]])
    return packed


def tell(index: BlockIndex, worker: WorkerRank, *events: Event) -> None:
    index.apply(worker, EventBatch(events))
    index.check_invariants()


def external(index: BlockIndex) -> dict[WorkerRank, int]:
    """Leading blocks of the prompt on any tier, of each rank that has some."""
    return {worker: row.external for worker, row in index.find_matches(PROMPT, now=0.0).by_worker().items()}


def stats(index: BlockIndex) -> SharedCacheStats:
    (only,) = index.shared_caches()
    return only


def test_what_one_member_stores_every_member_has_and_nobody_else(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3))
    assert external(index) == {A: 3, B: 3}
    assert all(row[:3] == (0, 0, 0) for row in index.find_matches(PROMPT, now=0.0).by_worker().values())
    assert stats(index) == SharedCacheStats("store", 3, 2, 0, 0)
    tell(index, STRANGER, run(1, 2, 3, 4, 5))
    assert external(index) == {A: 3, B: 3, STRANGER: 5}


def test_shared_blocks_count_where_a_members_own_blocks_end(index_factory: IndexFactory) -> None:
    index = world(index_factory, A, B, C)
    tell(index, A, run(1, 2, 3, 4, tier=Tier.DEVICE), run(3, 4, 5, 6))
    tell(index, B, run(1, 2, tier=Tier.DEVICE), run(3, tier=Tier.HOST))
    # The first two are not in the cache, so that who does not hold them has nothing of it.
    assert external(index) == {A: 6, B: 6}
    rows = index.find_matches(PROMPT, now=0.0).by_worker()
    assert (rows[A][:4], rows[B][:4]) == ((4, 4, 4, 6), (2, 3, 3, 6))


def test_a_gap_in_the_shared_cache_ends_the_overlap(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3, 4, 5))
    tell(index, A, Removed((3,), tier=EXTERNAL))
    assert external(index) == {A: 2, B: 2}
    tell(index, B, run(1, 2, 3, tier=Tier.DEVICE))
    assert external(index) == {A: 2, B: 5}


def test_any_member_may_say_that_a_block_is_gone(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3))
    tell(index, B, Removed((2, 3), tier=EXTERNAL))
    # Nor does the one who stored them have them, whatever else it was told.
    assert external(index) == {A: 1, B: 1}
    tell(index, A, Removed((2, 3, 9), tier=EXTERNAL))
    tell(index, B, run(2))
    assert external(index) == {A: 2, B: 2}


def test_blocks_outlive_who_stored_them_until_the_last_member_leaves(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3))
    index.reset(A)
    assert external(index) == {A: 3, B: 3}
    assert index.remove_rank(A)
    assert external(index) == {B: 3}
    assert index.remove_rank(B)
    assert index.shared_caches() == ()
    index.add_worker(A, SHARED)
    assert external(index) == {}


def test_a_worker_that_is_registered_anew_with_another_cache_has_that_one(index_factory: IndexFactory) -> None:
    index = world(index_factory, A, B, C)
    tell(index, A, run(1, 2, 3))
    index.add_worker(B, WorkerOptions(shared=SharedOptions("other")))
    index.add_worker(C, WorkerOptions())
    assert external(index) == {A: 3}
    tell(index, B, run(1))
    assert external(index) == {A: 3, B: 1}
    assert [(cache.name, cache.blocks, cache.members) for cache in index.shared_caches()] == [
        ("other", 1, 1),
        ("store", 3, 1),
    ]


def test_the_cache_is_cleared_once_all_members_are(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3))
    tell(index, B, run(4))
    tell(index, A, Cleared())
    assert external(index) == {A: 4, B: 4}
    tell(index, A, run(1))
    tell(index, B, Cleared())
    # The first block was stored again by a member that had cleared its caches.
    assert external(index) == {A: 1, B: 1}
    assert stats(index).blocks == 1
    tell(index, B, Cleared(), Cleared(), run(2))
    assert external(index) == {A: 2, B: 2}
    tell(index, A, Cleared())
    assert stats(index).blocks == 1
    assert external(index) == {}


def test_a_member_that_names_blocks_otherwise_reads_nothing_of_others(index_factory: IndexFactory) -> None:
    index = world(index_factory, A, B, C)
    tell(index, A, run(1, 2, 3))
    tell(index, B, run(1, 2, salt=100))
    assert external(index) == {A: 3, B: 2, C: 3}
    assert stats(index).disagreeing == 1
    tell(index, B, run(3, 4, 5, salt=100))
    assert external(index) == {A: 3, B: 5, C: 3}
    # Its engine was started again, and names them like the others now.
    index.reset(B)
    assert external(index) == {A: 3, B: 3, C: 3}
    tell(index, B, run(1, 2, 3))
    assert stats(index) == SharedCacheStats("store", 3, 3, 0, 0)


def test_a_worker_of_another_block_size_is_no_member(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3))
    tell(index, B, Stored((1,), tokens=tuple(range(8)), block_size=8))
    tell(index, B, Removed((1, 2, 3), tier=EXTERNAL), run(1, 2, 3, 4))
    assert external(index) == {A: 3}


def test_models_of_several_cache_groups_share_nothing(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3))
    tell(index, B, run(1), Stored((1,), local_hashes=(1,), group=1, full_attention=False, window=8))
    assert external(index) == {A: 3, B: 1}


def test_the_oldest_shared_blocks_go_at_the_limit(index_factory: IndexFactory) -> None:
    index = world(index_factory, options=WorkerOptions(shared=SharedOptions("store", blocks=3)))
    tell(index, A, run(1, 2, 3, 4, 5))
    assert (stats(index).blocks, stats(index).evicted) == (3, 2)
    tell(index, B, run(1, 2, tier=Tier.DEVICE))
    assert external(index) == {B: 5}


def test_the_bound_of_the_index_bounds_shared_caches(index_factory: IndexFactory) -> None:
    index = world(index_factory, options=WorkerOptions(shared=SharedOptions("store", blocks=1000)), max_blocks=64)
    for block in range(0, 640, 8):
        locals_ = tuple(range(10_000 + block, 10_008 + block))
        tell(index, A, Stored(locals_, local_hashes=locals_, tier=EXTERNAL))
    assert stats(index).blocks == 64


def test_the_tier_that_a_registration_names_is_the_shared_one(index_factory: IndexFactory) -> None:
    index = world(index_factory, options=WorkerOptions(shared=SharedOptions("store", Tier.HOST)))
    tell(index, A, run(1, 2, 3, tier=Tier.HOST))
    rows = index.find_matches(PROMPT, now=0.0).by_worker()
    assert (rows[A][:4], rows[B][:4]) == ((0, 0, 0, 3), (0, 0, 0, 3))
    tell(index, B, Removed((3,), tier=Tier.HOST))
    assert external(index) == {A: 2, B: 2}


def test_blocks_that_are_named_by_their_hashes_alone_are_shared_if_the_publisher_has_them(
    index_factory: IndexFactory,
) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, 3, tier=Tier.DEVICE), Stored((1, 2, 9), tier=EXTERNAL))
    assert external(index) == {A: 3, B: 2}


def test_blocks_that_a_bridge_passes_on_are_shared(index_factory: IndexFactory) -> None:
    index, bridge = world(index_factory), index_factory(4)
    pool = PoolKey("m", "default", 4, False)
    batch = bridge.decode(payload(medium="STORAGE", locality="REMOTE"))
    message = bridge.encode_batch(A, pool, {}, batch, epoch=0, event_id=0)
    index.apply(A, index.decode_message(message).batch)
    assert stats(index).blocks == 1


def test_shared_blocks_come_back_with_the_state_of_who_announced_them(index_factory: IndexFactory) -> None:
    index = world(index_factory)
    tell(index, A, run(1, 2, tier=Tier.DEVICE), run(1, 2, 3))
    dump = index.dump(A)
    assert dump is not None
    again = world(index_factory)
    again.load(dump)
    again.check_invariants()
    assert external(again) == {A: 3, B: 3}
    again.load(WorkerDump(A))
    assert external(again) == {A: 3, B: 3}


@pytest.mark.parametrize(
    ("medium", "locality", "shared"),
    [
        ("STORAGE", "REMOTE", True),
        ("STORAGE", "remote", True),
        ("STORAGE", "LOCAL", False),
        ("STORAGE", None, False),
        ("CPU", "REMOTE", True),
        ("SHARED_STORAGE", None, True),
        ("OBJ", None, True),
    ],
)
def test_the_locality_of_an_event_says_whether_its_blocks_are_shared(
    index_factory: IndexFactory, medium: str, locality: str | None, shared: bool
) -> None:
    index = world(index_factory)
    index.apply_payload(A, payload(medium=medium, **({"locality": locality} if locality is not None else {})))
    assert stats(index).blocks == int(shared)
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium, "locality": locality}
    index.apply_payload(A, msgpack.packb([0.0, [removed]]))
    index.check_invariants()
    assert (stats(index).blocks, index.stats().blocks) == (0, 0)


@pytest.mark.parametrize("locality", ["RACK", "LOCAL ", 7, ["REMOTE"], "x" * 1000, b"\xff"])
def test_an_unknown_locality_costs_its_event(index_factory: IndexFactory, locality: object) -> None:
    index = world(index_factory)
    applied = index.apply_payload(A, payload(medium="STORAGE", locality=locality))
    assert (applied.events, applied.faults, index.stats().blocks) == (0, 1, 0)


@pytest.mark.skipif(not native_available(), reason="compares the native backend with the reference")
def test_random_events_of_members_give_the_same_answers_in_both_backends() -> None:
    for number in range(150):
        _random_world(random.Random(test_seed() + number))


def _random_world(rng: random.Random) -> None:
    indexes: list[BlockIndex] = [ReferenceIndex(4), NativeIndex(4)]
    ranks = [WorkerRank(f"w{n // 2}", n % 2) for n in range(rng.randint(2, 6))]
    stored: set[int] = set()

    def add(worker: WorkerRank) -> None:
        tier = rng.choice([None, None, Tier.HOST])
        shared = SharedOptions(rng.choice(["", "x", "x", "y"]), tier, rng.choice([0, 0, 5]))
        for index in indexes:
            index.add_worker(worker, WorkerOptions(shared=shared))

    for worker in ranks:
        add(worker)
    for _ in range(rng.randint(5, 60)):
        worker, kind = rng.choice(ranks), rng.random()
        if kind < 0.04:
            add(worker)
        elif kind < 0.08:
            for index in indexes:
                index.remove_rank(worker)
            add(worker)
        elif kind < 0.11:
            for index in indexes:
                index.reset(worker)
        elif kind < 0.16:
            dump = indexes[0].dump(worker)
            assert dump is not None
            target = rng.choice(ranks)
            moved = WorkerDump(target, *(getattr(dump, name) for name in WorkerDump.__slots__[1:]))
            for index in indexes:
                index.load(moved)
        else:
            events = [_random_event(rng) for _ in range(rng.randint(1, 3))]
            stored |= {local for event in events if isinstance(event, Stored) for local in event.local_hashes}
            for index in indexes:
                index.apply(worker, EventBatch(tuple(events)))
        for index in indexes:
            index.check_invariants()
        assert indexes[0].shared_caches() == indexes[1].shared_caches()
        for prompt in (PROMPT, PROMPT[:3], (1, 2, 7, 8)):
            one, other = (index.find_matches(prompt, now=0.0).by_worker() for index in indexes)
            assert one == other
            assert all(set(prompt[: row.external]) <= stored for row in one.values())


def _random_event(rng: random.Random) -> Event:
    tier = rng.choice([Tier.DEVICE, Tier.HOST, EXTERNAL, EXTERNAL])
    start = rng.choice([1, 1, 1, rng.randint(1, 8)])
    blocks = tuple(range(start, rng.randint(start, 8) + 1))
    kind, salt = rng.random(), 100 if rng.random() < 0.2 else 0
    if kind < 0.05:
        return Cleared()
    if kind < 0.3:
        return Removed(tuple(block + salt for block in blocks), tier)
    if kind < 0.4:
        return Stored(tuple(block + salt for block in blocks), tier=tier)
    if kind < 0.43:
        return Stored((1,), local_hashes=(1,), group=1, full_attention=rng.random() < 0.5)
    return run(*blocks, tier=tier, salt=salt)
