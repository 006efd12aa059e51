"""Bookings: who may book, what a Free does, and what ends by itself."""

from __future__ import annotations

import logging

import pytest
from support.scheduler_builders import (
    BLOCK,
    ManualClock,
    key,
    loads,
    overlaps,
    owner,
    request,
    reserve,
    scheduler,
    worker,
)
from support.scheduler_invariants import check_scheduler

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import AlreadyExists, Cancelled, FailedPrecondition, NotFound, ResourceExhausted
from kvscout_scheduler.rpc.listing import list_active_requests
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.reservation import EndReason, FreeOutcome

IDLE = (0, 0, 0)


def book(made: Scheduler, request_id: str = "r", attempt_id: int = 0, **how: object) -> str:
    """Books one prompt of two blocks; returns the worker."""
    asked = request([1, 2], request_id=request_id, attempt_id=attempt_id)
    return made.select_and_reserve(asked, **how).rank.worker_id  # type: ignore[arg-type]  # owner or lease


def test_s5_free_implies_prefill_done() -> None:
    made = scheduler("w0")
    book(made)
    assert loads(made)["w0"] == (1, 32, 2)
    assert made.free(key("r")) is FreeOutcome.FREED
    assert loads(made)["w0"] == IDLE


def test_s5_a_second_free_is_a_no_op_that_says_so() -> None:
    made = scheduler("w0")
    book(made)
    made.free(key("r"))
    assert made.free(key("r")) is FreeOutcome.ALREADY_FREED
    assert made.free(key("never")) is FreeOutcome.UNKNOWN
    assert loads(made)["w0"] == IDLE
    assert made.stats.freed == 1


def test_s5_a_free_that_overtakes_its_reserve_cancels_it() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    assert made.free(key("r"), 7) is FreeOutcome.UNKNOWN
    clock.advance(59.9)
    with pytest.raises(Cancelled):
        book(made, attempt_id=7)
    with pytest.raises(Cancelled):
        reserve(made, "r", "w0", [1], attempt_id=7)
    assert loads(made)["w0"] == IDLE
    book(made, attempt_id=8)
    assert loads(made)["w0"][0] == 1


def test_a_tombstone_lasts_sixty_seconds() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    made.free(key("r"), 7)
    clock.advance(60.0)
    made.expire()
    assert book(made, attempt_id=7) == "w0"


def test_s5_a_defensive_free_cancels_nothing_later() -> None:
    made = scheduler("w0")
    assert made.free(key("r")) is FreeOutcome.UNKNOWN
    assert book(made) == "w0"
    assert made.free(key("r"), 3) is FreeOutcome.UNKNOWN
    assert loads(made)["w0"][0] == 1


def test_a_free_of_another_attempt_leaves_the_active_one() -> None:
    made = scheduler("w0")
    book(made, attempt_id=2)
    assert made.free(key("r"), 1) is FreeOutcome.UNKNOWN
    assert loads(made)["w0"][0] == 1
    assert made.free(key("r"), 2) is FreeOutcome.FREED


def test_a_duplicate_id_is_refused_unless_it_is_the_same_attempt() -> None:
    made = scheduler("w0", "w1")
    first = made.select_and_reserve(request([1, 2], request_id="r", attempt_id=1, on=overlaps(w0=1)))
    with pytest.raises(AlreadyExists, match="attempt 1"):
        book(made, attempt_id=2)
    again = made.select_and_reserve(request([1, 2], request_id="r", attempt_id=1, on=overlaps(w1=2)))
    assert again == first
    assert sum(load[0] for load in loads(made).values()) == 1
    assert made.stats.bookings == 1


def test_the_same_id_in_another_role_model_or_tenant_is_another_request() -> None:
    made = scheduler("w0", worker("x", model="n"), worker("y", tenant="t"))
    book(made)
    made.select_and_reserve(request([1], request_id="r", model="n"))
    made.select_and_reserve(request([1], request_id="r", tenant="t"))
    assert len(made.bookings) == 3


