"""Decisions as rows: what the chosen worker had, and why it was chosen."""

from __future__ import annotations

import json
from typing import Any

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


def test_it_says_in_a_sentence_why_it_was_chosen_and_what_the_others_would_cost() -> None:
    event = decision("r", 5.0, 60, (80, 95))
    row = row_of(event)
    assert row["summary"].startswith("cost 38 ms, with 960 of 1,600 prompt tokens cached there; w1, ")
    assert row["best"] == 95
    assert [one["cost"] for one in row["candidates"]] == ["38 ms", "76 ms", "114 ms"]


def test_of_a_scheduler_without_such_a_sentence_the_reason_and_the_numbers_are_shown() -> None:
    event = decision("r", 5.0, 60, (80,))
    event.decision.explanation.summary = ""
    for one in event.decision.explanation.candidates:
        one.cost_text = ""
    row = row_of(event)
    assert (row["summary"], row["reason"]) == ("it is cheapest", "")
    assert [one["cost"] for one in row["candidates"]] == [1.0, 2.0]


def test_a_sentence_that_does_not_begin_with_the_workers_name_stays_whole() -> None:
    event = decision("r", 5.0, 60)
    event.decision.explanation.summary = "note: all are busy"
    assert row_of(event)["summary"] == "note: all are busy"
