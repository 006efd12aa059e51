"""The block index: what scenarios cannot say shortly. Over every implementation."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgpack
import pytest
from support.cpu_cost import cpu_seconds
from support.index_scenarios import IndexFactory, settle

from kvscout.v1.events_pb2 import KvEventBatch
from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.dump import Copies, DumpedBlock, DumpedOrphan, WorkerDump
from kvscout_blocks.bytes.events import Cleared, Event, EventBatch, Fault, FaultKind, Removed, Stored, Tier
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_blocks.index.block_index import (
    BATCH_LIMIT,
    FEW_GHOSTS,
    GHOST_LIMIT,
    GROUP_LIMIT,
    ORPHAN_LIMIT,
    TWIN_LIMIT,
    Applied,
    BlockIndex,
    WorkerOptions,
)
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.hashing import block_hashes, native_available
from kvscout_common.worker import CopyMode, PoolKey, WorkerRank

W0 = WorkerRank("w0", 0)
W1 = WorkerRank("w1", 0)


def new(factory: IndexFactory, *workers: WorkerRank, **bounds: int) -> BlockIndex:
    index = factory(4, **bounds)  # type: ignore[arg-type]
    for worker in workers or (W0,):
        index.add_worker(worker, WorkerOptions())
    return index


def run(*hashes: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> Stored:
    """Blocks whose engine hashes are their local hashes."""
    return Stored(hashes, parent=parent, local_hashes=hashes, tier=tier)


def apply(index: BlockIndex, *events: Event, worker: WorkerRank = W0) -> Applied:
    return index.apply(worker, EventBatch(events))


def device(index: BlockIndex, *hashes: int, now: float = 0.0) -> dict[WorkerRank, int]:
    return {worker: row.device for worker, row in index.find_matches(hashes, now=now).by_worker().items()}


def ignored(index: BlockIndex, reason: Ignored, worker: WorkerRank = W0) -> int:
    stats = index.worker_stats(worker)
    assert stats is not None
    return stats.ignored.get(reason, 0)


def test_events_of_unknown_workers_change_nothing_and_are_counted(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(1), worker=W1)
    apply(index, Removed((1,)), worker=W1)
    assert device(index, 1) == {}
    assert index.stats().unknown_worker == 2
    assert index.predict(W1, [1], ttl_seconds=1, now=0.0) == 0
    assert index.demote(W1, ttl_seconds=1, now=0.0) == 0
    index.reset(W1)
    assert not index.remove_rank(W1)
    assert index.remove_worker("w1") == 0
    assert (index.dump(W1), index.cursor(W1), index.worker_stats(W1)) == (None, None, None)


def test_nothing_survives_into_a_worker_that_is_added_again(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(1, 2), run(9, parent=8))
    index.predict(W0, [5, 6], ttl_seconds=100, now=0.0)
    assert index.remove_worker("w0") == 1
    assert device(index, 1, 2) == {}
    index.add_worker(W0, WorkerOptions())
    assert device(index, 1, 2) == {}
    assert index.find_matches([5, 6], now=0.0).workers == ()
    settle(index)
    index.check_invariants()
    assert index.dump(W0) == WorkerDump(W0)
    assert index.stats().blocks == 0


def test_adding_a_known_worker_replaces_its_options_and_keeps_its_blocks(
    index_factory: IndexFactory,
) -> None:
    index = new(index_factory)
    apply(index, run(1, 2))
    index.add_worker(W0, WorkerOptions(total_kv_blocks=1))
    assert device(index, 1, 2) == {W0: 2}
    stats = index.worker_stats(W0)
    assert stats is not None
    assert stats.over_capacity


def test_the_cursor_moves_with_the_events(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    assert index.cursor(W0) == (0, None)
    index.apply(W0, EventBatch((run(1),)), epoch=3, event_id=7)
    apply(index, run(2))
    assert index.cursor(W0) == (3, 7)
    dump = index.dump(W0)
    assert dump is not None
    assert (dump.epoch, dump.last_event_id) == (3, 7)
    index.apply(W0, EventBatch((Cleared(),)), epoch=3, event_id=8)
    assert index.cursor(W0) == (3, 8)
    index.reset(W0)
    assert index.cursor(W0) == (0, None)


def test_payloads_are_applied_like_batches(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    tokens = list(range(8))
    payload = msgpack.packb([0.0, [["BlockStored", [-1, 5], None, tokens, 4, None], ["Grown"], ["BlockStored"]], None])
    assert index.apply_payload(W0, payload, event_id=0) == Applied(1, 2, False, "")
    assert device(index, *block_hashes(tokens, 4)) == {W0: 2}
    with pytest.raises(MalformedBatch):
        index.apply_payload(W0, b"\xc1", event_id=1)
    assert index.cursor(W0) == (0, 1)
    assert device(index, *block_hashes(tokens, 4)) == {W0: 2}


def test_faults_are_passed_on(index_factory: IndexFactory) -> None:
    batch = EventBatch((run(1),), faults=(Fault(FaultKind.UNKNOWN_TAG, "x"),))
    assert new(index_factory).apply(W0, batch) == Applied(1, 1, False, "")


def test_eagle_windows_need_their_last_token(index_factory: IndexFactory) -> None:
    index = index_factory(2, True)
    index.add_worker(W0, WorkerOptions())
    prompt = [1, 2, 3, 4, 5]
    hashes = block_hashes(prompt, 2, eagle=True)
    event = Stored((10, 11), tokens=(1, 2, 3, 4), block_size=2)
    apply(index, event)
    assert ignored(index, Ignored.EAGLE_MISMATCH) == 1
    assert device(index, *hashes) == {}
    apply(index, replace(event, lookahead=5))
    assert device(index, *hashes) == {W0: 2}
    apply(index, Cleared(), replace(event, tokens=(1, 2, 3, 4, 5), pairs=True, lookahead=5))
    assert device(index, *hashes) == {W0: 2}
    assert device(index, *block_hashes([1, 2, 3, 4, 6], 2, eagle=True)) == {W0: 1}


def test_token_pairs_of_a_worker_without_eagle_are_not_indexed(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, Stored((10,), tokens=(1, 2, 3, 4, 5), block_size=4, pairs=True, lookahead=5))
    assert ignored(index, Ignored.EAGLE_MISMATCH) == 1
    apply(index, Stored((10,), tokens=(1, 2, 3, 4), block_size=4, lookahead=5))
    assert device(index, *block_hashes([1, 2, 3, 4], 4)) == {W0: 1}


SHOWS_TIERS = (Stored((10**9,), tokens=(1, 2, 3, 4), block_size=4, tier=Tier.HOST),)
"""From an engine that moves blocks from one tier to another, so that ghosts may be asked for."""


@pytest.mark.parametrize(
    ("total_kv_blocks", "tiers", "max_blocks", "limit"),
    [
        (0, False, 0, FEW_GHOSTS),
        (3000, False, 0, FEW_GHOSTS),
        (3000, True, 0, 4096),
        (3000, False, 10**6, 4096),
        (100, True, 0, FEW_GHOSTS),
    ],
)
def test_ghosts_are_as_many_as_a_cache_has_blocks_where_they_can_be_asked_for(
    index_factory: IndexFactory,
    total_kv_blocks: int,
    tiers: bool,
    max_blocks: int,
    limit: int,
) -> None:
    index = index_factory(4, max_blocks=max_blocks)
    index.add_worker(W0, WorkerOptions(total_kv_blocks=total_kv_blocks))
    if tiers:
        apply(index, *SHOWS_TIERS)
    for first in range(0, 5000, 500):
        hashes = tuple(range(first, first + 500))
        apply(index, *(run(h) for h in hashes), Removed(hashes))
    assert index.stats().ghosts == limit
    for engine_hash in (5000 - limit, 4999 - limit):
        apply(index, Stored((engine_hash,), tier=Tier.HOST))
    assert ignored(index, Ignored.UNKNOWN_MOVED) == 1
    assert index.find_matches([5000 - limit], now=0.0).host == (1,)
    # It says by now that it moves blocks.
    apply(index, *(run(h) for h in range(5000, 5500)), Removed(tuple(range(5000, 5500))))
    assert index.stats().ghosts == (limit + 500 if limit == FEW_GHOSTS and total_kv_blocks != 100 else limit)
    index.check_invariants()


@pytest.mark.slow
def test_ghosts_are_bounded_and_the_oldest_are_forgotten(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, *SHOWS_TIERS)
    for first in range(0, GHOST_LIMIT + 2, 1000):
        hashes = tuple(range(first, min(first + 1000, GHOST_LIMIT + 2)))
        apply(index, *(run(h) for h in hashes), Removed(hashes))
    stats = index.worker_stats(W0)
    assert stats is not None
    assert stats.ghosts == GHOST_LIMIT
    apply(index, Stored((0, 1, 2, GHOST_LIMIT + 1), tier=Tier.HOST))
    assert ignored(index, Ignored.UNKNOWN_MOVED) == 2
    assert index.find_matches([2], now=0.0).host == (1,)
    index.check_invariants()


@pytest.mark.slow
def test_a_block_that_came_back_keeps_its_place_among_the_ghosts(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, *SHOWS_TIERS)
    for _ in range(2):
        for first in range(0, GHOST_LIMIT, 1024):
            hashes = tuple(range(first, first + 1024))
            apply(index, *(run(h) for h in hashes), Removed(hashes))
    apply(index, *(run(h) for h in range(1024)))
    assert index.stats().ghosts == GHOST_LIMIT
    new_ones = tuple(range(10**6, 10**6 + 1000))
    apply(index, *(run(h) for h in new_ones), Removed(new_ones))
    assert index.stats().ghosts == GHOST_LIMIT
    apply(index, Stored((1024,), tier=Tier.HOST))
    assert ignored(index, Ignored.UNKNOWN_MOVED) == 0, "only places of blocks that came back were taken"
    index.check_invariants()


def test_a_block_that_came_back_and_is_forgotten_is_no_ghost_again(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(1), Removed((1,)), run(1))
    index.demote(W0, ttl_seconds=1, now=0.0)
    settle(index, 2.0)
    apply(index, Stored((1,), tier=Tier.HOST))
    assert ignored(index, Ignored.UNKNOWN_MOVED) == 1
    # Nor where nobody knows what was above it.
    apply(index, run(5, 6), Removed((6,)), run(6, parent=5), Removed((5,)))
    apply(index, Removed((6,)), Stored((6,), tier=Tier.HOST))
    assert ignored(index, Ignored.UNKNOWN_MOVED) == 2
    index.check_invariants()


@pytest.mark.slow
def test_orphans_are_bounded_and_the_dropped_ones_are_counted(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    for first in range(0, ORPHAN_LIMIT + 10, 1000):
        last = min(first + 1000, ORPHAN_LIMIT + 10)
        apply(index, *(run(h + 10, parent=5) for h in range(first, last)))
    stats = index.stats()
    assert stats.orphans == ORPHAN_LIMIT
    assert ignored(index, Ignored.ORPHAN_LIMIT) == 10
    assert index.incomplete() == {W0}
    apply(index, run(5))
    assert index.stats().orphans == 0
    assert index.stats().memberships == ORPHAN_LIMIT + 1


def refuse(index: BlockIndex, worker: WorkerRank = W0) -> None:
    """Has a limit keep a block of a worker out."""
    first = 10**6
    names = range(first, first + TWIN_LIMIT + 1)
    apply(index, *(Stored((name,), local_hashes=(first,)) for name in names), worker=worker)


def incomplete_state(index: BlockIndex) -> bool:
    """What the messages of a worker's state say of its history."""
    pool = PoolKey("t", "m", 4, False)
    cut = index.cut(W0)
    messages = cut.messages(pool, history_incomplete=False) if cut is not None else None
    assert messages is not None
    (told,) = {KvEventBatch.FromString(message).events[0].state.history_incomplete for message in messages}
    return told


