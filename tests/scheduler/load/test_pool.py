"""The workers of a pool by slot, while they come, change and go."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.scheduler_builders import request, scheduler, worker
from support.seeds import test_seed

from kvscout_common.hashing import native_available
from kvscout_common.worker import WorkerSpec
from kvscout_scheduler.load.pool import Pool
from kvscout_scheduler.scheduler import Scheduler


def only_pool(made: Scheduler) -> Pool:
    (pool,) = made.workers
    return pool


def layout(pool: Pool) -> tuple[Any, ...]:
    return pool.order, pool.slots_of, pool.formats, pool.everyone, pool.places


def test_a_worker_that_comes_takes_its_place_as_if_all_were_arranged_anew() -> None:
    random = Random(test_seed())
    made, known = scheduler(), dict[str, WorkerSpec]()
    for _ in range(400):
        name = f"w{random.randrange(40)}"
        spec = worker(
            name,
            dp_size=random.choice((1, 2, 8)),
            dp_start_rank=random.choice((0, 4)),
            block_size=random.choice((16, 32)),
        )
        if name not in known:
            made.workers.worker_added(spec)
            known[name] = spec
        elif random.random() < 0.5:
            made.workers.worker_updated(known[name], spec)
            known[name] = spec
        else:
            made.workers.worker_removed(known.pop(name), "removed")
        for pool in made.workers:
            found = layout(pool)
            assert [pool.ranks[slot] for slot in pool.order] == sorted(
                rank for one in known.values() for rank in one.ranks
            )
            pool._reorder()
            assert layout(pool) == found


@pytest.mark.skipif(not native_available(), reason="the load of the reference has no arrangement")
def test_a_fleet_that_registers_is_arranged_once_when_a_request_comes() -> None:
    made, arranged = scheduler("w"), 0
    load: Any = only_pool(made).load
    arrange = load._arrange

    def counted(*arguments: Any) -> None:
        nonlocal arranged
        arranged += 1
        arrange(*arguments)

    load._arrange = counted
    for number in range(100):
        made.workers.worker_added(worker(f"w{number}", dp_size=8))
    assert arranged == 0
    for number in range(1, 4):
        made.select(request([number]))
    assert arranged == 1
