"""The benchmark of calls: a short run over real processes."""

from __future__ import annotations

import sys

import psutil
import pytest

from kvscout_bench.peer import Driver
from kvscout_bench.rpc_bench import CASES, GOALS, RpcBench
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available


@pytest.mark.skipif(not native_available(), reason="the extension is not built: nothing to compare")
def test_a_quick_run_tells_both_sides_of_every_kind_of_call() -> None:
    only = ("find/4096/300", "python/0/saturated", "message/4096/saturated")
    rows = {row.workload: row for row in RpcBench(peer="grpcio", only=only, quick=True).run(lambda text: None)}
    assert set(rows) == {f"{who}/{workload}" for who in ("server", "client") for workload in only}
    assert all(row.value > 0 and row.peer and row.met is None for row in rows.values())


def test_a_side_that_is_closed_leaves_no_service_behind() -> None:
    with Driver([sys.executable, "-m", "kvscout_bench.rpc_driver", "grpcio"]) as driver:
        driver.ask("run", workload="python/0/saturated", seconds=0.05)
        started = psutil.Process(driver.pid).children()
    assert started
    assert not [child for child in started if child.is_running()]


def test_every_goal_is_of_a_row() -> None:
    assert set(GOALS) <= {case.name for case in CASES}


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as refused:
        RpcBench(peer="tonic")
    assert refused.value.field == "peer"