def test_a_worker_of_which_a_limit_kept_blocks_out_is_incomplete_until_it_is_emptied(
    index_factory: IndexFactory,
) -> None:
    index = new(index_factory, W0, W1)
    apply(index, run(1, 2), Stored((1,), local_hashes=(7,)), worker=W1)
    assert ignored(index, Ignored.HASH_CONFLICT, W1) == 1
    assert (index.incomplete(), incomplete_state(index)) == (frozenset(), False)
    ends = (
        lambda: apply(index, Cleared()),
        lambda: index.reset(W0),
        lambda: index.remove_worker("w0"),
        lambda: index.load(WorkerDump(W0)),
    )
    for end in ends:
        index.add_worker(W0, WorkerOptions())
        refuse(index)
        index.demote(W0, ttl_seconds=1, now=0.0)
        stats = index.worker_stats(W0)
        assert stats is not None
        assert stats.incomplete
        assert (index.incomplete(), incomplete_state(index)) == (frozenset((W0,)), True)
        index.check_invariants()
        end()
        assert index.incomplete() == frozenset()
        index.check_invariants()


def test_a_dump_says_that_a_limit_kept_blocks_out(index_factory: IndexFactory) -> None:
    index, other = new(index_factory), new(index_factory)
    refuse(index)
    dump = index.dump(W0)
    assert dump is not None
    assert dump.incomplete
    other.load(dump)
    assert (other.incomplete(), other.dump(W0)) == (frozenset((W0,)), dump)
    other.check_invariants()