def test_a_repeated_booking_after_its_own_free_books_nothing() -> None:
    made = scheduler("w0")
    book(made, attempt_id=1)
    made.free(key("r"), 1)
    with pytest.raises(Cancelled):
        book(made, attempt_id=1)


def test_an_id_without_attempts_can_be_used_again_after_its_free() -> None:
    made = scheduler("w0")
    book(made)
    made.free(key("r"))
    assert book(made) == "w0"
    assert made.free(key("r")) is FreeOutcome.FREED


def test_reserve_books_the_given_worker_and_answers_its_own_attempt_again() -> None:
    made = scheduler("w0", "w1")
    assert reserve(made, "r", "w1", [1, 2, 3], cached_tokens=16, attempt_id=1) == 32
    assert reserve(made, "r", "w1", [1, 2, 3], cached_tokens=16, attempt_id=1) == 32
    assert loads(made) == {"w0": IDLE, "w1": (1, 32, 3)}
    with pytest.raises(AlreadyExists, match="'w1'"):
        reserve(made, "r", "w0", [1, 2, 3], attempt_id=1)
    with pytest.raises(AlreadyExists, match="without choosing"):
        book(made, attempt_id=1)


def test_reserve_on_an_unknown_worker_is_not_found() -> None:
    made = scheduler("w0")
    with pytest.raises(NotFound, match="w9"):
        reserve(made, "r", "w9", [1])
    assert len(made.bookings) == 0


def test_prefill_completes_once() -> None:
    made = scheduler("w0")
    book(made)
    assert made.mark_prefill_complete(key("r"))
    assert not made.mark_prefill_complete(key("r"))
    assert loads(made)["w0"] == (1, 0, 2)
    with pytest.raises(NotFound):
        made.mark_prefill_complete(key("other"))
    with pytest.raises(NotFound, match="attempt 0"):
        made.mark_prefill_complete(key("r"), 1)


def test_output_blocks_are_private_and_need_the_switch() -> None:
    made = scheduler("w0", track_output_blocks=True)
    book(made, "a")
    book(made, "b")
    assert made.add_output(key("a"), 3) == 3
    assert made.add_output(key("a"), 1) == 4
    assert loads(made)["w0"][2] == 2 + 4
    made.free(key("a"))
    assert loads(made)["w0"][2] == 2
    with pytest.raises(FailedPrecondition, match="router-track-output-blocks"):
        scheduler("w0").add_output(key("a"), 1)


def test_an_undelivered_answer_is_taken_back() -> None:
    made = scheduler("w0")
    book(made, attempt_id=1)
    assert made.undelivered(key("r"), 1)
    assert loads(made)["w0"] == IDLE
    assert made.stats.ended == {EndReason.UNDELIVERED: 1}
    assert not made.undelivered(key("r"), 1)
    assert book(made, attempt_id=1) == "w0"


def test_an_undelivered_answer_that_a_repeated_call_got_stays_booked() -> None:
    made = scheduler("w0")
    book(made, attempt_id=1)
    book(made, attempt_id=1)
    assert not made.undelivered(key("r"), 1)
    assert loads(made)["w0"][0] == 1
    assert made.undelivered(key("r"), 1)


def test_a_unary_booking_ends_with_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    book(made)
    clock.advance(299.9)
    assert made.expire() == 0
    clock.advance(0.1)
    with caplog.at_level(logging.WARNING, "kvscout.scheduler"):
        assert made.expire() == 1
    assert "request r " in caplog.text
    assert caplog.text.rstrip().endswith("lease")
    assert loads(made)["w0"] == IDLE
    assert made.stats.ended == {EndReason.LEASE: 1}
    assert made.free(key("r")) is FreeOutcome.ALREADY_FREED


def test_any_call_that_names_a_request_renews_its_lease() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock, track_output_blocks=True)
    book(made, lease_seconds=10.0)
    for call in (
        lambda: made.renew(key("r")),
        lambda: made.mark_prefill_complete(key("r")),
        lambda: made.add_output(key("r"), 1),
        lambda: book(made),
    ):
        clock.advance(9.0)
        call()
        assert made.expire() == 0
    clock.advance(10.0)
    assert made.expire() == 1


