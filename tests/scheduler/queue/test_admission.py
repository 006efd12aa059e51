"""Whose turn it is: as if everybody in line were asked after each event, at the price of those concerned."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from support.scheduler_builders import BLOCK, MODEL, ManualClock, key, request, reserve, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout_common.errors import KvscoutError, ResourceExhausted
from kvscout_common.worker import Adapter, WorkerRank, WorkerSpec
from kvscout_scheduler.estimates.engine_metrics import EngineMetrics
from kvscout_scheduler.policies import installed_policies
from kvscout_scheduler.policies.eligibility import eligible
from kvscout_scheduler.queue.admission import Admission
from kvscout_scheduler.queue.waiting import Waiter
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.overlaps import Overlaps
from kvscout_scheduler.values.request import SelectionRequest
from kvscout_scheduler.values.reservation import PoolId
from kvscout_scheduler.values.settings import QueueOrder
from kvscout_scheduler.values.thresholds import BusyThresholds

BUDGET = 1000
POOL = key("any").pool


def calls_of(operation: Callable[[], object]) -> int:
    """Python functions that an operation calls, and native ones."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return count


def crowded(waiting: int, workers: int, **settings: Any) -> tuple[Scheduler, list[Decision | KvscoutError]]:
    """All workers full, and so many that wait, an eighth of them for one worker."""
    specs = [worker(f"w{number:04d}", max_num_batched_tokens=BUDGET, total_kv_blocks=1000) for number in range(workers)]
    made = scheduler(*specs, queue_threshold=0.5, **settings)
    for spec in specs:
        reserve(made, f"on-{spec.worker_id}", spec.worker_id, isl=501)
    told: list[Decision | KvscoutError] = []
    for number in range(waiting):
        pin = specs[number % workers].worker_id if number % 8 == 0 else ""
        made.reserve_or_wait(request(isl=501, request_id=f"r{number}", pinned_worker_id=pin), told.append)
    assert made.waiting.length(POOL) == waiting
    return made, told


@pytest.mark.parametrize("thresholds", [BusyThresholds(), BusyThresholds(0.5, 600)])
def test_an_operation_costs_the_same_however_many_wait(
    thresholds: BusyThresholds,
) -> None:
    costs = []
    for waiting in (8, 1024):
        made, told = crowded(waiting, 200, thresholds=thresholds)
        arrival = request(isl=501, request_id="another")
        operations: list[Callable[[], object]] = [
            # There is no room yet, though there is less to do.
            partial(made.free, key("nobody's")),
            partial(made.mark_prefill_complete, key("on-w0001")),
            partial(made.free, key("on-w0002")),
            partial(made.reserve_or_wait, arrival, told.append),
            made.expire,
        ]
        costs.append([calls_of(operation) for operation in operations])
        assert len(told) == 2
    for few, many in zip(*costs, strict=True):
        assert many <= 2 * few + 20, f"calls an operation: {costs}"


def test_one_who_comes_while_others_wait_for_a_busy_worker_waits_behind_them() -> None:
    made = scheduler(worker("a", max_num_batched_tokens=BUDGET), queue_threshold=0.5)
    reserve(made, "long", "a", isl=501)
    told: dict[str, list[Decision | KvscoutError]] = {"first": [], "second": []}
    made.reserve_or_wait(request(isl=1, request_id="first"), told["first"].append)
    # From here on the worker is busy as well.
    made.thresholds.change("default", MODEL, active_prefill_tokens_threshold=400)
    made.reserve_or_wait(request(isl=1, request_id="second"), told["second"].append)
    assert told == {"first": [], "second": []}
    made.free(key("long"))
    assert [type(each) for each in (*told["first"], *told["second"])] == [Decision, Decision]
    assert [booking.key.request_id for booking in made.bookings] == ["first", "second"]


