"""Sets of slots: the same as asking each worker, at a price that does not grow with their number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from support.scheduler_builders import ManualClock, request, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout_common.errors import KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.worker import Adapter, WorkerRank, WorkerSpec
from kvscout_scheduler.load.feature_sets import MAX_FEATURES
from kvscout_scheduler.load.pool import Pool
from kvscout_scheduler.policies.eligibility import Exclusions, constraints_of, eligible, with_room
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import SelectionRequest
from kvscout_scheduler.values.slot_sets import in_order, large_slot_set, packed, slot_set, slots_in
from kvscout_scheduler.values.thresholds import BusyThresholds

NAMES = [f"w{number}" for number in range(9)]


def test_sets_are_made_and_read_in_each_way() -> None:
    rng = Random(test_seed())
    for size in (1, 2, 63, 64, 65, 300):
        for _ in range(20):
            slots = rng.sample(range(size), rng.randrange(size + 1))
            made = slot_set(slots)
            assert made == large_slot_set(slots, size) == int.from_bytes(packed(made), "little")
            assert list(slots_in(made)) == sorted(slots)
            order = rng.sample(range(size), rng.randrange(size + 1))
            assert in_order(made, order) == [slot for slot in order if slot in slots]


def plainly(pool: Pool, selection: SelectionRequest, now: float) -> list[int]:
    """Who is eligible, and has room if anyone has, by asking each worker everything; empty: nobody is."""
    slots = [
        slot
        for slot in pool.order
        if all(demand.fits(pool.ranks[slot], pool.specs[slot]) for demand in constraints_of(selection.constraints))
        and not pool.specs[slot].draining
    ]
    among = (
        [slot for slot in pool.order if not pool.specs[slot].draining]
        if selection.constraints.pinned_worker_id
        else slots
    )
    ends = [(pool.cooldown_until[slot], pool.ranks[slot], slot) for slot in among if slot in pool.cooldown_until]
    last = sorted(each for each in ends if each[0] > now)[::-1][: len(among) // 2]
    tokens = pool.load.prefill_tokens
    slots = [slot for slot in slots if slot not in {slot for _, _, slot in last} and tokens[slot] <= 700]
    roomy = [slot for slot in slots if tokens[slot] <= 0.5 * (pool.specs[slot].max_num_batched_tokens or 10_000)]
    return roomy or slots


def test_random_workers_are_eligible_as_if_each_was_asked() -> None:
    rng, clock = Random(test_seed()), ManualClock()
    made = scheduler(clock=clock, queue_threshold=0.5, thresholds=BusyThresholds(None, 700))
    here: dict[str, WorkerSpec] = {}
    outcomes = {True: 0, False: 0}
    for number in range(3000):
        clock.advance(rng.random())
        happens(rng, made, here, number)
        if not here:
            continue
        asked = request(isl=1, **draw_constraints(rng))
        (pool,) = made.workers
        pool.judge(made.thresholds.get("default", asked.model))
        expected, dropped = plainly(pool, asked, clock()), Exclusions()
        for note in (None, dropped):
            try:
                found = eligible(pool, asked, clock(), note)
                found = with_room(pool, found, note) or found
            except KvscoutError:
                found = 0
            assert pool.members(found) == expected, f"after {number} events, {asked.constraints}"
        if expected:
            assert set(dropped.by_slot()) == set(pool.order) - set(expected)
        outcomes[bool(expected)] += 1
    check_scheduler(made)
    assert min(outcomes.values()) > 100, outcomes


def happens(rng: Random, made: Scheduler, here: dict[str, WorkerSpec], number: int) -> None:
    """One random event in the life of workers."""
    name, what = rng.choice(NAMES), rng.randrange(6)
    old = here.get(name)
    if what == 0 and old is not None and rng.random() < 0.3:
        made.workers.worker_removed(here.pop(name), "removed")
    elif what <= 1:
        labels = {"zone": rng.choice("ab")} if rng.random() < 0.8 else {}
        new = worker(
            name,
            labels=labels,
            adapters=tuple(Adapter(name) for name in "lm" if rng.random() < 0.5),
            draining=rng.random() < 0.1,
            dp_size=2 if rng.random() < 0.2 or old is None else old.dp_size,
            max_num_batched_tokens=rng.choice((0, 1000)) if rng.random() < 0.2 or old is None else 1000,
        )
        here[name] = new
        if old is None:
            made.workers.worker_added(new)
        else:
            made.workers.worker_updated(old, new)
    elif what == 2 and old is not None:
        made.cool_downs.report("default", WorkerRank(name, 0), rng.random() * 20)
    elif what == 3:
        for booking in list(made.bookings)[:2]:
            made.free(booking.key)
    elif old is not None:
        with suppress(KvscoutError):
            made.select_and_reserve(request(isl=rng.randint(1, 900), request_id=f"r{number}"))


def draw_constraints(rng: Random) -> dict[str, Any]:
    """What a request may want."""
    constraints: list[dict[str, Any]] = [
        {},
        {"pinned_worker_id": rng.choice(NAMES)},
        {"pinned_worker_id": rng.choice(NAMES), "pinned_dp_rank": rng.randrange(2)},
        {"allowed_worker_ids": frozenset(rng.sample(NAMES, 4))},
        {"excluded_worker_ids": frozenset(rng.sample(NAMES, 4))},
        {"required_labels": {"zone": rng.choice("ab")}},
        {"lora_name": rng.choice("lmn")},
        {"lora_name": "l", "required_labels": {"zone": "a"}, "excluded_worker_ids": frozenset({"w0"})},
    ]
    return rng.choice(constraints)


def steps_of(operation: Callable[[], object]) -> int:
    """Lines of Python that an operation runs, each round of a loop anew."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(None)
    return count


