"""`kvscout bench` as typed; what it measures is tested with the benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvscout_bench.gateway_bench import GatewayBench
from kvscout_bench.harness import Bench, Case, Row, Say, Side
from kvscout_bench.http_bench import HttpBench
from kvscout_bench.index_bench import IndexBench
from kvscout_bench.ingest_bench import IngestBench
from kvscout_bench.machine import Machine
from kvscout_bench.rpc_bench import RpcBench
from kvscout_bench.scheduler_bench import SchedulerBench
from kvscout_cli.main import main

ROW = Row(
    Case(name="native/hot/find_hashes", title="a find", unit="µs", goal=0.4, value=float),
    Side((0.5, 0.4, 0.6), (0.7,)),
    {"a peer": Side((1.0,))},
    machine=Machine("a cpu", 2, 4.0, "6.1", "3.11", "rustc 1"),
)


BENCHES = (IndexBench, IngestBench, SchedulerBench, GatewayBench, RpcBench, HttpBench)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Bench]:
    """The benchmarks that were run; each gives one row."""
    benches: list[Bench] = []

    def run(bench: Bench, say: Say) -> Iterator[Row]:
        benches.append(bench)
        say("native/hot")
        yield ROW

    for bench in BENCHES:
        monkeypatch.setattr(bench, "run", run)
    return benches


def test_without_a_subcommand_everything_is_measured_once(started: list[Bench]) -> None:
    result = CliRunner().invoke(main, ["bench"])
    assert result.exit_code == 0, result.output
    assert [type(bench) for bench in started] == [
        IndexBench,
        RpcBench,
        IngestBench,
        SchedulerBench,
        GatewayBench,
        HttpBench,
    ]
    assert "# What was measured" in result.stdout


def test_a_run_of_everything_hands_each_part_its_peers_and_reports_as_json(started: list[Bench]) -> None:
    peers = ["--peer", "dynamo", "--peer", "envoy", "--peer", "smg"]
    result = CliRunner().invoke(main, ["bench", "all", *peers, "--quick", "--json"])
    assert result.exit_code == 0, result.output
    index, rpc, ingest, _, gateway, http = started
    assert {bench.peers for bench in (index, rpc, ingest)} == {("dynamo",)}
    assert (gateway.peers, http.peers) == (("envoy", "smg"), ("envoy",))
    assert all(bench.quick for bench in started)
    report = json.loads(result.stdout)
    assert set(report["parts"]) == {"index", "rpc", "ingest", "scheduler", "gateway", "http"}
    assert report["parts"]["index"]["rows"][0]["workload"] == ROW.case.name


@pytest.mark.parametrize(
    ("name", "bench"),
    [
        ("ingest", IngestBench),
        ("scheduler", SchedulerBench),
        ("gateway", GatewayBench),
        ("rpc", RpcBench),
        ("http", HttpBench),
    ],
)
def test_every_subcommand_measures_its_own(started: list[Bench], name: str, bench: type[IngestBench]) -> None:
    result = CliRunner().invoke(main, ["bench", name, "--rounds", "2", "--quick"])
    assert result.exit_code == 0, result.output
    assert started == [bench(rounds=2, quick=True)]


def test_options_reach_the_benchmark(started: list[Bench]) -> None:
    arguments = ["--peer", "dynamo", "--rounds", "2", "--only", "hot/", "--only", "large/", "--seconds", "3"]
    result = CliRunner().invoke(main, ["bench", "index", *arguments])
    assert result.exit_code == 0, result.output
    assert started == [IndexBench(peers=("dynamo",), rounds=2, only=("hot/", "large/"), seconds=3.0)]


def test_several_peers_are_measured_in_one_run(started: list[Bench]) -> None:
    result = CliRunner().invoke(main, ["bench", "gateway", "--peer", "envoy", "--peer", "grpcio"])
    assert result.exit_code == 0, result.output
    assert started == [GatewayBench(peers=("envoy", "grpcio"))]


def test_json_is_one_object_a_line_and_nothing_else(started: list[Bench]) -> None:
    result = CliRunner().invoke(main, ["bench", "index", "--json"])
    lines = result.stdout.splitlines()
    assert [json.loads(line)["workload"] for line in lines] == ["native/hot/find_hashes"]
    assert len(started) == 1


def test_the_table_names_the_workload_its_goal_and_the_machine(started: list[Bench]) -> None:
    result = CliRunner().invoke(main, ["bench", "index"])
    assert "a find" in result.stdout
    assert "a peer" in result.stdout
    assert "1 (2.00×)" in result.stdout
    assert "a cpu, 2 cores" in result.stdout
    assert len(started) == 1


def test_a_workload_that_is_not_there_is_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["bench", "index", "--only", "no such thing"])
    assert result.exit_code == 2
    assert "only" in result.output


def test_without_a_clone_the_command_says_where_the_benchmarks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvscout_cli.commands import bench

    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "_IN_A_CLONE", Path("/nowhere"))
    monkeypatch.setattr(bench, "command", bench._find())
    for arguments in ([], ["index", "--quick"]):
        result = CliRunner().invoke(main, ["bench", *arguments])
        assert result.exit_code == 1
        assert "in a clone of" in result.output
    assert "bench" in CliRunner().invoke(main, ["--help"]).output


def test_in_a_clone_the_benchmarks_are_found_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvscout_cli.commands import bench

    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert bench._find() is bench.command