def test_what_the_bound_drops_leaves_no_worker_incomplete(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=8)
    for number in range(0, 40, 4):
        apply(index, run(*range(number, number + 4)))
    assert index.stats().evicted
    assert index.incomplete() == frozenset()


def test_cache_groups_are_bounded(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, *(Stored((1,), local_hashes=(1,), group=g) for g in range(GROUP_LIMIT + 3)))
    assert ignored(index, Ignored.SKIPPED_GROUP) == 3
    assert device(index, 1) == {W0: 1}


def test_an_orphan_hash_stored_elsewhere_is_a_conflict(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(2, parent=1))
    apply(index, run(2))
    assert ignored(index, Ignored.HASH_CONFLICT) == 1
    assert device(index, 2) == {}
    # In a chain without a known parent, what follows a conflict is dropped with it.
    apply(index, run(7), Stored((6, 7, 8), parent=5, local_hashes=(6, 7, 8)))
    assert ignored(index, Ignored.HASH_CONFLICT) == 3
    assert index.stats().orphans == 2


def test_packed_hashes_must_be_whole(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(2**64 - 1))
    assert index.find_matches(struct.pack("<Q", 2**64 - 1), now=0.0).device == (1,)
    with pytest.raises(InvalidArgument, match="block_hashes"):
        index.find_matches(b"1234567", now=0.0)