def test_one_who_is_refused_as_busy_while_others_wait_is_told_when_to_try_again() -> None:
    specs = [worker(name, max_num_batched_tokens=BUDGET, labels={"name": name}) for name in ("a", "b")]
    made = scheduler(*specs, queue_threshold=0.5)
    reserve(made, "on-a", "a", isl=501)
    reserve(made, "on-b", "b", isl=501)
    made.reserve_or_wait(request(isl=1, request_id="first", pinned_worker_id="a"), print)
    made.thresholds.change("default", MODEL, active_prefill_tokens_threshold=400)
    with pytest.raises(ResourceExhausted, match="busy") as refused:
        made.reserve_or_wait(request(isl=1, request_id="second"), print)
    assert refused.value.retry_after_seconds
    assert made.stats.refusals["ResourceExhausted"] == 1
    made.thresholds.change("default", MODEL, active_prefill_tokens_threshold=None)
    made.free(key("on-a"))
    assert made.waiting.length(POOL) == 0
    made.thresholds.change("default", MODEL, active_prefill_tokens_threshold=0)
    with pytest.raises(ResourceExhausted, match="busy") as refused:
        made.reserve_or_wait(request(isl=1, request_id="third"), print)
    assert refused.value.retry_after_seconds is None, "nobody waits"