def test_a_lease_can_be_made_shorter_or_longer() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    book(made, "a")
    book(made, "b")
    assert made.renew(key("a"), lease_seconds=5.0)
    assert made.renew(key("b"), lease_seconds=1000.0)
    assert not made.renew(key("c"))
    clock.advance(5.0)
    assert made.expire() == 1
    clock.advance(994.0)
    assert made.expire() == 0
    clock.advance(1.0)
    assert made.expire() == 1


def test_an_owner_that_is_gone_for_ten_seconds_loses_its_bookings() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    session, _ = made.connect_owner(owner("gateway-1"), [])
    for number in range(100):
        book(made, f"r{number}", owner=owner("gateway-1"))
    book(made, "unary")
    clock.advance(1000.0)
    made.renew(key("unary"))
    made.disconnect_owner(owner("gateway-1"), session)
    clock.advance(9.9)
    assert made.expire() == 0
    clock.advance(0.1)
    assert made.expire() == 100
    assert made.stats.ended == {EndReason.OWNER_GONE: 100}
    assert loads(made)["w0"][0] == 1


def test_an_owner_that_comes_back_in_time_loses_nothing() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    old, _ = made.connect_owner(owner("gateway-1"), [])
    book(made, "a", owner=owner("gateway-1"))
    made.disconnect_owner(owner("gateway-1"), old)
    clock.advance(9.0)
    _, unknown = made.connect_owner(owner("gateway-1"), [(key("a"), 0), (key("lost"), 0)])
    assert unknown == [(key("lost"), 0)]
    clock.advance(100.0)
    assert made.expire() == 0


def test_the_end_of_a_replaced_stream_means_nothing() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    old, _ = made.connect_owner(owner("gateway-1"), [])
    book(made, "a", owner=owner("gateway-1"))
    made.connect_owner(owner("gateway-1"), [(key("a"), 0)])
    made.disconnect_owner(owner("gateway-1"), old)
    clock.advance(100.0)
    assert made.expire() == 0


def test_a_hello_that_was_overtaken_by_a_later_one_is_refused() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    session, _ = made.connect_owner(owner("gateway-1"), [], opened_at=20)
    book(made, "a", owner=owner("gateway-1"))
    with pytest.raises(FailedPrecondition, match="later"):
        made.connect_owner(owner("gateway-1"), [], opened_at=10)
    clock.advance(100.0)
    assert made.expire() == 0, "the stream that was opened last is open"
    made.disconnect_owner(owner("gateway-1"), session)
    # An owner whose clock went back is let in when its former stream is gone.
    _, unknown = made.connect_owner(owner("gateway-1"), [(key("a"), 0)], opened_at=10)
    assert unknown == []


def test_bookings_that_a_returning_owner_does_not_list_end() -> None:
    made = scheduler("w0")
    made.connect_owner(owner("gateway-1"), [])
    book(made, "a", owner=owner("gateway-1"))
    book(made, "b", owner=owner("gateway-1"))
    made.connect_owner(owner("gateway-1"), [(key("b"), 0)])
    assert made.stats.ended == {EndReason.OWNER_FORGOT: 1}
    assert [active.request.request_id for active in list_active_requests(made, "default")[0]] == ["b"]


def test_an_owner_takes_over_listed_bookings_of_unary_callers_only() -> None:
    clock = ManualClock()
    made = scheduler("w0", clock=clock)
    made.connect_owner(owner("gateway-1"), [])
    book(made, "a", owner=owner("gateway-1"))
    book(made, "b", lease_seconds=5.0)
    _, unknown = made.connect_owner(owner("gateway-2"), [(key("a"), 0), (key("b"), 0)])
    assert unknown == [(key("a"), 0)]
    clock.advance(100.0)
    assert made.expire() == 0
    check_scheduler(made)