def test_early_exit_stops_when_one_worker_is_left(index_factory: IndexFactory) -> None:
    index = new(index_factory, W0, W1)
    apply(index, run(*range(10)))
    apply(index, run(*range(4)), worker=W1)
    found = index.find_matches(list(range(10)), now=0.0, early_exit=True).by_worker()
    assert found[W1].device == 4
    assert 5 <= found[W0].device <= 10
    assert device(index, *range(10)) == {W0: 10, W1: 4}


def test_the_bound_drops_deep_blocks_of_the_largest_worker_first(index_factory: IndexFactory) -> None:
    index = new(index_factory, W0, W1, max_blocks=640)
    apply(index, run(*range(1000, 1100)), worker=W1)
    apply(index, run(*range(600)))
    stats = index.stats()
    assert stats.memberships <= 640
    assert stats.memberships + stats.evicted == 700
    assert device(index, *range(1000, 1100)) == {W1: 100}
    # Leaves go before their parents, so that what is left is one prefix.
    assert device(index, *range(600)) == {W0: stats.memberships - 100}
    assert stats.hidden == 0
    index.check_invariants()


def test_the_bound_keeps_what_was_used(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=128)
    chains = [tuple(range(n * 100, n * 100 + 10)) for n in range(12)]
    for chain in chains:
        apply(index, run(*chain))
    apply(index, run(*range(5000, 5010)))
    assert index.stats().evicted
    used = device(index, *chains[3])
    for n in range(60, 66):
        apply(index, run(*range(n * 100, n * 100 + 10)))
    assert device(index, *chains[3]) == used
    assert index.stats().memberships <= 128
    index.check_invariants()


def test_what_no_query_can_match_goes_before_any_rooted_block(index_factory: IndexFactory) -> None:
    index = new(index_factory, W0, W1, max_blocks=640)
    apply(index, run(*range(1000, 1100)), Removed((1000,)), worker=W1)
    apply(index, *(run(h + 10, parent=5) for h in range(100)), worker=W1)
    apply(index, run(*range(400)))
    stats = index.stats()
    assert (stats.hidden, stats.orphans, stats.evicted) == (99, 100, 0)
    # W0 is the larger one, and yet loses nothing.
    apply(index, run(*range(2000, 2100)))
    stats = index.stats()
    assert (device(index, *range(400)), device(index, *range(2000, 2100))) == ({W0: 400}, {W0: 100})
    assert (stats.memberships + stats.orphans, stats.evicted) == (630, 69)
    assert stats.orphans < 100
    index.check_invariants()


def test_a_block_stored_below_evicted_ones_proves_them_and_brings_them_back(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=640)
    apply(index, run(*range(1000, 1320)))
    apply(index, run(*range(400)))
    assert device(index, *range(1000, 1320))[W0] < 320
    apply(index, run(2000, 2001, parent=1319))
    assert device(index, *range(1000, 1320), 2000, 2001) == {W0: 322}
    stats = index.stats()
    assert stats.memberships <= 640
    assert (stats.hidden, stats.orphans) == (0, 0)
    index.check_invariants()


def test_what_the_engine_removed_after_it_was_evicted_does_not_come_back(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=640)
    apply(index, run(*range(1000, 1320)))
    apply(index, run(*range(400)))
    kept = device(index, *range(1000, 1320))[W0]
    apply(index, Removed((1318,)), run(2000, parent=1319))
    assert device(index, *range(1000, 1320), 2000) == {W0: kept}
    assert index.stats().orphans == 1
    # By its own name it comes back, and what is above it.
    apply(index, run(1316, parent=1315))
    assert device(index, *range(1000, 1320)) == {W0: 317}
    index.check_invariants()


