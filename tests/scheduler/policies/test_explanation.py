"""The sentence that says why a worker was chosen."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from support.scheduler_builders import overlaps, request, reserve, scheduler, worker

from kvscout_common.worker import Role
from kvscout_scheduler.costs.words import cost_in_words, milliseconds
from kvscout_scheduler.policies.builtin import BUILTIN, Kv
from kvscout_scheduler.policies.explanation import MAX_SUMMARY
from kvscout_scheduler.policies.kv_time import KvTime
from kvscout_scheduler.policies.registry import PolicyRegistry
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import ConfigOverride, WorkerConstraints


def summary(made: Scheduler, hashes: list[int] | None = None, **fields: Any) -> str:
    explanation = made.select(request(hashes or list(range(10)), explain=True, **fields)).explanation
    assert explanation is not None
    return explanation.summary


def test_the_worker_with_more_cached_is_named_with_what_is_ahead_there() -> None:
    made = scheduler("w0", "w1", "w2")
    reserve(made, "other", "w1", list(range(100, 130)))
    assert summary(made, on=overlaps(w0=2, w1=5)) == (
        "w0: cost 18 blocks, with 32 of 160 prompt tokens cached there; "
        "w1, which has more (80), has 480 prompt tokens ahead: 75 blocks"
    )


def test_kv_time_speaks_milliseconds() -> None:
    made = scheduler("w0", "w1", policy="kv-time")
    text = summary(made, on=overlaps(w0=5))
    assert text.startswith("w0: cost 465 ms, as 80 of 160 prompt tokens are cached there; next is w1 with "), text
    explanation = made.select(request(list(range(10)), on=overlaps(w0=5), explain=True)).explanation
    assert explanation is not None
    first = explanation.candidates[0]
    assert (first.cost_text, first.cached_tokens) == ("465 ms", 80)
    assert all(each.cost_text.endswith(" ms") for each in explanation.candidates)


def test_a_tie_is_called_one() -> None:
    assert "drawn, as 2 workers cost the same" in summary(scheduler("w0", "w1"))


def test_of_equal_workers_the_one_of_the_session_is_named_so() -> None:
    made = scheduler("w0", "w1")
    made.select_and_reserve(request([1], request_id="first", session=7))
    made.free(request([1], request_id="first").key, 0)
    assert "its session was there last, and 2 workers cost the same" in summary(made, session=7)


def test_an_only_worker_is_called_that() -> None:
    assert summary(scheduler("w0")) == "w0: the only worker"


def test_a_pin_is_the_reason() -> None:
    pinned = WorkerConstraints(pinned_worker_id="w1")
    assert summary(scheduler("w0", "w1"), constraints=pinned) == "w1: pinned by the request"


def test_if_one_worker_is_left_the_others_are_named_with_their_reasons() -> None:
    made = scheduler("w0", "w1", "w2", "w3")
    excluded = WorkerConstraints(excluded_worker_ids=frozenset({"w1", "w2", "w3"}))
    assert summary(made, constraints=excluded) == (
        "w0: the only worker that can take the request, as w1 is excluded by the request, "
        "w2 is excluded by the request, and 1 more cannot"
    )


def test_a_worker_with_more_that_may_not_be_chosen_is_named_with_the_reason() -> None:
    made = scheduler("w0", "w1", "w2")
    excluded = WorkerConstraints(excluded_worker_ids=frozenset({"w1"}))
    text = summary(made, constraints=excluded, on=overlaps(w0=2, w1=5))
    assert "w1, which has more (80), is excluded by the request" in text


def test_a_draw_by_temperature_has_its_chance() -> None:
    hot = ConfigOverride(router_temperature=1.0)
    assert "drawn with a chance of 50%" in summary(scheduler("w0", "w1"), override=hot)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_half_of_a_split_request_names_its_role(role: Role) -> None:
    made = scheduler(worker("w0", role=role), worker("w1", role=role))
    assert f" ({role}): cost " in summary(made, role=role)


def test_waiting_and_unknown_overlaps_are_told() -> None:
    text = summary(scheduler("w0", "w1"), waited_seconds=1.25, overlaps_unknown=True)
    assert "; it waited 1,250 ms in the queue; no indexer answered, so what is cached is a guess" in text


def test_policies_whose_costs_decide_nothing_give_their_own_reason() -> None:
    made = scheduler("w0", "w1", policy="round-robin")
    assert summary(made) == "w0: its turn among 2 workers"


def test_a_policy_that_failed_is_named() -> None:
    class Broken(Kv):
        def costs(self, candidates: Any) -> Any:
            raise RuntimeError("no")

    made = scheduler("w0", "w1", policy="mine", policies=PolicyRegistry({"mine": Broken, "kv-time": KvTime}))
    assert summary(made).endswith("; policy mine failed, so kv-time decided")


def test_a_unit_that_is_no_text_is_none_at_all() -> None:
    class Odd(Kv):
        unit = 7  # type: ignore[assignment]

    made = scheduler("w0", "w1", policy="odd", policies=PolicyRegistry({"odd": Odd}))
    assert "w0: cost 18, " in summary(made, on=overlaps(w0=2))


def test_sentences_of_all_policies_are_bounded_whatever_the_names() -> None:
    names = [f"{letter * 255}" for letter in "abcdef"]
    for policy in sorted(BUILTIN):
        made = scheduler(*names, policy=policy)
        only = WorkerConstraints(pinned_worker_id=names[0]) if policy == "direct" else WorkerConstraints()
        text = summary(made, on=overlaps(**{names[1]: 3}), constraints=only)
        assert 0 < len(text) <= MAX_SUMMARY, policy
        excluded = WorkerConstraints(names[0] if policy == "direct" else "", None, frozenset(), frozenset(names[1:]))
        assert 0 < len(summary(made, constraints=excluded)) <= MAX_SUMMARY, policy


def test_without_a_look_no_sentence_is_made() -> None:
    assert scheduler("w0", "w1").select(request([1])).explanation is None


def test_costs_in_words() -> None:
    words = [milliseconds(seconds) for seconds in (0.0, 0.00012, 0.0049, 0.0381, 1.25, 4_000)]
    assert words == ["0 ms", "0.12 ms", "4.9 ms", "38 ms", "1,250 ms", "4,000,000 ms"]
    units = [("s", 0.31), ("blocks", 12.5), ("blocks", 45_000.0), ("", -0.25), (None, 3.0), ("s", inf)]
    assert [cost_in_words(cost, unit) for unit, cost in units] == [
        "310 ms",
        "12.5 blocks",
        "45,000 blocks",
        "-0.25",
        "",
        "",
    ]
