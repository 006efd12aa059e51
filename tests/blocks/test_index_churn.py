"""An index at its bound stays as large as it is; `make soak` shows it over millions of events.

`KVSCOUT_TEST_SEED` reruns a seed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from support.index_churn import Churn, Load, requests
from support.index_scenarios import IndexFactory, settle
from support.seeds import test_seed

SEED = test_seed()
PASSES = 3
EVENTS_A_PASS = 4_000
SAMPLES_A_PASS = 5
LOAD = Load(engines=3, capacity=300, max_blocks=600, live_sessions=32, requests_a_clear=500)
MOST_GROWTH = 1.05
SPARE = 200
"""Objects or bytes besides: a leak has one for each of thousands of events."""


@pytest.fixture(autouse=True)
def _without_what_was_there_before() -> Iterator[None]:
    """Leave out of what the collector counts the objects of pytest and of earlier tests, hundreds of thousands."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.slow
def test_the_same_churn_again_needs_no_more_than_the_first_time(index_factory: IndexFactory) -> None:
    index = index_factory(16, max_blocks=LOAD.max_blocks)
    most_objects, most_bytes, left = [], [], []
    for _ in range(PASSES):
        samples = list(Churn(index, LOAD, requests(LOAD, SEED)).run(EVENTS_A_PASS, SAMPLES_A_PASS, objects))
        index.check_invariants()
        entries = [sample.stats.memberships + sample.stats.orphans for sample in samples]
        assert max(entries) <= LOAD.max_blocks, f"KVSCOUT_TEST_SEED={SEED}"
        assert samples[-1].stats.evicted > LOAD.max_blocks, "the bound was at work"
        most_objects.append(max(sample.measured for sample in samples))
        most_bytes.append(max(sample.stats.bytes for sample in samples))
        for worker in index.workers():
            index.remove_rank(worker)
        settle(index)
        index.check_invariants()
        stats = index.stats()
        assert (stats.blocks, stats.memberships, stats.orphans, stats.ghosts) == (0, 0, 0, 0)
        left.append(objects())
    for name, counted in (("objects", most_objects), ("bytes", most_bytes), ("objects of an empty index", left)):
        most = MOST_GROWTH * counted[0] + SPARE
        assert max(counted) <= most, f"{name} of each pass: {counted}; KVSCOUT_TEST_SEED={SEED}"
