"""Targets and deadlines: which workers keep them, who is shed, who is refused, and what is booked then."""

from __future__ import annotations

from array import array
from math import inf
from random import Random
from typing import Any

import pytest
from support.load_backends import SideBySide
from support.scheduler_builders import ManualClock, key, request, reserve, scheduler, worker
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout_common.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    KvscoutError,
    ResourceExhausted,
    Unavailable,
)
from kvscout_scheduler.costs.targets import StepTimes, keeps, response_times
from kvscout_scheduler.costs.time_cost import ROW, TimeCostInputs, TimeRow
from kvscout_scheduler.policies.headroom import Shed
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.targets import NO_TARGETS, Targets

LONG = 20_000
"""Prompt tokens; a second, while nothing is known of the workers."""


def made(*names: str, clock: ManualClock | None = None, **settings: Any) -> Scheduler:
    specs = [worker(name, max_num_batched_tokens=8192) for name in names]
    return scheduler(*specs, clock=clock, policy="kv-time", make_load=SideBySide, **settings)


def reasons(core: Scheduler, **fields: Any) -> dict[str, str]:
    explanation = core.select(request(isl=1000, explain=True, **fields)).explanation
    assert explanation is not None
    return {each.rank.worker_id: each.ineligible_reason for each in explanation.candidates}


def test_the_cheapest_worker_is_chosen_among_those_that_keep_the_target() -> None:
    core = made("busy", "idle", targets=Targets(ttft_seconds=0.5))
    reserve(core, "long", "busy", isl=LONG)
    # Cached on the busy one: without the target it is worth the wait, if the prompt is long enough.
    assert reasons(core) == {"busy": "over target", "idle": ""}
    explanation = core.select(request(isl=1000, explain=True)).explanation
    assert explanation is not None
    assert "1 of 2 workers keep the target of 500 ms to the first token" in explanation.reason


def test_without_a_target_nobody_is_left_out() -> None:
    core = made("busy", "idle")
    reserve(core, "long", "busy", isl=LONG)
    assert set(reasons(core).values()) == {""}


def test_a_target_between_tokens_leaves_out_who_decodes_much() -> None:
    core = made("a", "b", targets=Targets(itl_seconds=0.0105))
    for number in range(30):
        reserve(core, f"r{number}", "a", isl=LONG)
        core.mark_prefill_complete(key(f"r{number}"))
    assert reasons(core) == {"a": "over target", "b": ""}


def test_targets_of_a_request_go_before_those_of_its_model_and_those_before_the_general_ones() -> None:
    settings = SchedulerSettings(
        targets=Targets(1.0, 0.1), model_targets={"m": Targets(ttft_seconds=2.0), "n": Targets(itl_seconds=0.2)}
    )
    assert settings.targets_of("m", NO_TARGETS) == (2.0, 0.1)
    assert settings.targets_of("n", NO_TARGETS) == (1.0, 0.2)
    assert settings.targets_of("n", Targets(3.0, 0.3)) == (3.0, 0.3)
    assert SchedulerSettings().targets_of("m", NO_TARGETS) == NO_TARGETS


@pytest.mark.parametrize("targets", [Targets(0.0, 1.0), Targets(1.0, -1.0), Targets(float("nan"), 1.0)])
def test_targets_out_of_range_are_refused_by_name(targets: Targets) -> None:
    with pytest.raises(InvalidArgument, match="target_ms"):
        made("a").select(request(isl=16, targets=targets))
    with pytest.raises((ConfigError, InvalidArgument), match="target_ms"):
        SchedulerSettings(targets=targets).validate()


def test_beyond_the_target_a_priority_below_0_is_shed_and_others_go_where_it_is_cheapest() -> None:
    core = made("a", "b", targets=Targets(ttft_seconds=0.5))
    for name in ("a", "b"):
        reserve(core, f"on-{name}", name, isl=LONG)
    with pytest.raises(Shed) as refused:
        core.select_and_reserve(request(isl=1000, request_id="batch", priority=-1))
    # Both are through in a second; half a second later the target is kept.
    assert refused.value.retry_after_seconds == pytest.approx(1.0, abs=0.1)
    assert isinstance(core.select_and_reserve(request(isl=1000, request_id="chat")), Decision)
    assert (core.stats.refusals["Shed"], core.stats.over_target) == (1, 1)
    assert key("batch") not in core.bookings
    # A query says what would be chosen.
    assert core.select(request(isl=1000, priority=-1)).cost > 0


def test_who_is_shed_and_comes_again_when_it_was_told_to_is_served() -> None:
    clock = ManualClock()
    core = made("a", clock=clock, targets=Targets(ttft_seconds=0.5))
    reserve(core, "long", "a", isl=4 * LONG)
    batch = request(isl=1000, request_id="batch", priority=-1)
    with pytest.raises(Shed) as refused:
        core.select_and_reserve(batch)
    assert refused.value.retry_after_seconds is not None
    clock.advance(refused.value.retry_after_seconds - 0.1)
    with pytest.raises(Shed):
        core.select_and_reserve(batch)
    clock.advance(0.2)
    assert core.select_and_reserve(batch).rank.worker_id == "a"


