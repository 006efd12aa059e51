"""The arithmetic of rounds and rows, on drivers that answer from a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvscout_bench.harness import Case, Goal, Side, compare, in_turns, rounded, side_of
from kvscout_bench.machine import Machine

MACHINE = Machine("cpu", 2, 4.0, "6.1", "3.11", "")


class Scripted:
    """A driver that has one workload, and writes down who was asked."""

    def __init__(self, name: str, log: list[str], *values: float) -> None:
        self.name, self.log, self.values = name, log, iter(values)

    def request(self, verb: str, *, within_seconds: float = 0, **arguments: object) -> Mapping[str, Any]:
        self.log.append(self.name)
        if arguments["workload"] == "absent":
            return {"unsupported": "absent"}
        return {"median": next(self.values)}


def case(goal: Goal | None = None) -> Case:
    return Case(
        name="n/w",
        title="a title",
        unit="µs",
        goal=goal,
        workload="w",
        value=lambda sample: float(sample["median"]),
    )


def test_sides_take_turns_and_alternate_who_begins() -> None:
    log: list[str] = []
    drivers = {"ours": Scripted("ours", log, 1, 2, 3), "peer": Scripted("peer", log, 4, 5, 6)}
    samples = in_turns(drivers, ["w"], rounds=3, seconds=0.1)
    assert log == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert [sample["median"] for sample in samples["peer", "w"]] == [4, 5, 6]


def test_a_workload_that_a_driver_does_not_have_gives_no_side() -> None:
    samples = in_turns({"ours": Scripted("ours", [])}, ["absent"], rounds=2, seconds=0.1)
    assert samples == {}
    assert side_of(case(), "ours", samples) is None


def test_a_side_is_the_median_of_its_rounds() -> None:
    side = Side((3.0, 1.0, 2.0), (30.0, 10.0, 20.0))
    assert (side.value, side.p99) == (2.0, 20.0)
    assert Side((1.0,)).p99 is None


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [(Goal(2.0), 2.0, True), (Goal(2.0), 2.1, False), (Goal(70.0, more_is_better=True), 70.0, True)],
)
def test_a_goal_is_met_at_its_value(goal: Goal, value: float, met: bool) -> None:
    assert compare(case(goal), Side((value,)), None, judge=True, machine=MACHINE).met is met


def test_a_run_that_is_too_short_judges_nothing() -> None:
    assert compare(case(Goal(2.0)), Side((1.0,)), None, judge=False, machine=MACHINE).met is None


def test_the_ratio_says_how_many_times_better_we_are() -> None:
    less = compare(case(Goal(9.0)), Side((2.0,)), Side((6.0,)), judge=True, machine=MACHINE)
    more = compare(case(Goal(9.0, more_is_better=True)), Side((2.0,)), Side((6.0,)), judge=True, machine=MACHINE)
    assert less.ratio == pytest.approx(3.0)
    assert more.ratio == pytest.approx(1 / 3)


def test_a_row_is_one_json_object_with_all_that_is_promised() -> None:
    row = compare(case(Goal(2.0)), Side((1.23456, 2.0, 1.0)), Side((4.0,)), judge=True, machine=MACHINE)
    value = json.loads(json.dumps(row.as_json()))
    assert value["workload"] == "n/w"
    assert (value["value"], value["unit"], value["goal"], value["met"]) == (1.235, "µs", 2.0, True)
    assert (value["peer"], value["ratio"], value["spread"], value["rounds"]) == (4.0, 3.24, [1.0, 2.0], 3)
    assert value["machine"]["cores"] == 2


def test_numbers_are_rounded_to_four_digits() -> None:
    assert [rounded(value) for value in (None, 123456.0, 0.000123456)] == [None, 123500.0, 0.0001235]