def test_a_tier_change_brings_an_evicted_prefix_back(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=640)
    apply(index, run(*range(1000, 1320)))
    apply(index, run(*range(400)))
    apply(index, Stored((1319,), tier=Tier.HOST))
    assert device(index, *range(1000, 1320)) == {W0: 320}
    assert ignored(index, Ignored.UNKNOWN_MOVED) == 0
    index.check_invariants()


def test_what_was_evicted_before_history_was_lost_stays_away(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=64)
    apply(index, run(*range(100)))
    index.demote(W0, ttl_seconds=1, now=0.0)
    settle(index, 2.0)
    apply(index, run(100, parent=99))
    assert index.stats().memberships == 0
    assert index.stats().orphans == 1
    index.check_invariants()


def test_ghosts_are_as_many_as_blocks_may_be_at_most(index_factory: IndexFactory) -> None:
    index = new(index_factory, W0, W1, max_blocks=64)
    for n in range(20):
        hashes = tuple(range(n * 10, n * 10 + 10))
        for worker in (W0, W1):
            apply(index, run(*hashes), Removed(hashes), worker=worker)
    assert index.stats().ghosts == 64
    index.check_invariants()


def test_the_bound_makes_no_holes_above_blocks_that_stay(index_factory: IndexFactory) -> None:
    index = new(index_factory, W0, W1, max_blocks=256)
    # Both workers share prompts; each drop of the bound is one worker's, and queries use either's ends.
    for turn in range(60):
        prompt = [1, 2, 3 + turn % 3, *range(100 + 10 * turn, 110 + 10 * turn)]
        apply(index, run(*prompt), worker=(W0, W1)[turn % 2])
        device(index, 1, 2, 3 + (turn + 1) % 3, *range(100 + 5 * turn, 110 + 5 * turn))
        assert index.stats().hidden == 0
        index.check_invariants()
    assert index.stats().evicted > 256


def test_the_prefixes_used_last_are_the_ones_that_stay(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=640)
    chains = [tuple(range(n * 100, n * 100 + 10)) for n in range(200)]
    for chain in chains:
        device(index, *chains[0])
        apply(index, run(*chain))
    lengths = [device(index, *chain).get(W0, 0) for chain in chains]
    assert lengths[0] == 10
    assert set(lengths[145:]) == {10}
    assert set(lengths[1:130]) == {0}


def test_a_block_without_all_its_groups_goes_before_those_that_are_whole(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=640)
    both = [replace(run(*range(320)), group=group) for group in (0, 1)]
    apply(index, *both, run(*range(1000, 1300)))
    apply(index, *(replace(run(*range(2000, 2100)), group=group) for group in (0, 1)))
    assert (device(index, *range(320)), device(index, *range(2000, 2100))) == ({W0: 320}, {W0: 100})
    assert index.stats().evicted == 90
    index.check_invariants()


def test_orphans_are_under_the_bound_too(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=64)
    apply(index, *(run(h + 10, parent=5) for h in range(100)))
    assert index.stats().orphans <= 64
    index.check_invariants()


def test_removals_of_evicted_blocks_are_known(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_blocks=64)
    apply(index, run(*range(100)))
    apply(index, Removed(tuple(reversed(range(100)))))
    assert index.stats().memberships == 0
    assert ignored(index, Ignored.UNKNOWN_REMOVED) == 0
    apply(index, run(100, parent=99))
    assert device(index, *range(101)) == {}
    index.check_invariants()


@pytest.mark.slow
def test_memory_of_what_is_dropped_is_freed_as_fast_as_it_can_be_filled(index_factory: IndexFactory) -> None:
    def fill(index: BlockIndex, turn: int) -> None:
        hashes = range(10_000 * turn, 10_000 * turn + 2_000)
        apply(index, Cleared(), run(*hashes))
        index.demote(W0, ttl_seconds=1000, now=0.0)
        apply(index, run(*hashes))
        dump = index.dump(W0)
        assert dump is not None
        index.load(dump)
        index.load(dump)
        apply(index, Cleared())
        index.predict(W0, list(hashes), ttl_seconds=1000, now=0.0)

    index = new(index_factory)
    taken = []
    for turn in range(20):
        fill(index, turn)
        taken.append(index.stats().bytes)
    assert max(taken[10:]) <= 1.1 * max(taken[:10])
    index.check_invariants()


