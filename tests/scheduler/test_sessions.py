"""Sessions of requests: booked, listed, told to other replicas, and where equal workers go."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_builders import ManualClock, overlaps, request, scheduler
from support.scheduler_builders import worker as worker_of

from kvscout.v1 import replication_pb2
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_scheduler.policies.decision_feed import DecisionWatcher
from kvscout_scheduler.replicas.claim import Claim, ClaimState, claim_from_proto, claim_to_proto
from kvscout_scheduler.rpc.listing import list_active_requests
from kvscout_scheduler.scheduler import Scheduler

WORKERS = ("a", "b", "c", "d")
SYSTEM = list(range(1, 33))


def turn(made: Scheduler, request_id: str, hashes: list[int] | None = None, **fields: Any) -> str:
    """Books a request, ends it, and returns its worker."""
    asked = request(hashes, request_id=request_id, attempt_id=1, **fields)
    decision = made.select_and_reserve(asked)
    made.free(asked.key, 1, output_tokens=4)
    return decision.rank.worker_id


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "lmetric"])
def test_of_equal_workers_a_turn_goes_where_its_session_was(policy: str) -> None:
    made = scheduler(*WORKERS, policy=policy)
    first = [turn(made, f"{session}/0", isl=40, session=session) for session in range(1, 13)]
    assert len(set(first)) > 1
    again = [turn(made, f"{session}/1", isl=90, session=session) for session in range(1, 13)]
    assert again == first


def test_a_turn_by_lineage_goes_where_the_conversation_was() -> None:
    made = scheduler(*WORKERS)
    first = [turn(made, f"{number}/0", [*SYSTEM, number]) for number in range(100, 112)]
    assert len(set(first)) > 1
    assert [turn(made, f"{number}/1", [*SYSTEM, number, number + 1_000]) for number in range(100, 112)] == first


@pytest.mark.parametrize("policy", ["kv", "kv-time"])
def test_where_nobody_knows_of_caches_the_sessions_worker_counts_as_holding_it(policy: str) -> None:
    made = scheduler(*WORKERS, policy=policy)
    home = turn(made, "first", isl=16_000, session=5)
    # There is more to do on it than on the others, and less than the prompt would take.
    other = request(isl=1_600, request_id="other", attempt_id=1, pinned_worker_id=home)
    made.select_and_reserve(other)
    knows = made.select(request(isl=16_800, session=5))
    assert knows.rank.worker_id != home
    blind = made.select(request(isl=16_800, session=5, overlaps_unknown=True))
    assert blind.rank.worker_id == home
    assert (blind.overlap_blocks, blind.uncached_tokens) == (1000, 800)
    assert made.select(request(isl=1_600, session=5, overlaps_unknown=True)).uncached_tokens in (0, 1_600)
    assert made.select(request(isl=16_800, session=6, overlaps_unknown=True)).overlap_blocks == 0


def test_a_session_whose_worker_is_gone_goes_anywhere() -> None:
    made = scheduler("a", "b")
    home = turn(made, "first", isl=1_600, session=5)
    made.workers.worker_removed(worker_of(home), "removed")
    assert turn(made, "second", isl=1_700, session=5, overlaps_unknown=True) in {"a", "b"} - {home}


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "lmetric"])
def test_of_equal_workers_a_subagent_begins_where_its_parent_is_and_then_goes_its_own_way(policy: str) -> None:
    made = scheduler(*WORKERS, policy=policy)
    parents = {parent: turn(made, f"{parent}/0", isl=40, session=parent) for parent in range(1, 13)}
    assert len(set(parents.values())) > 1
    for parent, home in parents.items():
        assert turn(made, f"{parent}/sub/0", isl=40, session=100 + parent, parent_session=parent) == home
        (other, *_) = set(WORKERS) - {home}
        fields: dict[str, Any] = {"isl": 90, "session": 100 + parent, "parent_session": parent}
        assert turn(made, f"{parent}/sub/1", pinned_worker_id=other, **fields) == other
        assert turn(made, f"{parent}/sub/2", **fields) == other
    assert turn(made, "orphan", isl=40, session=200, parent_session=99) in WORKERS


def test_caches_count_before_the_session() -> None:
    made = scheduler("a", "b")
    home = turn(made, "first", [*SYSTEM, 100], session=5)
    (other,) = {"a", "b"} - {home}
    assert turn(made, "second", [*SYSTEM, 100, 101], session=5, on=overlaps(**{other: 33})) == other


def test_bookings_and_decisions_say_their_session() -> None:
    made = scheduler("a")
    watcher = DecisionWatcher("*", "", False, lambda: None)
    made.decision_feed.add(watcher)
    made.select_and_reserve(request([1, 2], request_id="said", attempt_id=1, session=5))
    made.select_and_reserve(request([*SYSTEM, 3], request_id="found", attempt_id=1))
    made.select_and_reserve(request(isl=9, request_id="none", attempt_id=1, by_lineage=False))
    listed = {one.request.request_id: one.session for one in list_active_requests(made, DEFAULT_TENANT)[0]}
    assert (listed["said"], listed["none"]) == (5, 0)
    assert listed["found"] not in (0, 5)
    sessions = [record.decision.session for record in watcher.take()[1] if record.decision is not None]
    assert sessions == [listed[name] for name in ("said", "found", "none")]
    again = made.select_and_reserve(request([*SYSTEM, 3], request_id="found", attempt_id=1))
    assert again.session == listed["found"]


def test_a_claim_has_the_session_of_its_request() -> None:
    made = scheduler("a")
    made.select_and_reserve(request([1, 2], request_id="r", attempt_id=1, session=2**64 - 1))
    (booking,) = made.bookings
    claim = Claim(booking.reservation, 1, ClaimState.PREFILL)
    sent = replication_pb2.Claim.FromString(claim_to_proto(claim).SerializeToString())
    assert claim_from_proto(sent, lambda *_: b"").reservation.session == 2**64 - 1


def test_sessions_of_long_ago_are_forgotten_by_the_tick() -> None:
    clock = ManualClock()
    made = scheduler("a", clock=clock)
    turn(made, "first", isl=40, session=5)
    (pool,) = made.workers
    assert len(pool.sessions) == 1
    clock.advance(7_200.0)
    made.expire()
    assert len(pool.sessions) == 0