def unwell(workers: int, policy: str) -> Scheduler:
    """Workers of which one cools down, one drains, one is busy, and one has no room."""
    specs = [
        worker(
            f"w{number:04d}",
            max_num_batched_tokens=1000,
            labels={"zone": "ab"[number % 2]},
            adapters=(Adapter("l"),) if number % 3 else (),
            draining=number == 5,
        )
        for number in range(workers)
    ]
    made = scheduler(*specs, queue_threshold=0.5, thresholds=BusyThresholds(None, 700), policy=policy)
    made.cool_downs.report("default", WorkerRank("w0007", 0))
    for name, isl in (("w0008", 701), ("w0009", 501)):
        made.select_and_reserve(request(isl=isl, request_id=name, pinned_worker_id=name))
    return made


@pytest.mark.skipif(not native_available(), reason="the reference looks at each worker")
@pytest.mark.parametrize(
    "selection",
    [
        {},
        {"excluded_worker_ids": frozenset({"w0003", "w0004"})},
        {"allowed_worker_ids": frozenset({"w0001", "w0002"})},
        {"pinned_worker_id": "w0001"},
        {"required_labels": {"zone": "a"}, "lora_name": "l"},
    ],
    ids=["anyone", "excluded", "allowed", "pinned", "features"],
)
def test_a_choice_takes_as_many_steps_however_many_workers_there_are(selection: dict[str, Any]) -> None:
    steps = []
    for workers in (64, 1024):
        made = unwell(workers, "kv-time")
        for _ in range(2):
            # What is kept is there from the first one on.
            taken = steps_of(partial(made.select, request(isl=1, **selection)))
        steps.append(taken)
    assert steps[1] <= 1.1 * steps[0], f"steps of 64 and of 1,024 workers: {steps}"


def test_what_changes_nobodys_place_takes_as_many_steps_however_many_workers_there_are() -> None:
    steps = []
    for workers in (64, 1024):
        made = unwell(workers, "round-robin")
        assert made.select(request(isl=1, lora_name="l")).rank.worker_id != "w0000"
        old, new = (
            worker("w0000", max_num_batched_tokens=1000, labels={"zone": "a"}, adapters=adapters)
            for adapters in ((), (Adapter("new"),))
        )
        steps.append(steps_of(partial(made.workers.worker_updated, old, new)))
        assert made.select(request(isl=1, lora_name="new")).rank.worker_id == "w0000"
    assert steps[1] <= 1.1 * steps[0], f"steps of 64 and of 1,024 workers: {steps}"


def test_the_sets_that_are_kept_of_features_are_few() -> None:
    made = scheduler(worker("a", adapters=tuple(Adapter(f"l{number}") for number in range(3 * MAX_FEATURES))), "b")
    (pool,) = made.workers
    for number in range(3 * MAX_FEATURES):
        assert made.select(request(isl=1, lora_name=f"l{number}")).rank.worker_id == "a"
        assert pool.with_adapter("l0"), "asked for now and then"
    kept = pool._features._cached
    assert len(kept) == MAX_FEATURES
    assert "l0" in kept


def test_few_members_are_listed_by_rank_as_many_are_and_long_lists_of_names_are_sets() -> None:
    rng = Random(test_seed())
    names = [f"w{number:03d}" for number in range(150)]
    made = scheduler(*rng.sample(names, len(names)))
    (pool,) = made.workers
    for few in (*range(12), 60, 100, 149, 150):
        some = rng.sample(names, few)
        members = pool.named(frozenset(["nobody", *some]))
        assert members == slot_set(pool.slot_of[name, 0] for name in some)
        assert [pool.ranks[slot].worker_id for slot in pool.members(members)] == sorted(some)