@pytest.mark.slow
def test_a_batch_may_clear_as_often_as_it_likes(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(*range(5000)))
    apply(index, *(event for n in range(70_000) for event in (Cleared(), run(n))))
    assert device(index, 69_999) == {W0: 1}
    settle(index)
    assert index.stats().blocks == 1
    index.check_invariants()


def test_predictions_are_pruned_soonest_to_expire_and_deepest_first(index_factory: IndexFactory) -> None:
    index = new(index_factory, max_predicted_blocks=100)
    assert index.predict(W0, list(range(60)), ttl_seconds=50, now=0.0) == 60
    assert index.predict(W0, list(range(1000, 1041)), ttl_seconds=100, now=0.0) == 41
    assert index.stats().predictions == 80
    assert index.find_matches(list(range(60)), now=0.0).predicted == (39,)
    assert index.find_matches(list(range(1000, 1041)), now=0.0).predicted == (41,)
    # Refreshed ones expire later; the others are pruned now.
    index.predict(W0, list(range(39)), ttl_seconds=200, now=0.0)
    assert index.predict(W0, list(range(2000, 2021)), ttl_seconds=300, now=0.0) == 21
    assert index.find_matches(list(range(60)), now=0.0).predicted == (39,)
    assert index.find_matches(list(range(1000, 1041)), now=0.0).predicted == (20,)
    index.check_invariants()


def test_predictions_that_come_and_go_leave_nothing_behind(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    for turn in range(3000):
        index.predict(W0, [1, 2, 3], ttl_seconds=1000, now=0.0)
        apply(index, run(1, 2, 3), Removed((1, 2, 3)))
        if turn % 1000 == 0:
            index.check_invariants()
    index.predict(W0, [1, 2, 3], ttl_seconds=10, now=0.0)
    assert index.find_matches([1, 2, 3], now=9.0).predicted == (3,)
    assert index.find_matches([1, 2, 3], now=10.0).predicted == ()
    assert index.stats().predictions == 0


@pytest.mark.skipif(not native_available(), reason="the extension is not built")
def test_dropped_content_is_freed_in_slices() -> None:
    index = new(NativeIndex, W0, W1)
    for first in range(0, 20_000, 1000):
        apply(index, run(*range(first, first + 1000)))
    index.remove_worker("w0")
    assert index.find_matches([0, 1], now=0.0).workers == ()
    assert index.maintain(now=0.0, budget=1000)
    settle(index)
    assert index.stats().blocks == 0
    index.check_invariants()


def test_a_dump_lists_holes_orphans_and_copies(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    index.apply(
        W0,
        EventBatch(
            (
                run(1, 2),
                run(3, parent=2, tier=Tier.HOST),
                run(2, parent=1),
                run(0),
                Removed((1,)),
                run(9, parent=8),
            )
        ),
        epoch=2,
        event_id=5,
    )
    one = (Copies(0, Tier.DEVICE, 1),)
    dump = WorkerDump(
        W0,
        epoch=2,
        last_event_id=5,
        groups=((0, True),),
        blocks=(
            DumpedBlock(0, -1, 0, one),
            DumpedBlock(None, -1, 1, ()),
            DumpedBlock(2, 1, 2, (Copies(0, Tier.DEVICE, 2),)),
            DumpedBlock(3, 2, 3, (Copies(0, Tier.HOST, 1),)),
        ),
        orphans=(DumpedOrphan(9, 8, 9, one),),
    )
    assert index.dump(W0) == dump
    other = new(index_factory)
    apply(other, run(77))
    other.load(dump)
    assert other.dump(W0) == dump
    assert other.cursor(W0) == (2, 5)
    assert device(other, 77) == {}
    apply(other, run(1), run(8))
    assert device(other, 1, 2, 3) == {W0: 2}
    assert device(other, 8, 9) == {W0: 2}


ONE = (Copies(0, Tier.DEVICE, 1),)


@pytest.mark.parametrize(
    ("field", "parts"),
    [
        ("blocks.0", {"blocks": (DumpedBlock(1, 0, 1, ONE),)}),
        ("blocks.0", {"blocks": (DumpedBlock(1, -2, 1, ONE),)}),
        ("blocks.0", {"blocks": (DumpedBlock(1, -1, 1, ()),)}),
        ("blocks.0", {"blocks": (DumpedBlock(None, -1, 1, ONE),)}),
        ("blocks.1", {"blocks": (DumpedBlock(1, -1, 1, ONE), DumpedBlock(1, 0, 2, ONE))}),
        ("blocks.0", {"blocks": (DumpedBlock(1, -1, 1, (Copies(1, Tier.DEVICE, 1),)),)}),
        ("blocks.0", {"blocks": (DumpedBlock(1, -1, 1, (Copies(0, Tier.DEVICE, 0),)),)}),
        ("orphans.0", {"orphans": (DumpedOrphan(1, 2, 3, ()),)}),
        ("orphans.0", {"blocks": (DumpedBlock(1, -1, 1, ONE),), "orphans": (DumpedOrphan(2, 1, 3, ONE),)}),
        ("groups.1", {"groups": ((0, True), (0, False))}),
        ("groups.2", {"groups": ((0, True), (2, True), (1, True))}),
        ("groups", {"groups": tuple((group, True) for group in range(GROUP_LIMIT + 1))}),
    ],
)
def test_a_dump_that_contradicts_itself_is_refused_and_changes_nothing(
    index_factory: IndexFactory, field: str, parts: dict[str, object]
) -> None:
    index = new(index_factory)
    apply(index, run(5))
    with pytest.raises(InvalidArgument, match=field):
        index.load(WorkerDump(W0, **{"groups": ((0, True),), **parts}))  # type: ignore[arg-type]
    assert device(index, 5) == {W0: 1}


def test_a_dump_of_an_unknown_worker_is_refused(index_factory: IndexFactory) -> None:
    with pytest.raises(NotFound):
        new(index_factory).load(WorkerDump(W1))


def test_stats_count_what_is_there(index_factory: IndexFactory) -> None:
    index = new(index_factory, W0, W1)
    apply(index, run(1, 2, 3), Removed((2,)))
    apply(index, run(1, 2), run(9, parent=8), worker=W1)
    index.find_matches([1], now=0.0)
    stats = index.stats()
    assert (stats.blocks, stats.memberships, stats.workers) == (3, 4, 2)
    assert (stats.orphans, stats.hidden, stats.ghosts, stats.queries) == (1, 1, 1, 1)
    assert stats.bytes > 0
    assert index.workers() == (W0, W1)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("block_size", {"block_size": 0}),
        ("max_blocks", {"block_size": 4, "max_blocks": -1}),
        ("max_predicted_blocks", {"block_size": 4, "max_predicted_blocks": 0}),
        ("prune_ratio", {"block_size": 4, "prune_ratio": 1.5}),
    ],
)
def test_arguments_out_of_range_are_named(index_factory: IndexFactory, field: str, arguments: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=field):
        index_factory(**arguments)  # type: ignore[arg-type]