@pytest.mark.parametrize("policy", [name for name in installed_policies().names if name != "direct"])
@pytest.mark.parametrize("places", [1, 3])
def test_as_many_go_as_there_is_room_for_whatever_the_policy(policy: str, places: int) -> None:
    specs = [worker(f"w{number}", max_num_batched_tokens=BUDGET, total_slots=8) for number in range(8)]
    made = scheduler(*specs, queue_threshold=0.5, policy=policy)
    for spec in specs:
        reserve(made, f"on-{spec.worker_id}", spec.worker_id, isl=501)
    told: list[Decision | KvscoutError] = []
    cached = Overlaps(tuple(spec.worker_id for spec in specs[4:]), (), (BUDGET // 4 // BLOCK,) * 4)
    for number in range(32):
        made.reserve_or_wait(request(isl=BUDGET - 1, on=cached, request_id=f"r{number}"), told.append)
    pinned: list[Decision | KvscoutError] = []
    made.reserve_or_wait(request(isl=501, request_id="pinned", pinned_worker_id="w7"), pinned.append)
    free = [f"w{number}" for number in range(places)]
    for name in free:
        made.free(key(f"on-{name}"))
    assert sorted(shown(each) for each in told) == [str(WorkerRank(name, 0)) for name in free]
    assert (made.waiting.length(POOL), pinned) == (32 - places + 1, [])


@pytest.mark.parametrize("policy", [name for name in installed_policies().names if name != "direct"])
def test_one_who_comes_goes_where_there_is_room(policy: str) -> None:
    specs = [worker(f"w{number}", max_num_batched_tokens=BUDGET, total_slots=8) for number in range(8)]
    made = scheduler(*specs, queue_threshold=0.5, policy=policy)
    for spec in specs[:5]:
        reserve(made, f"on-{spec.worker_id}", spec.worker_id, isl=501)
    told: list[Decision | KvscoutError] = []
    for number in range(5):
        cached = Overlaps(tuple(f"w{full}" for full in range(5)), (), (BUDGET // 4 // BLOCK,) * 5)
        asked = request(isl=BUDGET - 1, on=cached, request_id=f"r{number}", explain=True)
        made.reserve_or_wait(asked, told.append)
    assert len(told) == 3
    assert {shown(each) for each in told} == {str(WorkerRank(f"w{number}", 0)) for number in (5, 6, 7)}
    first = told[0]
    assert isinstance(first, Decision)
    assert first.explanation is not None
    reasons = {each.rank.worker_id: each.ineligible_reason for each in first.explanation.candidates}
    assert reasons == {f"w{number}": "no room" if number < 5 else "" for number in range(8)}


def test_a_query_is_answered_though_nobody_has_room() -> None:
    made, _ = crowded(0, 3)
    decision = made.select(request(isl=501, explain=True))
    assert decision.explanation is not None
    assert all(each.eligible for each in decision.explanation.candidates)


def test_room_that_an_undelivered_booking_leaves_is_given_at_once() -> None:
    made = scheduler(worker("a", max_num_batched_tokens=BUDGET), queue_threshold=0.5)
    made.select_and_reserve(request(isl=501, request_id="lost"))
    told: list[Decision | KvscoutError] = []
    made.reserve_or_wait(request(isl=1, request_id="next"), told.append)
    made.undelivered(key("lost"))
    assert len(told) == 1


STRICT = QueueOrder(aged_share=0)
"""Nobody goes before a higher priority."""


class BruteForce(Admission):
    """Asks everybody who waits, in order, whatever happened."""

    def must_wait(self, request: SelectionRequest, now: float) -> bool:
        pool = self._workers.pool(request.pool)
        if any(waiter.request.constraints == request.constraints for waiter in self._in_order(pool.id)):
            return True
        return self._waits(request, now)

    def admit_waiting(self, pool_id: PoolId, now: float) -> None:
        for waiter in self._in_order(pool_id):
            try:
                if self._waits(waiter.request, now):
                    continue
            except ResourceExhausted:
                continue
            except KvscoutError as error:
                self._waiting.leave(waiter)
                waiter.answer(error)
                continue
            self._waiting.leave(waiter)
            self._book(waiter, now)

    def _in_order(self, pool_id: PoolId) -> list[Any]:
        waiters = [waiter for waiter in self._waiting if waiter.request.pool == pool_id]
        return sorted(waiters, key=lambda waiter: (-waiter.request.priority, waiter.place))

    def _waits(self, request: SelectionRequest, now: float) -> bool:
        pool = self._workers.pool(request.pool)
        pool.judge(self._thresholds.get(request.tenant, request.model))
        tokens, specs = pool.load.prefill_tokens, pool.specs
        return all(
            specs[slot].max_num_batched_tokens and tokens[slot] > 0.5 * specs[slot].max_num_batched_tokens
            for slot in pool.members(eligible(pool, request, now))
        )


class Side:
    """A scheduler and what it told."""

    def __init__(self, clock: ManualClock, *, brute: bool) -> None:
        self.made = scheduler(
            clock=clock, queue_threshold=0.5, queue_limit=30, policy="round-robin", queue_order=STRICT
        )
        self.told: dict[str, list[str]] = {}
        self.waiters: dict[str, Waiter | None] = {}
        if brute:
            made = self.made
            made._admission = BruteForce(
                made.workers,
                made.thresholds,
                made.waiting,
                book=made._book_waiter,
                refuse_late=made._refuse_late,
                remote=made.remote_queues,
            )

    def ask(self, selection: SelectionRequest) -> None:
        told = self.told.setdefault(selection.request_id, [])
        try:
            waiter = self.made.reserve_or_wait(selection, lambda outcome: told.append(shown(outcome)))
            self.waiters[selection.request_id] = waiter
        except KvscoutError as error:
            told.append(shown(error))

    def go(self, request_id: str) -> None:
        waiter = self.waiters.get(request_id)
        if waiter is not None:
            self.made.waiting.leave(waiter)


def shown(outcome: Decision | KvscoutError) -> str:
    return str(outcome.rank) if isinstance(outcome, Decision) else f"{type(outcome).__name__}: {outcome}"


Act = Callable[[Side], object]


class Events:
    """What may happen, drawn at random; the same for every side."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._names = [f"w{number}" for number in range(5)]
        self._here: dict[str, WorkerSpec] = {}
        self._requests: dict[str, SelectionRequest] = {}

    def arrival(self, number: int) -> Act:
        selection = self._request(f"r{number}", self._rng.randint(1, 900), self._rng.randrange(3))
        return lambda side: side.ask(selection)

    def other(self) -> Act:
        what = self._rng.randrange(6)
        rank = WorkerRank(self._rng.choice(sorted(self._here)), 0) if self._here else None
        if what == 0 or rank is None:
            return self._registration(self._rng.choice(self._names))
        if what == 1:
            metrics = EngineMetrics(self._rng.random())
            return lambda side: side.made.report_metrics("default", rank, metrics)
        if what == 2:
            seconds = self._rng.random() * 5
            return lambda side: side.made.cool_downs.report("default", rank, seconds)
        if what == 3:
            tokens = self._rng.choice((None, 100, 600))
            return lambda side: side.made.thresholds.change("default", MODEL, active_prefill_tokens_threshold=tokens)
        if what == 4:
            share = self._rng.choice((None, 0.5, 0.9))
            return lambda side: side.made.thresholds.change("default", MODEL, active_decode_blocks_threshold=share)
        return lambda side: side.made.expire()

    def of_a_request(self) -> Act:
        if not self._requests:
            return lambda side: None
        request_id, old = self._rng.choice(list(self._requests.items()))
        what = self._rng.randrange(6)
        if what < 2:
            del self._requests[request_id]
            return lambda side: side.made.free(old.key)
        if what == 2:
            return lambda side: old.key in side.made.bookings and side.made.mark_prefill_complete(old.key)
        if what == 3:
            return lambda side: side.made.undelivered(old.key)
        if what == 4:
            del self._requests[request_id]
            return lambda side: side.go(request_id)
        again = self._request(request_id, old.isl_tokens, old.priority)
        return lambda side: side.ask(again)

    def _request(self, request_id: str, isl: int, priority: int) -> SelectionRequest:
        rng = self._rng
        some = frozenset(rng.sample(self._names, 2))
        constraints: list[dict[str, Any]] = [
            {"pinned_worker_id": rng.choice(self._names)},
            {"allowed_worker_ids": some},
            {"excluded_worker_ids": some},
            {"required_labels": {"zone": rng.choice("ab")}},
            {"lora_name": "l"},
            {},
            {},
            {},
        ]
        made = request(isl=isl, request_id=request_id, priority=priority, **rng.choice(constraints))
        self._requests[request_id] = made
        return made

    def _registration(self, name: str) -> Act:
        rng = self._rng
        old = self._here.pop(name, None)
        if old is not None and rng.random() < 0.2:
            return lambda side: side.made.workers.worker_removed(old, "removed")
        new = self._here[name] = worker(
            name,
            max_num_batched_tokens=rng.choice((BUDGET, BUDGET, 200, 0)),
            total_kv_blocks=rng.choice((0, 100)),
            labels={"zone": rng.choice("ab")},
            adapters=(Adapter("l"),) if rng.random() < 0.5 else (),
            draining=rng.random() < 0.1,
        )
        if old is None:
            return lambda side: side.made.workers.worker_added(new)
        return lambda side: side.made.workers.worker_updated(old, new)


@pytest.mark.slow
def test_random_events_give_the_same_turns_as_asking_everybody_each_time() -> None:
    rng, clock = Random(test_seed()), ManualClock()
    ours, brute = sides = Side(clock, brute=False), Side(clock, brute=True)
    events = Events(rng)
    for number in range(2500):
        clock.advance(rng.random())
        kind = rng.randrange(5)
        act = events.arrival(number) if kind < 2 else events.of_a_request() if kind < 4 else events.other()
        for side in sides:
            act(side)
        assert ours.told == brute.told, f"after {number} events"
        assert {waiter.request.key for waiter in ours.made.waiting} == {
            waiter.request.key for waiter in brute.made.waiting
        }
        assert {booking.key: booking.reservation.rank for booking in ours.made.bookings} == {
            booking.key: booking.reservation.rank for booking in brute.made.bookings
        }
    check_scheduler(ours.made)
    assert ours.made.stats.queued > 100
    assert sum(ours.made.stats.queue_waits.counts) > 50
