"""The benchmark of calls: a short run over real processes."""

from __future__ import annotations

import shutil
import sys

import psutil
import pytest

from kvscout_bench.peer import Driver
from kvscout_bench.rpc_bench import GOALS, KINDS, WORKLOADS, RpcBench
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available

ONE_OF_EACH = (
    "find/4096/8/300",
    "message/4096/8/saturated",
    "python/0/8/saturated",
    "route/512/8/300",
    "life/512/8/100",
    "stream/512/8/100",
)


@pytest.mark.skipif(not native_available(), reason="the extension is not built: nothing to compare")
def test_a_quick_run_tells_what_every_kind_of_call_costs() -> None:
    rows = {row.case.name: row for row in RpcBench(only=ONE_OF_EACH, quick=True).run(lambda text: None)}
    last = {w: "through" if w.endswith("/saturated") else "took" for w in ONE_OF_EACH}
    wanted = {f"{value}/{w}" for w in ONE_OF_EACH for value in ("server", "client", last[w])}
    assert set(rows) == wanted
    assert all(row.ours.value > 0 and not row.peers and row.met is None for row in rows.values())
    life = rows["server/life/512/8/100"].as_json()["parts"][0]
    assert set(life) == {"gateway", "scheduler", "indexer"}
    assert life["scheduler"] > life["gateway"]
    assert rows["through/python/0/8/saturated"].case.unit == "1/s"
    took = rows["took/find/4096/8/300"]
    assert took.ours.p99 is not None and took.ours.p99 >= took.ours.value


def test_a_side_that_is_closed_leaves_no_service_behind() -> None:
    with Driver([sys.executable, "-m", "kvscout_bench.rpc_driver", "grpcio"]) as driver:
        driver.request("run", workload="stream/512/8/saturated", seconds=0.05)
        assert driver.request("run", workload="find/512/8/300", seconds=0.05)["server_us"] > 0
        started = psutil.Process(driver.pid).children()
    assert len(started) == 3
    assert not [child for child in started if child.is_running()]


@pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not there: it compiles what only reads and writes")
def test_what_only_reads_and_writes_is_called_as_often_and_knows_no_other_kind() -> None:
    with Driver([sys.executable, "-m", "kvscout_bench.rpc_driver", "floor"]) as driver:
        for workload in ("find/4096/8/saturated", "find/512/8/300", "python/0/8/300"):
            sample = driver.request("run", workload=workload, seconds=0.1)
            assert sample["operations"] > 10 and set(sample["parts_us"]) == {"floor"}
        assert "unsupported" in driver.request("run", workload="route/512/8/300", seconds=0.1)
        (started,) = psutil.Process(driver.pid).children()
    assert not started.is_running()


def test_every_goal_is_of_a_row_and_every_kind_has_one() -> None:
    names = [case.name for case in RpcBench.CASES]
    assert set(GOALS) <= set(names)
    assert {workload.partition("/")[0] for workload in WORKLOADS} == set(KINDS)
    assert len(set(names)) == len(names)


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as refused:
        RpcBench(peers=("tonic",))
    assert refused.value.field == "peer"