def test_other_policies_keep_no_targets() -> None:
    core = scheduler("a", policy="kv", targets=Targets(ttft_seconds=1e-6))
    assert core.select_and_reserve(request(isl=1000, request_id="r", priority=-1)).rank.worker_id == "a"


class Caller:
    def __init__(self, core: Scheduler, name: str, **fields: Any) -> None:
        self.told: list[Decision | KvscoutError] = []
        core.reserve_or_wait(request(request_id=name, **fields), self.told.append)


def test_a_sheddable_request_waits_no_longer_than_its_target() -> None:
    clock = ManualClock()
    core = made("a", clock=clock, queue_threshold=0.5, targets=Targets(ttft_seconds=2.0))
    reserve(core, "long", "a", isl=LONG)
    batch, chat = Caller(core, "batch", isl=500, priority=-1), Caller(core, "chat", isl=500)
    clock.advance(1.9)
    core.expire()
    assert (batch.told, chat.told) == ([], [])
    clock.advance(0.2)
    core.expire()
    (shed,) = batch.told
    assert isinstance(shed, Shed)
    assert (shed.retry_after_seconds or 0) >= 1
    assert chat.told == []
    assert core.stats.refusals["Shed"] == 1


def test_a_sheddable_request_whose_time_ends_as_its_last_worker_leaves_is_answered() -> None:
    clock = ManualClock()
    core = made("a", clock=clock, queue_threshold=0.5, targets=Targets(ttft_seconds=2.0))
    reserve(core, "long", "a", isl=LONG)
    batch, chat = Caller(core, "batch", isl=500, priority=-1), Caller(core, "chat", isl=500)
    clock.advance(2.1)
    core.workers.worker_removed(worker("a", max_num_batched_tokens=8192), "removed")
    core.expire()
    assert isinstance(batch.told[0], Shed)
    assert isinstance(chat.told[0], Unavailable)
    assert len(core.waiting) == 0


def test_a_sheddable_request_is_shed_at_once_where_those_before_it_take_longer_than_its_target() -> None:
    core = made("a", queue_threshold=0.5, targets=Targets(ttft_seconds=2.0))
    reserve(core, "long", "a", isl=LONG)
    for number in range(4):
        Caller(core, f"r{number}", isl=LONG)
    with pytest.raises(Shed) as refused:
        Caller(core, "batch", isl=500, priority=-1)
    assert (refused.value.retry_after_seconds or 0) > 2
    assert len(core.waiting) == 4


def test_a_request_whose_deadline_passes_in_the_queue_is_refused_and_leaves_no_booking() -> None:
    clock = ManualClock()
    core = made("a", clock=clock, queue_threshold=0.5)
    reserve(core, "long", "a", isl=LONG)
    late, patient = Caller(core, "late", isl=500, deadline_seconds=3.0), Caller(core, "patient", isl=500)
    clock.advance(2.9)
    core.expire()
    assert late.told == []
    clock.advance(0.2)
    core.expire()
    (error,) = late.told
    assert isinstance(error, DeadlineExceeded)
    assert "passed in the queue" in str(error)
    core.free(key("long"))
    assert isinstance(patient.told[0], Decision)
    assert [booking.key.request_id for booking in core.bookings] == ["patient"]
    check_scheduler(core)


def test_room_that_comes_after_a_deadline_is_not_given_to_who_is_late() -> None:
    clock = ManualClock()
    core = made("a", clock=clock, queue_threshold=0.5)
    reserve(core, "long", "a", isl=LONG)
    late = Caller(core, "late", isl=500, deadline_seconds=3.0)
    clock.advance(3.0)
    core.free(key("long"))
    assert isinstance(late.told[0], DeadlineExceeded)
    assert len(core.bookings) == 0


def test_a_repeated_call_brings_its_own_deadline() -> None:
    clock = ManualClock()
    core = made("a", clock=clock, queue_threshold=0.5)
    reserve(core, "long", "a", isl=LONG)
    Caller(core, "r", isl=500, deadline_seconds=3.0)
    clock.advance(2.0)
    again = Caller(core, "r", isl=500, deadline_seconds=5.0)
    clock.advance(4.9)
    core.expire()
    assert again.told == []
    clock.advance(0.1)
    core.expire()
    assert isinstance(again.told[0], DeadlineExceeded)


