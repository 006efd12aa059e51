"""What must not cost more the more worker ranks there are: CPU time at ten times the ranks is at most twice."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator

import pytest
from support.cpu_cost import cpu_ratio
from support.seeds import test_seed

from kvscout_blocks.bytes.events import EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import GHOST_LIMIT, SLICE, WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.hashing import native_available
from kvscout_common.worker import WorkerRank

pytestmark = pytest.mark.skipif(not native_available(), reason="the reference walks over all workers")

FEW, MANY = 1_000, 10_000
SEED = test_seed()
BLOCKS = 4
"""Of one event."""


def fleet(ranks: int, *, max_blocks: int = 0) -> NativeIndex:
    """An index with so many empty ranks."""
    index = NativeIndex(16, max_blocks=max_blocks)
    for number in range(ranks):
        index.add_worker(WorkerRank(f"w-{number // 8}", number % 8), WorkerOptions())
    return index


def stores(index: NativeIndex, rng: random.Random) -> Iterator[Callable[[], object]]:
    """Calls that store a prompt each, of one rank after the other."""
    for rank in itertools.cycle(index.workers()):
        hashes = tuple(rng.getrandbits(64) for _ in range(BLOCKS))
        batch = EventBatch((Stored(hashes, None, block_size=16, local_hashes=hashes),))
        yield lambda rank=rank, batch=batch: index.apply(rank, batch)  # type: ignore[misc]  # bound early


def test_the_state_of_an_index_is_counted_as_it_changes() -> None:
    few, many = fleet(FEW), fleet(MANY)
    for index in (few, many):
        for store in itertools.islice(stores(index, random.Random(SEED)), len(index.workers())):
            store()
    assert many.stats().memberships == 10 * few.stats().memberships == MANY * BLOCKS

    def work(index: NativeIndex) -> Callable[[], object]:
        return lambda: [index.stats() for _ in range(200)]

    assert cpu_ratio(work(few), work(many)) <= 2, SEED


def test_an_event_of_a_full_index_costs_the_same_however_many_ranks_share_it() -> None:
    bound = MANY * BLOCKS
    works = []
    for ranks in (FEW, MANY):
        index = fleet(ranks, max_blocks=bound)
        calls = stores(index, random.Random(SEED))
        # Blocks, then ghosts up to the bound.
        for store in itertools.islice(calls, 2 * bound // BLOCKS + 1_000):
            store()
        assert index.stats().ghosts == bound, SEED

        def work(calls: Iterator[Callable[[], object]] = calls) -> None:
            for store in itertools.islice(calls, 400):
                store()

        works.append(work)
    assert cpu_ratio(*works) <= 2, SEED


def test_removed_blocks_take_as_much_memory_however_many_ranks_the_caches_are_divided_among() -> None:
    few, many, blocks = 8, 80, 80 * 4_096
    rng = random.Random(SEED)
    # More than any rank remembers, the same of each.
    prompts = [tuple(rng.getrandbits(64) for _ in range(1_024)) for _ in range(2 * GHOST_LIMIT // 1_024)]
    reserved = {}
    for ranks in (few, many):
        index = NativeIndex(16)
        for number in range(ranks):
            rank = WorkerRank(f"w-{number}", 0)
            index.add_worker(rank, WorkerOptions(total_kv_blocks=blocks // ranks))
            # It has a second tier: what it removed may be requested again.
            index.apply(rank, EventBatch((Stored((1,), local_hashes=(1,), block_size=16, tier=Tier.HOST),)))
            for hashes in prompts:
                stored = Stored(hashes, None, block_size=16, local_hashes=hashes)
                index.apply(rank, EventBatch((stored, Removed(hashes))))
        while index.maintain(now=0.0):
            pass
        assert index.stats().ghosts >= blocks, SEED
        reserved[ranks] = index.stats().bytes
    assert reserved[many] <= 2 * reserved[few], SEED


def test_a_run_is_cut_at_the_same_cost_however_many_ranks_have_no_part_of_it() -> None:
    works = []
    for ranks in (FEW, MANY):
        index = fleet(ranks)
        rank, rng = index.workers()[0], random.Random(SEED)
        cuts: deque[EventBatch] = deque()
        for _ in range(15 * 100):
            run, fork = tuple(rng.getrandbits(64) for _ in range(16)), (rng.getrandbits(64),)
            index.apply(rank, EventBatch((Stored(run, None, block_size=16, local_hashes=run),)))
            # Near its end, so that the tail is the new part.
            cuts.append(EventBatch((Stored(fork, run[12], block_size=16, local_hashes=fork),)))

        def work(index: NativeIndex = index, rank: WorkerRank = rank, cuts: deque[EventBatch] = cuts) -> None:
            for _ in range(100):
                index.apply(rank, cuts.popleft())

        works.append(work)
    assert cpu_ratio(*works) <= 2, SEED


def test_a_rank_that_is_removed_has_a_slice_of_those_that_wait_drained_and_no_more() -> None:
    blocks, index = 40 * SLICE, fleet(5_000)
    ranks, rng = index.workers(), random.Random(SEED)
    hashes = [rng.getrandbits(64) for _ in range(blocks)]
    for first in range(0, blocks, SLICE):
        run = tuple(hashes[first : first + SLICE])
        index.apply(ranks[0], EventBatch((Stored(run, None, block_size=16, local_hashes=run),)))
    left = [blocks]
    for rank in ranks:
        index.remove_rank(rank)
        left.append(index.stats().blocks)
    assert max(before - after for before, after in itertools.pairwise(left)) <= SLICE + 16, SEED
    assert left[-1] == 0
    index.check_invariants()


def test_looking_for_work_costs_the_same_however_many_ranks_have_none() -> None:
    works = []
    for ranks in (FEW, MANY):
        index = fleet(ranks)
        index.maintain(now=0.0)
        works.append(lambda index=index: [index.maintain(now=0.0) for _ in range(200)])
    assert cpu_ratio(*works) <= 2, SEED