def test_removing_a_worker_frees_its_requests() -> None:
    made = scheduler(worker("w0", dp_size=2), "w1")
    for number in range(6):
        book(made, f"r{number}")
    on_w0 = sum(active.worker.worker_id == "w0" for active in list_active_requests(made, "default")[0])
    made.workers.worker_removed(worker("w0", dp_size=2), "removed")
    assert made.stats.ended == {EndReason.WORKER_REMOVED: on_w0}
    assert len(made.bookings) == 6 - on_w0
    made.workers.worker_added(worker("w2"))
    assert loads(made)["w2"] == IDLE
    check_scheduler(made)


def test_an_update_keeps_bookings_unless_it_makes_another_worker() -> None:
    made = scheduler("w0")
    book(made)
    made.workers.worker_updated(worker("w0"), worker("w0", total_kv_blocks=10))
    assert loads(made)["w0"] == (1, 32, 2)
    made.workers.worker_updated(worker("w0"), worker("w0", block_size=32))
    assert loads(made)["w0"] == IDLE


def test_active_requests_are_listed_oldest_first() -> None:
    clock = ManualClock()
    made = scheduler("w0", worker("x", model="n"), clock=clock)
    book(made, "a", attempt_id=4)
    clock.advance(2.0)
    made.select_and_reserve(request(isl=1, request_id="b", model="n", expected_output_tokens=9), owner=owner("g"))
    made.mark_prefill_complete(key("a"), 4)
    listed, total, _ = list_active_requests(made, "default")
    assert ([active.request.request_id for active in listed], total) == (["a", "b"], 2)
    assert (listed[0].phase, listed[0].request.attempt_id, listed[0].age_seconds) == (
        scheduler_pb2.REQUEST_PHASE_DECODE,
        4,
        2.0,
    )
    assert (listed[0].blocks, listed[0].uncached_tokens) == (2, 2 * BLOCK)
    assert (listed[0].lease_remaining_seconds, listed[1].HasField("lease_remaining_seconds")) == (300.0, False)
    assert [active.owner_id for active in listed] == ["", ""]
    shown, _, _ = list_active_requests(made, "default", shows_owner=True)
    assert [active.owner_id for active in shown] == ["", owner("g").owner_id]
    booked = made.bookings.find(key("b")._replace(model="n"))
    assert booked is not None and booked.reservation.expected_output_tokens == 9
    assert list_active_requests(made, "default", limit=1)[1] == 2
    assert list_active_requests(made, "default", worker_id="x")[1] == 1
    assert list_active_requests(made, "default", model="m")[1] == 1
    assert list_active_requests(made, "other") == ([], 0, None)


def test_active_requests_are_bounded() -> None:
    made = scheduler("w0", max_active_requests=2)
    book(made, "a")
    book(made, "b")
    with pytest.raises(ResourceExhausted, match="limit"):
        book(made, "c")


def test_remembered_attempts_are_bounded() -> None:
    made = scheduler("w0", max_tombstones=2)
    for number in range(5):
        made.free(key(f"r{number}"), 1)
    assert book(made, "r0", attempt_id=1) == "w0"
    with pytest.raises(Cancelled):
        book(made, "r4", attempt_id=1)


def test_no_tenant_takes_all_that_can_be_active_while_another_has_workers() -> None:
    made = scheduler("a", worker("x", tenant="other"), max_active_requests=8)
    for number in range(4):
        book(made, f"r{number}")
    with pytest.raises(ResourceExhausted, match="4 requests of tenant 'default' are active") as refused:
        book(made, "r4")
    assert refused.value.retry_after_seconds
    for number in range(4):
        made.select_and_reserve(request(isl=16, request_id=f"r{number}", tenant="other"))
    with pytest.raises(ResourceExhausted, match="8 requests are active"):
        made.select_and_reserve(request(isl=16, request_id="r4", tenant="other"))
    made.free(key("r0"))
    book(made, "r4")
    check_scheduler(made)
    # Alone, it has all of it.
    made.workers.worker_removed(worker("x", tenant="other"), "removed")
    for number in range(5, 9):
        book(made, f"r{number}")
    check_scheduler(made)