def seconds_of_removals(factory: IndexFactory, orphans: int) -> float:
    """CPU time of removing some of the orphans of one parent, the youngest first."""
    index = new(factory)
    names = list(range(1, orphans + 1))
    for start in range(0, orphans, 1024):
        apply(index, *(Stored((name,), parent=10**9, local_hashes=(name,)) for name in names[start : start + 1024]))
    removals = EventBatch(tuple(Removed((name,)) for name in names[-1500:][::-1]))
    seconds = cpu_seconds(lambda: index.apply(W0, removals))
    stats = index.worker_stats(W0)
    assert stats is not None
    assert stats.orphans == orphans - 1500
    apply(index, run(10**9))
    assert device(index, 10**9, 1) == {W0: 2}
    if orphans < 10_000:  # a parent's children are compared with one another
        index.check_invariants()
    return seconds


@pytest.mark.slow
def test_removing_an_orphan_costs_the_same_however_many_wait_for_its_parent(index_factory: IndexFactory) -> None:
    few = min(seconds_of_removals(index_factory, 2_000) for _ in range(3))
    many = min(seconds_of_removals(index_factory, 60_000) for _ in range(2))
    assert many < 10 * few


def test_a_block_has_so_many_engine_hashes_at_most_and_further_ones_are_counted(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    for name in range(100, 100 + TWIN_LIMIT + 5):
        apply(index, Stored((name, name + 1000), local_hashes=(1, name)))
    assert ignored(index, Ignored.TWIN_LIMIT) == 5
    assert ignored(index, Ignored.HASH_CONFLICT) == 0
    # What follows a block that was refused is where it would be.
    assert device(index, 1, 100 + TWIN_LIMIT + 4) == {W0: 2}
    dump = index.dump(W0)
    assert dump is not None
    other = new(index_factory)
    other.load(dump)
    assert other.dump(W0) == dump
    index.check_invariants()


def test_of_too_many_engine_hashes_the_first_without_copies_goes(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    names = range(100, 100 + TWIN_LIMIT)
    for name in names:
        apply(index, Stored((name,), local_hashes=(1,)))
    index.demote(W0, ttl_seconds=1000, now=0.0)
    apply(index, Stored(tuple(name for name in names if name not in (101, 103))))
    apply(index, Stored((500,), local_hashes=(1,)))
    apply(index, run(7, parent=103), run(8, parent=101))
    assert device(index, 1, 7) == {W0: 2}
    stats = index.worker_stats(W0)
    assert stats is not None
    assert stats.orphans == 1
    apply(index, Stored((501,), local_hashes=(1,)), Stored((502,), local_hashes=(1,)))
    assert ignored(index, Ignored.TWIN_LIMIT) == 1
    index.check_invariants()


def test_an_orphan_that_would_be_one_engine_hash_too_many_is_dropped_when_its_parent_comes(
    index_factory: IndexFactory,
) -> None:
    index = new(index_factory)
    for name in range(100, 100 + TWIN_LIMIT + 3):
        apply(index, Stored((name,), parent=50, local_hashes=(1,)))
    apply(index, run(50))
    assert ignored(index, Ignored.TWIN_LIMIT) == 3
    stats = index.worker_stats(W0)
    assert stats is not None
    assert (stats.orphans, stats.device_copies) == (0, TWIN_LIMIT + 1)
    index.check_invariants()


def seconds_of_twins(factory: IndexFactory, names: int) -> float:
    """CPU time of a batch that stores one content under many engine hashes."""
    index = new(factory)
    batch = EventBatch(tuple(Stored((name,), local_hashes=(1,)) for name in range(1, names + 1)))
    return cpu_seconds(lambda: index.apply(W0, batch))


def test_one_content_under_many_engine_hashes_costs_in_proportion(index_factory: IndexFactory) -> None:
    few = min(seconds_of_twins(index_factory, 2_000) for _ in range(3))
    many = min(seconds_of_twins(index_factory, 20_000) for _ in range(2))
    assert many < 30 * few


def test_a_batch_has_so_many_blocks_at_most_and_further_events_are_counted(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(1, 2))
    # Unknown hashes cost next to nothing, and are blocks all the same.
    removed = Removed((99,) * (BATCH_LIMIT // 4))
    apply(index, removed, removed, removed, removed, Removed((2,)), run(3), Cleared(), run(4))
    assert ignored(index, Ignored.BATCH_LIMIT) == 3
    assert ignored(index, Ignored.UNKNOWN_REMOVED) == BATCH_LIMIT
    assert device(index, 1) == {}
    assert index.incomplete() == {W0}
    apply(index, run(5))
    assert device(index, 5) == {W0: 1}


def test_blocks_whose_removal_is_more_than_a_batch_may_have_are_not_found_any_more(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(1, 2))
    apply(index, *[Removed((99,) * (BATCH_LIMIT // 4))] * 4, Removed((2,)))
    assert ignored(index, Ignored.BATCH_LIMIT) == 1
    assert device(index, 1, 2) == {}
    assert index.incomplete() == {W0}
    apply(index, run(1, 2))
    assert device(index, 1, 2) == {W0: 2}


def test_blocks_stored_again_without_a_removal_are_counted_from_the_first_one_asked_for(
    index_factory: IndexFactory,
) -> None:
    index = new(index_factory)
    apply(index, run(1, 2, 3, 4), run(9, parent=2))
    assert index.repeated(W0, (1, 2, 3, 4), first=0) == 0
    apply(index, run(1, 2), run(3, parent=2))
    assert [index.repeated(W0, (1, 2, 3, 4, 5), first=first) for first in range(6)] == [3, 2, 1, 0, 0, 0]
    assert index.repeated(W0, (1, 2, 9), first=0) == 2
    assert (
        index.repeated(W0, (), first=0) == index.repeated(W0, (7,), first=0) == index.repeated(W1, (1,), first=0) == 0
    )


def test_a_block_that_was_evicted_and_computed_again_is_not_repeated(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    apply(index, run(1, 2), Removed((1, 2)), run(1, 2))
    assert index.repeated(W0, (1, 2), first=0) == 0
    # Nor is one of two names, such as of two adapters, or one that is also on another tier.
    apply(index, Stored((11,), local_hashes=(1,)), run(1, 2, tier=Tier.HOST), run(1, 2, tier=Tier.HOST))
    assert index.repeated(W0, (1, 2), first=0) == 0


def test_a_rank_whose_copies_are_not_counted_repeats_nothing(index_factory: IndexFactory) -> None:
    index = new(index_factory)
    index.add_worker(W0, WorkerOptions(copies=CopyMode.SET))
    apply(index, run(1, 2), run(1, 2))
    assert index.repeated(W0, (1, 2), first=0) == 0
