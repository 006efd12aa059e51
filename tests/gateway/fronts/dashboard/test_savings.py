"""What was saved, and how much of what was possible."""

from __future__ import annotations

from random import Random

import pytest
from support.scripted_dashboard import decision, moment

from kvscout.v1 import scheduler_pb2
from kvscout_common.doctor.moment import Moment
from kvscout_common.doctor.snapshot import Snapshot
from kvscout_gateway.fronts.dashboard.savings import KEPT, Possible, savings


def pools_of(now: Moment) -> list[scheduler_pb2.PoolLoad]:
    ((_, status),) = now.snapshot.statuses(scheduler_pb2.SchedulerGetStatusResponse)
    return list(status.pools)


def test_the_time_saved_is_what_the_cached_tokens_would_have_taken_at_the_learned_speed() -> None:
    found = savings(moment(Random(1), 4, requests=100))
    assert found["prompt"] == 160_000
    assert 0 < found["cached"] < found["prompt"]
    assert found["gpu_seconds"] == pytest.approx(found["cached"] * 75e-6)
    assert found["token_seconds"] == pytest.approx(75e-6)


def test_without_a_learned_speed_the_time_is_not_known() -> None:
    now = moment(Random(1), 4)
    for pool in pools_of(now):
        pool.ClearField("prefill_token_seconds")
    found = savings(now)
    assert found["cached"] > 0
    assert (found["gpu_seconds"], found["token_seconds"]) == (None, None)


def test_a_speed_is_that_of_the_workers_own_pool() -> None:
    now = moment(Random(1), 4)
    for pool in pools_of(now):
        pool.model = "another"
    assert savings(now)["gpu_seconds"] is None


def test_nothing_is_known_of_nothing() -> None:
    found = savings(Moment(1.0, Snapshot(()), {}))
    assert found == {"prompt": 0, "cached": 0, "gpu_seconds": None, "token_seconds": None}


def test_the_share_of_what_was_possible_counts_each_decision_once() -> None:
    possible = Possible()
    assert possible.document() == {"share": None, "decisions": 0}
    first, second = decision("a", 1.0, 60, (80,)), decision("b", 2.0, 40, (10, 20))
    possible.follow([first])
    possible.follow([second, first])
    possible.follow([second, first])
    assert possible.document() == {"share": 100 / 120, "decisions": 2}


def test_decisions_that_failed_do_not_count_and_the_number_that_does_is_bounded() -> None:
    possible = Possible()
    possible.follow([scheduler_pb2.WatchDecisionsResponse(code=14)])
    assert possible.document()["decisions"] == 0
    for index in range(KEPT + 10):
        possible.follow([decision(str(index), float(index), 50, (100,))])
    assert possible.document() == {"share": 0.5, "decisions": KEPT}
