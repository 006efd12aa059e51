"""Decisions as rows: what the chosen worker had, and why not the one with more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.scripted_dashboard import decision

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_gateway.fronts.dashboard.decision_rows import MAX_CANDIDATES, decision_row


def row_of(event: scheduler_pb2.WatchDecisionsResponse) -> Any:
    return json.loads(json.dumps(decision_row(event), allow_nan=False))


def test_the_chosen_candidate_comes_first_then_the_cheapest() -> None:
    candidates = [
        scheduler_pb2.Candidate(
            worker=types_pb2.WorkerRank(worker_id=f"w{index}"), eligible=index != 3, cost=float(index)
        )
        for index in range(40)
    ]
    candidates[9].device_blocks, candidates[9].host_blocks, candidates[9].disk_blocks = 4, 4, 6
    candidates[3].ineligible_reason = scheduler_pb2.INELIGIBLE_REASON_BUSY
    candidates[8].cost = float("inf")
    event = decision("r", 5.0, 4)
    event.decision.worker.worker_id = "w9"
    del event.decision.explanation.candidates[:]
    event.decision.explanation.candidates.extend(candidates)
    row = row_of(event)
    assert [one["worker"] for one in row["candidates"][:4]] == ["w9/0", "w0/0", "w1/0", "w2/0"]
    assert (len(row["candidates"]), row["more_candidates"]) == (MAX_CANDIDATES, 40 - MAX_CANDIDATES)
    assert (row["blocks"], row["overlap"]) == (100, 4)
    assert (row["candidates"][0]["device"], row["candidates"][0]["slower"]) == (4, 2)


@pytest.mark.parametrize(
    ("has", "others", "why"),
    [
        (80, (60, 20), ""),
        (0, (0, 0), ""),
        (60, (80, 20), "w1/0 has 20 blocks more, but costs 1\u202f000 ms more"),
    ],
)
def test_it_says_why_not_the_worker_with_more(has: int, others: tuple[int, ...], why: str) -> None:
    row = row_of(decision("r", 5.0, has, others))
    assert row["not_richest"] == why
    assert row["best"] == max(has, *others)


def test_a_cost_is_in_the_unit_of_its_policy() -> None:
    event = decision("r", 5.0, 60, (61,), costs=(0.5, 0.5123))
    row = row_of(event)
    assert row["not_richest"] == "w1/0 has 1 block more, but costs 12.3 ms more"
    assert ([one["cost"] for one in row["candidates"]], row["unit"]) == ([500.0, pytest.approx(512.3)], "ms")
    event.decision.explanation.policy = "my-policy"
    row = row_of(event)
    assert row["not_richest"] == "w1/0 has 1 block more, but costs 0.0123 more"
    assert (row["candidates"][0]["cost"], row["unit"]) == (0.5, "")


def test_a_worker_with_more_that_might_not_be_chosen_is_named_with_the_reason() -> None:
    event = decision("r", 5.0, 10, (90,))
    other = event.decision.explanation.candidates[1]
    other.eligible, other.ineligible_reason = False, scheduler_pb2.INELIGIBLE_REASON_BUSY
    assert row_of(event)["not_richest"] == "w1/0 has 80 blocks more, but is busy"


def test_a_worker_with_more_that_costs_no_more_was_not_drawn() -> None:
    event = decision("r", 5.0, 10, (90,), costs=(2.0, 2.0))
    assert row_of(event)["not_richest"] == "w1/0 has 80 blocks more, but was not drawn"
