"""The benchmark of routers: a short run over real engines and services, and its workloads."""

from __future__ import annotations

import pytest

from kvscout_bench import routers_bench
from kvscout_bench.router_cells import CELLS
from kvscout_bench.routers_bench import ENGINES, RoutersBench


def test_a_quick_run_measures_clients_behind_our_services_and_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers_bench, "ENGINES", 3)
    said: list[str] = []
    rows = {
        row.case.name: row for row in RoutersBench(only=("restarts/",), quick=True, peers=("serve",)).run(said.append)
    }
    assert said == ["restarts", "restarts, ours, seed 0", "restarts, serve, seed 0"]
    assert set(rows) == {
        f"restarts/{measure}"
        for measure in ("hit-rate", "ttft-mean", "ttft-p99", "itl-mean", "failed", "cpu", "memory")
    }
    for row in rows.values():
        assert row.met is None
        for side in (row.ours, row.peers["serve"]):
            assert side.value >= 0
    # So few requests may all come before the events of those before them, at one of the two.
    hits = rows["restarts/hit-rate"]
    assert 0 < max(hits.ours.value, hits.peers["serve"].value) < 100
    assert rows["restarts/ttft-mean"].ours.value > 0
    assert rows["restarts/cpu"].ours.value > 0


@pytest.mark.parametrize("name", CELLS)
def test_each_seed_is_its_own_traffic_and_the_same_one_each_time(name: str) -> None:
    make = CELLS[name].make
    assert make(10.0, 1) == make(10.0, 1)
    assert make(10.0, 1) != make(10.0, 2)
    turns = [turn for flow in make(10.0, 1).flows for turn in flow.turns]
    assert all(turn.max_tokens == turn.output_tokens > 0 for turn in turns)


def test_caches_that_evict_hold_less_than_what_comes_back() -> None:
    for cell in CELLS.values():
        flows = cell.make(RoutersBench.SECONDS[0], 0).flows
        blocks = sum(len(flow.turns[-1].nodes) for flow in flows)
        assert (blocks < cell.blocks * ENGINES) == (cell.blocks > 10_000)
