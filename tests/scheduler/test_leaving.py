"""Workers that go away with requests on them: what stays for their return, what ends, and in which portions."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import pytest
from support.scheduler_builders import (
    ManualClock,
    key,
    loads,
    owner,
    request,
    reservation,
    reserve,
    scheduler,
    worker,
)
from support.scheduler_invariants import check_scheduler
from support.seeds import test_seed

from kvscout_common.errors import Unavailable
from kvscout_common.worker import Role, WorkerSpec
from kvscout_scheduler.load.workers import MAX_ENDS
from kvscout_scheduler.rpc.listing import potential_loads
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.reservation import EndReason, FreeOutcome, Reservation

IDLE = (0, 0, 0)


def active(made: Scheduler) -> list[str]:
    return [booking.key.request_id for booking in made.bookings]


def ended(made: Scheduler) -> dict[str, int]:
    return {str(reason): count for reason, count in made.stats.ended.items()}


@pytest.mark.parametrize("reason", ["lease", "dns"])
def test_a_worker_that_comes_back_in_time_has_its_load_again(reason: str) -> None:
    clock = ManualClock()
    made = scheduler("a", "b", clock=clock)
    reserve(made, "r", "a", [1, 2, 3])
    before = loads(made)
    made.workers.worker_removed(worker("a"), reason)
    assert set(loads(made)) == {"b"}
    clock.advance(29.0)
    assert made.expire() == 0
    made.workers.worker_added(worker("a"))
    assert loads(made) == before
    assert made.select(request([9])).rank.worker_id == "b"
    clock.advance(100.0)
    assert made.expire() == 0
    assert made.free(key("r")) is FreeOutcome.FREED
    assert loads(made)["a"] == IDLE
    check_scheduler(made)


def test_a_worker_that_does_not_come_back_in_time_has_no_bookings_any_more() -> None:
    clock = ManualClock()
    made = scheduler("a", clock=clock)
    reserve(made, "r", "a", [1, 2, 3])
    made.workers.worker_removed(worker("a"), "lease")
    with pytest.raises(Unavailable, match="no aggregated worker now"):
        made.select(request([1]))
    assert active(made) == ["r"]
    clock.advance(30.0)
    assert made.expire() == 1
    assert ended(made) == {"worker_gone": 1}
    assert not list(made.workers)
    made.workers.worker_added(worker("a"))
    assert loads(made)["a"] == IDLE


@pytest.mark.parametrize("reason", ["removed", "nats", "file"])
def test_a_worker_that_somebody_takes_out_loses_its_bookings_at_once(reason: str) -> None:
    made = scheduler("a", "b")
    reserve(made, "r", "a", [1, 2, 3])
    made.workers.worker_removed(worker("a"), reason)
    assert (active(made), ended(made)) == ([], {"worker_removed": 1})
    made.workers.worker_added(worker("a"))
    assert loads(made)["a"] == IDLE


def test_requests_of_a_worker_that_is_away_go_on_and_end_as_ever() -> None:
    made = scheduler("a", "b", track_output_blocks=True)
    reserve(made, "r", "a", [1, 2])
    reserve(made, "s", "a", [1, 2])
    made.workers.worker_removed(worker("a"), "lease")
    assert made.mark_prefill_complete(key("r"))
    assert made.add_output(key("r"), 3) == 3
    assert made.free(key("s")) is FreeOutcome.FREED
    made.workers.worker_added(worker("a"))
    assert loads(made)["a"] == (1, 0, 5)
    made.workers.worker_removed(worker("a"), "lease")
    made.free(key("r"))
    # Its place is free for another one.
    made.workers.worker_added(worker("c"))
    assert loads(made) == {"b": IDLE, "c": IDLE}
    check_scheduler(made)


def test_one_that_comes_back_with_other_blocks_is_another_worker() -> None:
    clock = ManualClock()
    made = scheduler("a", clock=clock)
    reserve(made, "r", "a", [1, 2])
    made.workers.worker_removed(worker("a"), "lease")
    made.workers.worker_added(worker("a", block_size=32))
    assert loads(made)["a"] == IDLE
    clock.advance(30.0)
    assert made.expire() == 1
    check_scheduler(made)


def rank_one(request_id: str) -> Reservation:
    return reservation(request_id, "a", 32, dp_rank=1)


@pytest.mark.parametrize(
    "change",
    [{"dp_size": 1}, {"model": "n"}, {"role": Role.DECODE}, {"block_size": 32}, {"dp_size": 3}, {"eagle": True}],
)
def test_an_update_ends_no_booking(change: dict[str, Any]) -> None:
    clock = ManualClock()
    old = worker("a", dp_size=2)
    new = worker("a", **{"dp_size": 2, **change})
    made = scheduler(old, clock=clock)
    reserve(made, "r", "a", isl=16)
    made.reserve(rank_one("s"))
    before = {load.rank: load.active_requests for load in potential_loads(made, key("any").pool)}
    made.workers.worker_updated(old, new)
    clock.advance(60.0)
    assert made.expire() == 0
    assert active(made) == ["r", "s"]
    check_scheduler(made)
    made.workers.worker_updated(new, old)
    assert {load.rank: load.active_requests for load in potential_loads(made, key("any").pool)} == before
    made.workers.worker_updated(old, new)
    for name in ("r", "s"):
        assert made.free(key(name)) is FreeOutcome.FREED
    made.expire()
    assert all(set(pool.load.requests) == {0} for pool in made.workers)
    assert all(pool.order for pool in made.workers), "a pool that nobody is left in is forgotten"


def test_random_comings_and_goings_leave_no_load_behind() -> None:
    rng, clock = Random(test_seed()), ManualClock()
    made = scheduler(clock=clock, worker_grace_seconds=20.0)
    here: dict[str, WorkerSpec] = {}
    for number in range(3000):
        clock.advance(rng.random())
        name = rng.choice("abc")
        what = rng.randrange(8)
        spec = worker(name, dp_size=rng.randint(1, 3), block_size=rng.choice((16, 16, 16, 32)))
        if what == 0 and name in here:
            made.workers.worker_removed(here.pop(name), rng.choice(("removed", "lease", "lease", "dns")))
        elif what == 1:
            old = here.get(name)
            here[name] = spec
            made.workers.worker_added(spec) if old is None else made.workers.worker_updated(old, spec)
        elif what < 5 and here:
            made.select_and_reserve(request(isl=rng.randint(1, 100), request_id=f"r{number}"))
        elif what < 7 and len(made.bookings):
            made.free(rng.choice(list(made.bookings)).key)
        else:
            made.expire()
        if number % 20 == 0:
            check_scheduler(made)
    for spec in here.values():
        made.workers.worker_removed(spec, "lease")
    clock.advance(3600.0)
    made.expire()
    assert (active(made), list(made.workers)) == ([], [])


MANY = 3_000


def with_many(clock: ManualClock) -> tuple[Scheduler, int]:
    """An owner with many bookings; its session."""
    made = scheduler("a", clock=clock)
    session, _ = made.connect_owner(owner("gateway-1"), [])
    for number in range(MANY):
        made.reserve(reservation(f"r{number}", "a", 16), owner=owner("gateway-1"))
    return made, session


def in_slices(made: Scheduler, caplog: pytest.LogCaptureFixture, already: int = 0) -> str:
    """Ends what is overdue slice by slice, while others go on; the only line that was logged."""
    left = MANY - already
    while left:
        assert made.expire() == min(left, MAX_ENDS)
        left -= min(left, MAX_ENDS)
        assert len(made.bookings) == left
        check_scheduler(made) if left < MAX_ENDS else None
    assert made.expire() == 0
    (line,) = caplog.messages
    return line


def test_an_owner_that_is_gone_loses_its_bookings_in_slices_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    made, session = with_many(clock)
    made.disconnect_owner(owner("gateway-1"), session)
    clock.advance(10.0)
    with caplog.at_level(logging.WARNING):
        line = in_slices(made, caplog)
    assert line.startswith("3000 bookings ended: owner_gone, owner gateway-1 (requests r")
    assert len(line) < 300
    assert made.stats.ended == {EndReason.OWNER_GONE: MANY}


def test_an_owner_that_comes_back_in_between_keeps_what_is_left_of_what_it_lists() -> None:
    clock = ManualClock()
    made, session = with_many(clock)
    made.disconnect_owner(owner("gateway-1"), session)
    clock.advance(10.0)
    made.expire()
    kept = [booking.key for booking in made.bookings][:5]
    _, unknown = made.connect_owner(owner("gateway-1"), [(name, 0) for name in kept])
    assert unknown == []
    while made.expire():
        pass
    assert [booking.key for booking in made.bookings] == kept
    check_scheduler(made)


def test_what_an_owner_does_not_list_ends_in_slices_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = with_many(ManualClock())
    with caplog.at_level(logging.WARNING):
        made.connect_owner(owner("gateway-1"), [])
        assert len(made.bookings) == MANY - MAX_ENDS
        line = in_slices(made, caplog, already=MAX_ENDS)
    assert line.startswith("3000 bookings ended: owner_forgot, owner gateway-1")


def test_bookings_of_a_worker_that_is_removed_end_in_slices_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = with_many(ManualClock())
    with caplog.at_level(logging.WARNING):
        made.workers.worker_removed(worker("a"), "removed")
        line = in_slices(made, caplog, already=MAX_ENDS)
    assert line.startswith("3000 bookings ended: worker_removed, worker a")
    assert not list(made.workers)


def test_leases_that_end_together_end_in_slices(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    made = scheduler("a", clock=clock)
    for number in range(MANY):
        reserve(made, f"r{number}", "a", isl=16)
    clock.advance(300.0)
    with caplog.at_level(logging.WARNING):
        assert in_slices(made, caplog).startswith("3000 bookings ended: lease (requests r0, r1,")
