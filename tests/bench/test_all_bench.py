"""A run of everything: what is reported, what a part that fails costs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvscout_bench import all_bench
from kvscout_bench.all_bench import PARTS, AllBench, Measured, Report
from kvscout_bench.all_report import markdown
from kvscout_bench.harness import Bench, Case, Row, Say, Side
from kvscout_bench.machine import Machine
from kvscout_bench.scheduler_bench import SchedulerBench
from kvscout_bench.strangers import DriverFailed
from kvscout_common.errors import InvalidArgument

MACHINE = Machine("cpu", 2, 4.0, "6.1", "3.11", "")


def row(
    name: str, ours: float, peer: float | None = None, goal: float | None = None, published: float | None = None
) -> Row:
    case = Case(name=name, title="a | title", unit="µs", goal=goal, value=float)
    case = replace(case, published=(published, published) if published else None)
    return Row(case, Side((ours,)), {"peer": Side((peer,))} if peer else {})


def report(*rows: Row, failure: str = "") -> Report:
    part = Measured(rows, failure, 12.0, (0.5, 1.5))
    return Report(MACHINE, {"kvscout": "1"}, "abc+", 2, False, {"rpc": part})


def test_losses_are_reported_worst_first_and_only_of_peers_that_ran() -> None:
    published = row("zmq/message", 20.0, published=17.0)
    whole = report(row("a", 2.0, 1.0), row("b", 4.0, 1.0), row("c", 1.0, 2.0), published, row("d", 3.0, goal=2.0))
    assert [(lost.case.name, peer) for _, lost, peer in whole.lost()] == [("b", "peer"), ("a", "peer")]
    assert [missed.case.name for _, missed in whole.missed()] == ["d"]
    text = markdown(whole)
    assert "* rpc: a | title: 4 µs, peer 1" in text
    assert "| a / title | **3 µs** | 3 … 3 | – | 2 | – | – |" in text
    assert "| a / title | 1 µs | 1 … 1 | – | – | – | 2 (2.00×) |" in text
    assert "| 17 … 17 |" in text
    assert "commit: abc+" in text
    assert "load average 0.50 before, 1.50 after" in text
    value = json.loads(json.dumps(whole.as_json()))
    assert value["lost"] == ["b: peer", "a: peer"]
    assert value["missed"] == ["d"]
    assert len(value["parts"]["rpc"]["rows"]) == 5


def test_a_part_that_fails_is_reported_with_its_rows_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(SchedulerBench):
        def run(self, say: Say) -> Iterator[Row]:
            yield row("first", 1.0)
            raise DriverFailed("no cargo")

    class Works(SchedulerBench):
        def run(self, say: Say) -> Iterator[Row]:
            yield row("second", 1.0)

    monkeypatch.setattr(all_bench, "BENCHES", {"index": Fails, "rpc": Works})
    whole = AllBench(parts=("rpc", "index"), quick=True).run(lambda said: None)
    assert list(whole.parts) == ["index", "rpc"]
    assert [each.case.name for each in whole.parts["index"].rows] == ["first"]
    assert "**Ended early:** no cargo" in markdown(whole)
    assert not whole.parts["rpc"].failure


@pytest.mark.parametrize("part", PARTS)
def test_every_part_runs_beside_the_peers_that_it_knows(part: str) -> None:
    bench = AllBench(peers=tuple(all_bench.PEERS))._bench(part)
    assert set(bench.peers) == {*all_bench.PEERS} & {*bench.PEERS}


def test_a_quick_part_runs_over_real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def queue_only(self: AllBench, part: str) -> Bench:
        return SchedulerBench(only=("core/queue",), quick=self.quick)

    monkeypatch.setattr(AllBench, "_bench", queue_only)
    whole = AllBench(parts=("scheduler",), quick=True).run(lambda said: None)
    (dequeue,) = whole.parts["scheduler"].rows
    assert dequeue.ours.value > 0
    assert whole.versions["grpcio"]
    assert "## scheduler" in markdown(whole)


@pytest.mark.parametrize(
    ("bench", "field"), [({"rounds": 0}, "rounds"), ({"peers": ("nginx",)}, "peers"), ({"parts": ("x",)}, "parts")]
)
def test_a_wrong_value_is_refused_by_name(bench: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        AllBench(**bench)  # type: ignore[arg-type]
    assert refused.value.field == field
