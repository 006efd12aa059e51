"""The arithmetic of rounds and rows, on drivers that answer from a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvscout_bench.harness import OURS, Case, Row, Side, interleave, measure_by, rounded, side_of
from kvscout_bench.machine import Machine
from kvscout_bench.peer import Driver

MACHINE = Machine("cpu", 2, 4.0, "6.1", "3.11", "")


class Scripted(Driver):
    """A driver that has one workload, and writes down the requests."""

    def __init__(self, name: str, log: list[str], *values: float) -> None:
        self.name, self.log, self.values = name, log, iter(values)

    def request(self, verb: str, *, within_seconds: float = 0, **arguments: object) -> Mapping[str, Any]:
        self.log.append(self.name)
        if arguments["workload"] == "absent":
            return {"unsupported": "absent"}
        return {"median": next(self.values)}


def case(goal: float | None = None, *, more_is_better: bool = False) -> Case:
    return Case(
        name="n/w",
        title="a title",
        unit="µs",
        goal=goal,
        more_is_better=more_is_better,
        workload="w",
        value=lambda sample: float(sample["median"]),
    )


def test_sides_are_interleaved_and_the_first_one_alternates() -> None:
    log: list[str] = []
    drivers = {"ours": Scripted("ours", log, 1, 2, 3), "peer": Scripted("peer", log, 4, 5, 6)}
    samples = interleave(list(drivers), ["w"], measure_by(drivers, 0.1), rounds=3)
    assert log == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert [sample["median"] for sample in samples["peer", "w"]] == [4, 5, 6]


def test_a_workload_that_a_driver_does_not_have_gives_no_side() -> None:
    samples = interleave([OURS], ["absent"], measure_by({OURS: Scripted("ours", [])}, 0.1), rounds=2)
    assert samples == {}
    assert side_of(case(), "ours", samples) is None


def test_a_side_is_the_median_of_its_rounds() -> None:
    side = Side((3.0, 1.0, 2.0), (30.0, 10.0, 20.0))
    assert (side.value, side.p99) == (2.0, 20.0)
    assert side.spread == (1.0, 3.0)
    assert Side((1.0,)).p99 is None


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [(case(2.0), 2.0, True), (case(2.0), 2.1, False), (case(70.0, more_is_better=True), 70.0, True)],
)
def test_a_goal_is_met_at_its_value(goal: Case, value: float, met: bool) -> None:
    assert Row(goal, Side((value,))).met is met


def test_a_run_that_is_too_short_judges_nothing() -> None:
    assert Row(case(2.0), Side((1.0,)), judged=False).met is None


def test_the_ratio_says_how_many_times_better_we_are() -> None:
    peers = {"slow": Side((6.0,)), "fast": Side((1.0,)), "free": Side((0.0,))}
    less, more = Row(case(9.0), Side((2.0,)), peers), Row(case(9.0, more_is_better=True), Side((2.0,)), peers)
    assert [less.ratio(peer) for peer in ("slow", "fast")] == [pytest.approx(3.0), pytest.approx(0.5)]
    assert more.ratio("slow") == pytest.approx(1 / 3)
    assert more.ratio("free") is None


def test_a_row_is_one_json_object_with_all_rounds_of_all_sides() -> None:
    ours = Side((1.23456, 2.0, 1.0), (3.0, 4.0, 5.0), ({"gateway": 1.0},), ({"load": 7.0},))
    row = Row(case(2.0), ours, {"peer": Side((4.0,))}, machine=MACHINE)
    value = json.loads(json.dumps(row.as_json()))
    assert value["workload"] == "n/w"
    assert (value["value"], value["unit"], value["goal"], value["met"]) == (1.235, "µs", 2.0, True)
    assert (value["values"], value["p99"], value["p99s"]) == ([1.235, 2.0, 1.0], 4.0, [3.0, 4.0, 5.0])
    assert (value["parts"], value["beside"]) == ([{"gateway": 1.0}], [{"load": 7.0}])
    assert value["peers"] == {"peer": {"value": 4.0, "values": [4.0], "p99": None, "ratio": 3.24}}
    assert value["machine"]["cores"] == 2


def test_numbers_are_rounded_to_four_digits() -> None:
    assert [rounded(value) for value in (None, 123456.0, 0.000123456)] == [None, 123500.0, 0.0001235]
