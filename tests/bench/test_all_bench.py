"""A run of everything: what is reported, what a part that fails costs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from kvscout_bench import all_bench
from kvscout_bench.all_bench import PARTS, AllBench, Measured, Report
from kvscout_bench.all_report import markdown
from kvscout_bench.harness import Case, Goal, Row, Side, compare
from kvscout_bench.machine import Machine
from kvscout_bench.peer import DriverFailed
from kvscout_bench.scheduler_bench import SchedulerBench
from kvscout_common.errors import InvalidArgument

MACHINE = Machine("cpu", 2, 4.0, "6.1", "3.11", "")


def row(name: str, ours: float, peer: float | None = None, goal: float | None = None, title: str = "a | title") -> Row:
    case = Case(
        name=name, title=title, unit="µs", goal=Goal(goal) if goal else None, workload=name, value=lambda sample: 0.0
    )
    return compare(case, Side((ours,)), Side((peer,)) if peer else None, judge=True, machine=MACHINE)


def report(*rows: Row, failure: str = "") -> Report:
    part = Measured(rows, failure, 12.0, (0.5, 1.5))
    return Report(MACHINE, {"kvscout": "1"}, "abc+", 2, False, {"rpc": part})


def test_where_we_lose_is_said_worst_first_and_only_of_peers_that_ran() -> None:
    published = row("zmq/message", 20.0, 17.0, title="CPU a message (peer: published)")
    told = report(row("a", 2.0, 1.0), row("b", 4.0, 1.0), row("c", 1.0, 2.0), published, row("d", 3.0, goal=2.0))
    assert [lost.workload for _, lost in told.lost()] == ["b", "a"]
    assert [missed.workload for _, missed in told.missed()] == ["d"]
    text = markdown(told)
    assert "* rpc: a | title: 4 µs, peer 1" in text
    assert "| a / title | **3 µs** | – | 2 | – | – | – | 3 … 3 |" in text
    assert "(17)" in text
    assert "commit: abc+" in text
    assert "load average 0.50 before, 1.50 after" in text
    value = json.loads(json.dumps(told.as_json()))
    assert value["lost"] == ["b", "a"]
    assert value["missed"] == ["d"]
    assert len(value["parts"]["rpc"]["rows"]) == 5


def test_a_part_that_fails_is_told_with_what_it_had_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Callable[[str], None]) -> Iterator[Row]:
        yield row("first", 1.0)
        raise DriverFailed("no cargo")

    def works(_: Callable[[str], None]) -> Iterator[Row]:
        yield row("second", 1.0)

    monkeypatch.setattr(AllBench, "_runs", lambda self: {"index": fails, "rpc": works})
    told = AllBench(parts=("rpc", "index"), quick=True).run(lambda said: None)
    assert list(told.parts) == ["index", "rpc"]
    assert [each.workload for each in told.parts["index"].rows] == ["first"]
    assert "**Ended early:** no cargo" in markdown(told)
    assert not told.parts["rpc"].failure


def test_every_part_has_a_run_and_the_peers_that_it_knows() -> None:
    assert set(AllBench(peers=tuple(all_bench.PEERS))._runs()) == set(PARTS)


def test_a_quick_part_runs_over_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    only = SchedulerBench(only=("core/queue",), quick=True)
    monkeypatch.setattr(AllBench, "_runs", lambda self: {"scheduler": only.run})
    told = AllBench(parts=("scheduler",), quick=True).run(lambda said: None)
    (turn,) = told.parts["scheduler"].rows
    assert turn.value > 0
    assert told.versions["grpcio"]
    assert "## scheduler" in markdown(told)


@pytest.mark.parametrize(
    ("bench", "field"), [({"rounds": 0}, "rounds"), ({"peers": ("nginx",)}, "peers"), ({"parts": ("x",)}, "parts")]
)
def test_a_wrong_value_is_refused_by_name(bench: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        AllBench(**bench)  # type: ignore[arg-type]
    assert refused.value.field == field