def test_one_that_cannot_make_its_deadline_is_not_started_once_the_speed_is_known() -> None:
    clock = ManualClock()
    core = made("a", clock=clock)
    soon: dict[str, Any] = {"isl": 1000, "deadline_seconds": 0.5}
    reserve(core, "long", "a", isl=LONG)
    assert isinstance(core.select_and_reserve(request(request_id="guess", **soon)), Decision)
    core.free(key("guess"))
    clock.advance(1.0)
    core.mark_prefill_complete(key("long"))
    reserve(core, "longer", "a", isl=5 * LONG)
    clock.advance(0.1)
    with pytest.raises(DeadlineExceeded, match="its first token would come in"):
        core.select_and_reserve(request(request_id="r", **soon))
    assert key("r") not in core.bookings
    assert core.select(request(**soon)).rank.worker_id == "a", "a query books nothing, and is answered"


def test_deadlines_of_who_has_left_are_not_kept() -> None:
    core = made("a", queue_threshold=0.5, queue_limit=10)
    reserve(core, "long", "a", isl=LONG)
    for number in range(1000):
        Caller(core, f"r{number}", isl=500, deadline_seconds=1e6)
        core.free(key(f"r{number}"))
    assert len(core.waiting._deadlines) < 200


def test_random_rows_keep_the_targets_that_the_formula_says() -> None:
    rng = Random(test_seed())
    for _ in range(200):
        rows = [
            TimeRow(
                behind=rng.random(),
                due_at=rng.uniform(90, 110),
                pace=rng.uniform(0.5, 2),
                prefills=float(rng.randrange(3)),
                decode_pace=rng.uniform(0.5, 2),
                contexts_0=rng.uniform(0, 1e5),
                used=rng.random(),
                seen=rng.uniform(90, 100),
            )
            for _ in range(5)
        ]
        table = TimeCostInputs(
            _table(rows), _slots(5), 100.0, 1.0, rng.choice((0.0, 1e-4)), 0.0, 0.0, 0.0, 0.0, (0.0,) * 5
        )
        steps, isl = StepTimes(0.01, rng.random() / 50, 1e-8), rng.randrange(1, 10_000)
        cached = [float(rng.randrange(isl + 1)) for _ in rows]
        times = response_times(table, steps, isl, range(5), cached)
        for row, has, each in zip(rows, cached, times, strict=True):
            ahead = 0.0
            if row.prefills:
                left = row.due_at - 100.0
                ahead = row.behind + (left if left > 0 else min(-left, 5.0))
            own = row.pace * (0.01 + table.own_seconds * (isl - has)) if table.own_seconds else 0.0
            ttft, itl = each
            assert ttft == pytest.approx(ahead + own)
            step = row.decode_pace * (steps.decode + 1e-8 * (row.contexts_0 + isl))
            horizons = 1 + (100.0 - row.seen) / 20
            busy = (row.used + (horizons - 1 if row.prefills else 0.0)) / horizons
            assert itl == pytest.approx(step * min(7.0, 1 / (1 - busy)))


def test_random_loads_have_the_same_response_times_in_both_backends() -> None:
    """`SideBySide` compares them at each selection."""
    rng, clock = Random(test_seed()), ManualClock()
    core = made("a", "b", "c", "d", clock=clock)
    active: list[str] = []
    for number in range(600):
        clock.advance(rng.random() / 2)
        targets = Targets(rng.choice((inf, rng.random())), rng.choice((inf, rng.random() / 20)))
        asked = request(
            isl=rng.randrange(1, 20_000), request_id=f"r{number}", targets=targets, priority=rng.randrange(-1, 2)
        )
        try:
            core.select_and_reserve(asked)
            active.append(f"r{number}")
        except Shed as shed:
            refused = shed
            assert refused.retry_after_seconds is not None
        for name in rng.sample(active, min(len(active), rng.randrange(3))):
            if rng.random() < 0.5:
                core.mark_prefill_complete(key(name))
            else:
                core.free(key(name), output_tokens=rng.randrange(1, 500))
                active.remove(name)
    assert core.stats.refusals["Shed"] > 10
    assert core.stats.decisions["kv-time"] > 100


@pytest.mark.parametrize(
    ("targets", "kept"),
    [(NO_TARGETS, True), (Targets(1.0, inf), True), (Targets(0.9, inf), False), (Targets(1.0, 0.01), False)],
)
def test_times_keep_targets_up_to_the_last_moment(targets: Targets, kept: bool) -> None:
    assert keeps((1.0, 0.02), targets) is kept


def test_a_full_queue_still_says_when_to_try_again() -> None:
    core = made("a", queue_threshold=0.5, queue_limit=1)
    reserve(core, "long", "a", isl=LONG)
    Caller(core, "r", isl=500)
    with pytest.raises(ResourceExhausted) as refused:
        Caller(core, "s", isl=500)
    assert refused.value.retry_after_seconds


def _table(rows: list[TimeRow]) -> Any:

    table = array("d")
    for row in rows:
        table.extend(row)
    assert len(table) * 8 == ROW.size * len(rows)
    return table


def _slots(count: int) -> Any:

    return array("I", range(count))
