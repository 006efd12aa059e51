"""Requests that wait: when, in which order, and what is left of those whose callers went away."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.scheduler_builders import ManualClock, key, loads, request, reserve, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import AlreadyExists, Cancelled, Draining, KvscoutError, NotFound, ResourceExhausted
from kvscout_scheduler.rpc.listing import list_active_requests
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.reservation import FreeOutcome

BUDGET = 1000


def limited(*names: str, clock: ManualClock | None = None, **settings: Any) -> Scheduler:
    """Workers that make a request wait above 500 active prefill tokens each."""
    specs = [worker(name, max_num_batched_tokens=BUDGET) for name in names]
    return scheduler(*specs, clock=clock, **{"queue_threshold": 0.5, **settings})


class Caller:
    """Asks for a booking and keeps what it is told."""

    def __init__(self, made: Scheduler, request_id: str, *, isl: int = 100, **fields: Any) -> None:
        self.told: list[Decision | KvscoutError] = []
        self.made = made
        self.answer = self.told.append
        self.request = request(isl=isl, request_id=request_id, **fields)
        self._waiter = made.reserve_or_wait(self.request, self.answer)

    def go(self) -> None:
        """Waits no more."""
        assert self._waiter is not None
        self.made.waiting.leave(self._waiter)

    @property
    def waits(self) -> bool:
        return not self.told

    @property
    def worker(self) -> str:
        (only,) = self.told
        assert isinstance(only, Decision), only
        return only.rank.worker_id

    @property
    def error(self) -> KvscoutError:
        (only,) = self.told
        assert isinstance(only, KvscoutError), only
        return only


def test_s9_a_request_waits_only_while_all_workers_are_over_the_threshold() -> None:
    made = limited("a", "b")
    reserve(made, "long", "a", isl=501)
    assert Caller(made, "r1").worker == "b"
    reserve(made, "longer", "b", isl=501)
    waiting = Caller(made, "r2")
    assert waiting.waits
    assert made.free(key("long")) is FreeOutcome.FREED
    assert waiting.worker == "a"
    assert (made.stats.queued, sum(made.stats.queue_waits.counts)) == (1, 1)


def test_the_end_of_a_prefill_makes_room_too() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    waiting = Caller(made, "r")
    made.mark_prefill_complete(key("long"))
    assert waiting.worker == "a"


def test_exactly_at_the_threshold_nobody_waits() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=500)
    assert Caller(made, "r").worker == "a"


def test_a_worker_without_a_budget_makes_nobody_wait() -> None:
    made = scheduler("a", queue_threshold=0.0)
    reserve(made, "long", "a", isl=100_000)
    assert Caller(made, "r").worker == "a"


def test_without_a_threshold_nobody_waits() -> None:
    made = limited("a", queue_threshold=None)
    reserve(made, "long", "a", isl=100_000)
    assert Caller(made, "r").worker == "a"


def test_s9_as_room_comes_priority_goes_first_then_who_came_first() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    callers = [Caller(made, f"r{number}", isl=501, priority=number % 2) for number in range(4)]
    gone = ["long"]
    for _ in range(4):
        made.free(key(gone[-1]))
        gone.append(next(f"r{n}" for n, caller in enumerate(callers) if not caller.waits and f"r{n}" not in gone))
    assert gone[1:] == ["r1", "r3", "r0", "r2"]


def test_one_who_waits_for_one_worker_holds_up_nobody_else() -> None:
    made = limited("a", "b")
    reserve(made, "on-a", "a", isl=501)
    reserve(made, "on-b", "b", isl=501)
    pinned, free = Caller(made, "pinned", pinned_worker_id="a"), Caller(made, "free")
    made.free(key("on-b"))
    assert pinned.waits
    assert free.worker == "b"
    # Who comes now may go past as well, and does not take what the pinned one waits for.
    assert Caller(made, "later").worker == "b"
    made.free(key("on-a"))
    assert pinned.worker == "a"


def test_s9_the_line_is_bounded_and_says_when_to_try_again() -> None:
    made = limited("a", queue_limit=2)
    reserve(made, "long", "a", isl=501)
    waiting = [Caller(made, "r1"), Caller(made, "r2")]
    with pytest.raises(ResourceExhausted, match="2 requests wait") as refused:
        Caller(made, "r3")
    assert refused.value.retry_after_seconds
    made.free(key("long"))
    assert [caller.worker for caller in waiting] == ["a", "a"]


def test_s9_a_waiter_whose_caller_went_away_leaves_nothing() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    gone = Caller(made, "r")
    gone.go()
    made.free(key("long"))
    assert gone.waits
    assert loads(made) == {"a": (0, 0, 0)}
    assert len(made.waiting) == 0


def test_freeing_a_waiter_takes_it_out_and_tells_it() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    waiting = Caller(made, "r", attempt_id=7)
    assert made.free(key("r"), 7) is FreeOutcome.DEQUEUED
    assert isinstance(waiting.error, Cancelled)
    with pytest.raises(Cancelled):
        Caller(made, "r", attempt_id=7)
    made.free(key("long"))
    assert loads(made) == {"a": (0, 0, 0)}


def test_a_repeated_call_takes_the_place_and_brings_its_own_overlaps() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    first, other = Caller(made, "r", attempt_id=1, isl=600), Caller(made, "s", isl=600)
    again = Caller(made, "r", attempt_id=1, isl=700)
    assert isinstance(first.error, Cancelled)
    # The first caller's going away is not the second's.
    first.go()
    made.free(key("long"))
    assert again.worker == "a"
    assert other.waits
    assert loads(made)["a"][1] == 700


def test_another_attempt_of_a_waiter_is_refused() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    Caller(made, "r", attempt_id=1)
    with pytest.raises(AlreadyExists):
        Caller(made, "r", attempt_id=2)


def test_a_waiter_is_told_when_nobody_is_left_to_wait_for() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    waiting = Caller(made, "r")
    made.workers.worker_removed(worker("a", max_num_batched_tokens=BUDGET), "removed")
    made.expire()
    assert "has no aggregated worker now" in str(waiting.error)


def test_a_worker_that_comes_takes_who_waits() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    waiting = Caller(made, "r")
    made.workers.worker_added(worker("b", max_num_batched_tokens=BUDGET))
    made.expire()
    assert waiting.worker == "b"


def test_draining_refuses_who_waits() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    waiting = Caller(made, "r")
    made.drain()
    assert isinstance(waiting.error, Draining)
    assert len(made.waiting) == 0


def test_waiters_are_listed_as_queued() -> None:
    clock = ManualClock()
    made = limited("a", clock=clock)
    reserve(made, "long", "a", isl=501)
    Caller(made, "r")
    clock.advance(2.5)
    listed, total, _ = list_active_requests(made, "default")
    assert total == 2
    assert [(active.request.request_id, active.phase) for active in listed] == [
        ("long", scheduler_pb2.REQUEST_PHASE_PREFILL),
        ("r", scheduler_pb2.REQUEST_PHASE_QUEUED),
    ]
    assert listed[1].age_seconds == 2.5
    assert list_active_requests(made, "default", worker_id="a")[1] == 1


def test_a_wrong_request_is_refused_at_once() -> None:
    made = limited("a")
    reserve(made, "long", "a", isl=501)
    with pytest.raises(NotFound):
        Caller(made, "r", model="other")
    assert len(made.waiting) == 0


def test_random_arrivals_and_departures_leave_nothing() -> None:
    seed = test_seed()
    rng, clock = Random(seed), ManualClock()
    made = limited("a", "b", "c", clock=clock, queue_limit=20)
    callers: dict[str, Caller] = {}
    for number in range(3000):
        clock.advance(rng.random())
        name = f"r{number}"
        try:
            callers[name] = Caller(made, name, isl=rng.randint(1, 900), priority=rng.randrange(3))
        except ResourceExhausted:
            assert made.waiting.length(callers[next(iter(callers))].request.pool) == 20
        for old in rng.sample(sorted(callers), min(len(callers), rng.randrange(3))):
            caller = callers[old]
            what = rng.randrange(3)
            if what == 0 and not caller.waits:
                made.mark_prefill_complete(caller.request.key)
            elif what == 1 and caller.waits:
                caller.go()
                del callers[old]
            elif what == 2:
                made.free(caller.request.key)
                del callers[old]
        made.expire()
        waiting = [caller for caller in callers.values() if caller.waits]
        assert len(made.waiting) == len(waiting)
        if waiting:
            over = [load[1] > 500 for load in loads(made).values()]
            assert all(over), "somebody waits though there is room"
    for caller in list(callers.values()):
        made.free(caller.request.key)
    check_scheduler(made)
    assert set(loads(made).values()) == {(0, 0, 0)}
    assert all(len(caller.told) == 1 for caller in callers.values())
