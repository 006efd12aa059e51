"""What must not cost more the more worker ranks there are: CPU time at ten times the ranks is at most twice."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator

import pytest

from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_common.hashing import native_available
from kvscout_common.worker import WorkerRank

pytestmark = pytest.mark.skipif(not native_available(), reason="the reference walks over all workers")

FEW, MANY = 1_000, 10_000
SEED = random.SystemRandom().randrange(2**32)
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


def cpu_ratio(few: Callable[[], object], many: Callable[[], object]) -> float:
    """CPU time of `many` divided by that of `few`: the least of some rounds each, in turns."""
    times: dict[Callable[[], object], float] = {}
    for _ in range(15):
        for work in (few, many):
            began = time.process_time()
            work()
            times[work] = min(times.get(work, float("inf")), time.process_time() - began)
    return times[many] / times[few]


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


def test_looking_for_work_costs_the_same_however_many_ranks_have_none() -> None:
    works = []
    for ranks in (FEW, MANY):
        index = fleet(ranks)
        index.maintain(now=0.0)
        works.append(lambda index=index: [index.maintain(now=0.0) for _ in range(200)])
    assert cpu_ratio(*works) <= 2, SEED
