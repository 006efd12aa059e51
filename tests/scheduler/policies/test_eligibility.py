"""Who may take a request, and which error says that nobody may."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_builders import ManualClock, request, reserve, scheduler, worker

from kvscout_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvscoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.worker import Adapter, Role, WorkerRank
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.thresholds import BusyThresholds

TOKENS_50 = BusyThresholds(active_prefill_tokens_threshold=50)


def test_s3_a_model_never_seen_is_not_found() -> None:
    with pytest.raises(NotFound, match="never seen"):
        scheduler("w0").select(request([1], model="other"))
    with pytest.raises(NotFound, match="never seen"):
        scheduler("w0").select(request([1], tenant="other"))


def test_s3_a_model_without_workers_now_is_unavailable() -> None:
    made = scheduler("w0")
    with pytest.raises(Unavailable, match="no prefill worker"):
        made.select(request([1], role=Role.PREFILL))
    made.workers.worker_removed(worker("w0"), "removed")
    with pytest.raises(Unavailable, match="no aggregated worker"):
        made.select(request([1]))


def test_s3_pinned_and_busy_is_never_rerouted() -> None:
    made = scheduler("w0", "w1", thresholds=TOKENS_50)
    reserve(made, "r0", "w0", isl=51)
    with pytest.raises(ResourceExhausted, match="pinned worker 'w0' is busy"):
        made.select(request([1], pinned_worker_id="w0"))
    assert made.select(request([1])).rank.worker_id == "w1"


def test_s3_all_busy_is_exhausted() -> None:
    made = scheduler("w0", "w1", thresholds=TOKENS_50)
    reserve(made, "r0", "w0", isl=51)
    reserve(made, "r1", "w1", isl=51)
    with pytest.raises(ResourceExhausted, match="all 2 workers"):
        made.select(request([1]))


def test_s3_a_pin_outside_the_allow_list_is_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="pinned_worker_id"):
        scheduler("w0", "w1").select(request([1], pinned_worker_id="w1", allowed_worker_ids=frozenset({"w0"})))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"allowed_worker_ids": frozenset({"w9"})}, Unavailable, "none of the 1 allowed"),
        ({"excluded_worker_ids": frozenset({"w0", "w1"})}, Unavailable, "excluded"),
        ({"pinned_worker_id": "w9"}, NotFound, "'w9' is not registered .*; known: w0, w1"),
        (
            {"pinned_worker_id": "w0", "pinned_dp_rank": 5},
            NotFound,
            "rank 5, is not registered for this model and role$",
        ),
        ({"required_labels": {"zone": "b"}}, FailedPrecondition, "labels"),
        ({"lora_name": "tuned"}, FailedPrecondition, "adapter 'tuned'"),
    ],
)
def test_each_condition_has_its_own_error(fields: dict[str, Any], error: type[KvscoutError], message: str) -> None:
    with pytest.raises(error, match=message):
        scheduler("w0", "w1").select(request([1], **fields))


def test_conditions_leave_those_that_meet_them() -> None:
    made = scheduler(
        worker("a", labels={"zone": "b", "disk": "ssd"}),
        worker("b", adapters=(Adapter("tuned"),)),
        worker("c", dp_size=3),
    )
    assert _only(made, required_labels={"zone": "b"}) == ("a", 0)
    assert _only(made, lora_name="tuned") == ("b", 0)
    assert _only(made, pinned_worker_id="c", pinned_dp_rank=2) == ("c", 2)
    assert _only(made, allowed_worker_ids=frozenset({"a", "b"}), excluded_worker_ids=frozenset({"b"})) == ("a", 0)


def test_a_draining_worker_gets_nothing_new() -> None:
    made = scheduler("w0", "w1")
    made.workers.worker_updated(worker("w0"), worker("w0", draining=True))
    assert _only(made) == ("w1", 0)
    made.workers.worker_updated(worker("w1"), worker("w1", draining=True))
    with pytest.raises(Unavailable, match="draining"):
        made.select(request([1]))
    made.workers.worker_updated(worker("w0", draining=True), worker("w0"))
    assert _only(made) == ("w0", 0)


def test_a_failed_worker_cools_down_and_comes_back() -> None:
    clock = ManualClock()
    made = scheduler("w0", "w1", clock=clock, cooldown_seconds=5.0)
    assert made.cool_downs.report("default", WorkerRank("w0", 0)) == 5.0
    assert _only(made) == ("w1", 0)
    with pytest.raises(Unavailable, match="cooling down") as error:
        made.select(request([1], pinned_worker_id="w0"))
    assert error.value.retry_after_seconds == 5.0
    clock.advance(5.0)
    assert made.select(request([1], pinned_worker_id="w0")).rank == ("w0", 0)


@pytest.mark.parametrize(("workers", "left_out"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_of_the_workers_at_most_half_are_left_out_those_that_failed_last(workers: int, left_out: int) -> None:
    clock = ManualClock()
    made = scheduler(*(f"w{number}" for number in range(workers)), clock=clock)
    for number in range(workers):
        made.cool_downs.report("default", WorkerRank(f"w{number}", 0))
        clock.advance(0.1)
    reasons = _reasons(made.select(request([1], explain=True)))
    assert [name for name, reason in reasons.items() if not reason] == [f"w{n}" for n in range(workers - left_out)]


def test_of_those_with_an_adapter_at_most_half_are_left_out() -> None:
    made = scheduler(worker("a", adapters=(Adapter("l"),)), worker("b", adapters=(Adapter("l"),)), "c", "d")
    for name in "ab":
        made.cool_downs.report("default", WorkerRank(name, 0))
    assert made.select(request([1], lora_name="l")).rank.worker_id in "ab"
    assert made.select(request([1])).rank.worker_id in "cd"


def test_those_that_drain_are_no_reason_to_leave_the_last_worker_out() -> None:
    made = scheduler(worker("a", draining=True), worker("b", draining=True), "c")
    made.cool_downs.report("default", WorkerRank("c", 0))
    assert _only(made) == ("c", 0)
    assert made.select(request([1], pinned_worker_id="c")).rank == ("c", 0)


def test_no_report_leaves_a_worker_out_for_longer_than_a_minute_and_none_shortens_it() -> None:
    made = scheduler("w0")
    assert made.cool_downs.report("default", WorkerRank("w0", 0), 86_400.0) == 60.0
    assert made.cool_downs.report("default", WorkerRank("w0", 0), 1.0) == 60.0
    patient = scheduler("w0", cooldown_seconds=120.0)
    assert patient.cool_downs.report("default", WorkerRank("w0", 0), 86_400.0) == 120.0
    with pytest.raises(NotFound):
        made.cool_downs.report("default", WorkerRank("w0", 1))


def test_cool_downs_are_cleared_by_worker_and_model_and_those_who_wait_go() -> None:
    made = scheduler(*(worker(name, max_num_batched_tokens=100) for name in "abcd"), queue_threshold=0.5)
    for name in "cd":
        reserve(made, f"on-{name}", name, isl=51)
    for name in "ab":
        made.cool_downs.report("default", WorkerRank(name, 0))
    told: list[object] = []
    made.reserve_or_wait(request(isl=1, request_id="r"), told.append)
    assert told == []
    assert made.cool_downs.clear("default", model="other") == []
    assert made.cool_downs.clear("other") == []
    assert made.cool_downs.clear("default", worker_id="b") == [("b", 0)]
    assert len(told) == 1
    assert made.cool_downs.clear("default") == [("a", 0)]
    with pytest.raises(NotFound):
        made.cool_downs.clear("default", worker_id="x")


def test_draining_is_told_before_busy() -> None:
    made = scheduler(worker("w0", draining=True), "w1", thresholds=TOKENS_50)
    reserve(made, "r0", "w1", isl=51)
    with pytest.raises(ResourceExhausted):
        made.select(request([1]))
    with pytest.raises(Unavailable, match="draining"):
        made.select(request([1], pinned_worker_id="w0"))


def test_an_explanation_names_why_each_worker_is_out() -> None:
    made = scheduler(
        *(worker(f"w{index}", labels={"zone": "b"}) for index in range(6)),
        worker("w6"),
        worker("w7", labels={"zone": "b"}, draining=True),
        thresholds=TOKENS_50,
    )
    made.cool_downs.report("default", WorkerRank("w1", 0))
    reserve(made, "r", "w2", isl=51)
    decision = made.select(
        request(
            [1],
            explain=True,
            required_labels={"zone": "b"},
            excluded_worker_ids=frozenset({"w3"}),
            allowed_worker_ids=frozenset(f"w{index}" for index in (0, 1, 2, 3, 5, 6, 7)),
        )
    )
    assert _reasons(decision) == {
        "w0": "",
        "w1": "cooling down",
        "w2": "busy",
        "w3": "excluded",
        "w4": "not allowed",
        "w5": "",
        "w6": "labels",
        "w7": "draining",
    }
    pinned = made.select(request([1], explain=True, pinned_worker_id="w0"))
    assert set(_reasons(pinned).values()) == {"", "not pinned"}


def _only(made: Scheduler, **fields: Any) -> tuple[str, int]:
    """The worker chosen in each of 20 draws."""
    chosen = {made.select(request([1], **fields)).rank for _ in range(20)}
    assert len(chosen) == 1
    return chosen.pop()


def _reasons(decision: Decision) -> dict[str, str]:
    assert decision.explanation is not None
    return {each.rank.worker_id: each.ineligible_reason for each in decision.explanation.candidates}
