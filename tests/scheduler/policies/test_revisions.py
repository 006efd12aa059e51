"""Revisions by weight: shares, sessions that stay, and what happens where a revision cannot take a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.scheduler_builders import ManualClock, request, reserve, scheduler, worker

from kvscout_common.errors import ConfigError
from kvscout_common.worker import REVISION, Role, WorkerRank, WorkerSpec
from kvscout_scheduler.policies.revisions import in_order
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.thresholds import BusyThresholds

WEIGHTS = {"v1": 80.0, "v2": 20.0}


def of(worker_id: str, revision: str, *, role: Role = Role.AGGREGATED) -> WorkerSpec:
    labels = {REVISION: revision} if revision else {}
    return replace(worker(worker_id), labels=labels, role=role)


def made(*specs: WorkerSpec, weights: dict[str, float] | None = None, **settings: Any) -> Scheduler:
    return scheduler(*specs, revision_weights=WEIGHTS if weights is None else weights, **settings)


def revision_of(core: Scheduler, **fields: Any) -> str:
    decision = core.select(request([1], **fields))
    return decision.spec.labels.get(REVISION, "")


def session_of(revision: str, *, weights: dict[str, float] = WEIGHTS) -> int:
    """A session that goes to a revision first."""
    return next(key for key in range(1, 1000) if in_order(weights, list(weights), key)[0] == revision)


def test_sessions_are_shared_by_weight_and_each_stays_with_its_revision() -> None:
    core = made(of("a", "v1"), of("b", "v1"), of("c", "v2"))
    found = {session: revision_of(core, session=session) for session in range(1, 2_001)}
    # 400 are expected, 18 is the standard deviation; the hash is fixed.
    assert 330 < Counter(found.values())["v2"] < 470
    assert all(revision_of(core, session=session) == revision for session, revision in list(found.items())[:100])


def test_another_replica_with_other_slots_decides_alike() -> None:
    one, other = made(of("a", "v1"), of("c", "v2")), made(of("z", "v2"), of("c", "v2"), of("a", "v1"))
    for session in range(1, 200):
        assert revision_of(one, session=session) == revision_of(other, session=session)
    for number in range(200):
        assert revision_of(one, request_id=f"r{number}") == revision_of(other, request_id=f"r{number}")


def test_other_weights_move_only_the_sessions_that_must_move() -> None:
    more = {"v1": 60.0, "v2": 40.0}
    for session in range(1, 1_000):
        before, after = (in_order(weights, ["v1", "v2"], session)[0] for weights in (WEIGHTS, more))
        assert (before, after) != ("v2", "v1")


def test_a_session_that_is_known_by_its_prompt_stays_with_its_revision() -> None:
    core = made(of("a", "v1"), of("b", "v2"))
    for number in range(40):
        prompt = [number * 100 + block for block in range(40)]
        chosen = core.select_and_reserve(request(prompt, request_id=f"r{number}")).spec.labels[REVISION]
        later = request([*prompt, 1], request_id=f"other{number}")
        assert core.select(later).spec.labels[REVISION] == chosen


@pytest.mark.parametrize("why", ["drains", "cools down", "is busy", "failed the request"])
def test_another_revision_takes_what_a_revision_cannot(why: str) -> None:
    clock = ManualClock()
    core = made(
        of("a", "v1"),
        of("b", "v2"),
        of("c", "v1"),
        clock=clock,
        thresholds=BusyThresholds(active_prefill_tokens_threshold=50),
    )
    session, excluded = session_of("v2"), frozenset[str]()
    assert revision_of(core, session=session) == "v2"
    if why == "drains":
        core.workers.worker_updated(of("b", "v2"), replace(of("b", "v2"), draining=True))
    elif why == "cools down":
        core.cool_downs.report("default", WorkerRank("b", 0))
    elif why == "is busy":
        reserve(core, "busy", "b", isl=51)
    else:
        excluded = frozenset({"b"})
    wanted = request([1], session=session, request_id="r", explain=True, excluded_worker_ids=excluded)
    decision = core.select_and_reserve(wanted)
    assert decision.spec.labels[REVISION] == "v1"
    assert decision.explanation is not None
    assert "no worker of revision v2 can take it" in decision.explanation.summary
    assert core.stats.revisions == {("v2", "v1"): 1}


def test_an_explanation_names_the_revision_and_who_is_of_another_one() -> None:
    core = made(of("a", "v1"), of("b", "v2"), of("c", "v2"))
    decision = core.select_and_reserve(request([1], session=session_of("v2"), request_id="r", explain=True))
    assert decision.explanation is not None
    assert "of revision v2, by its weight" in decision.explanation.summary
    reasons = {each.rank.worker_id: each.ineligible_reason for each in decision.explanation.candidates}
    assert reasons == {"a": "revision", "b": "", "c": ""}
    assert core.stats.revisions == {("v2", "v2"): 1}


def test_workers_without_the_label_have_a_weight_of_their_own() -> None:
    weights = {"": 50.0, "v2": 50.0}
    core = made(of("a", ""), of("b", "v2"), weights=weights)
    assert revision_of(core, session=session_of("", weights=weights)) == ""
    assert revision_of(core, session=session_of("v2", weights=weights)) == "v2"


def test_a_revision_without_a_weight_gets_only_what_no_other_can_take() -> None:
    core = made(of("a", "v1"), of("b", "old"))
    assert {revision_of(core, session=session) for session in range(1, 50)} == {"v1"}
    core.workers.worker_updated(of("a", "v1"), replace(of("a", "v1"), draining=True))
    assert revision_of(core, session=1) == "old"
    zero = made(of("a", "v1"), of("b", "v2"), weights={"v1": 1.0, "v2": 0.0})
    assert {revision_of(zero, session=session) for session in range(1, 50)} == {"v1"}


def test_weights_say_nothing_of_pools_without_their_revisions() -> None:
    core = made(of("a", "x"), of("b", "y"))
    core.select_and_reserve(request([1], request_id="r"))
    assert not core.stats.revisions


def test_a_request_that_asks_for_a_revision_gets_it() -> None:
    core = made(of("a", "v1"), of("b", "v2"))
    for session in range(1, 30):
        asked = {"required_labels": {REVISION: "v2"}, "session": session}
        assert revision_of(core, **asked) == "v2"
        assert revision_of(core, pinned_worker_id="a", session=session) == "v1"
        assert revision_of(core, allowed_worker_ids=frozenset({"b"}), session=session) == "v2"
    core.select_and_reserve(request([1], request_id="r", session=session_of("v1"), allowed_worker_ids=frozenset({"b"})))
    assert core.stats.revisions == {("v2", "v2"): 1}


def test_a_prefill_worker_follows_its_decode_worker() -> None:
    core = made(of("a", "v1", role=Role.PREFILL), of("b", "v2", role=Role.PREFILL))
    wanted = request([1], role=Role.PREFILL, session=session_of("v2"), excluded_worker_ids=frozenset({"b"}))
    assert core.select(wanted).spec.labels[REVISION] == "v1"
    assert not core.stats.revisions


def test_a_revision_without_room_leaves_a_request_to_one_that_has_some() -> None:
    roomy, full = (replace(of(*each), max_num_batched_tokens=100) for each in (("a", "v1"), ("b", "v2")))
    core = made(roomy, full, queue_threshold=0.5)
    reserve(core, "full", "b", isl=60)
    assert revision_of(core, session=session_of("v2")) == "v1"


def test_a_worker_that_changes_its_revision_takes_the_sessions_of_the_new_one() -> None:
    core = made(of("a", "v1"), of("b", "v1"))
    session = session_of("v2")
    assert revision_of(core, session=session) == "v1"
    core.workers.worker_updated(of("b", "v1"), of("b", "v2"))
    assert revision_of(core, session=session) == "v2"


def test_a_weight_of_a_revision_that_no_worker_has_is_a_warning() -> None:
    core = made()
    assert not core.warnings(), "no worker has registered yet"
    core.workers.worker_added(of("a", "v1"))
    assert [warning.text for warning in core.warnings()] == ["revision weights: no worker has the revision 'v2'"]
    core.workers.worker_added(of("b", "v2"))
    assert not core.warnings()


@pytest.mark.parametrize("weights", [{"v1": -1.0}, {"v1": float("nan")}, {"v1": float("inf")}, {"v1": 0.0}])
def test_weights_out_of_range_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="revision_weight"):
        SchedulerSettings(revision_weights=weights).validate()
