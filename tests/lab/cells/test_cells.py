"""Policies side by side: how they are named, what is told of them, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple, cast

import pytest
from click.testing import CliRunner
from support.laboratory_worlds import ENGINE, mixed

from kvscout_cli.main import main
from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_lab.cells.cells import Cell, Contender, Experiment
from kvscout_lab.cells.lab_policies import SessionSticky, lab_policies
from kvscout_lab.cells.measures import Objective
from kvscout_lab.cells.report import as_json, markdown, seeds_table, table
from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.worker import EngineSettings
from kvscout_lab.workloads.generators import (
    CodingAgents,
    Documents,
    SharedPrompt,
    coding_agents,
    documents,
    shared_prompt,
)
from kvscout_scheduler.policies import Candidates, installed_policies

SMALL = ["replay", "--requests", "80", "--workers", "2", "--policy", "kv", "--policy", "round-robin"]


def contender(text: str) -> Contender:
    return Contender.parse(text, installed_policies())


def test_a_policy_is_named_with_settings_of_the_scheduler() -> None:
    made = contender("kv:overlap_score_weight=2,queue_threshold=0.5,queue_limit=7")
    assert (made.settings.policy, made.settings.overlap_score_weight) == ("kv", 2.0)
    assert (made.settings.queue_threshold, made.settings.queue_limit) == (0.5, 7)


@pytest.mark.parametrize("text", ["kv:nothing=1", "kv:queue_limit=many", "kv:queue_limit", "kv:policy=1"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        contender(text)
    assert raised.value.field == "policy"


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="known are"):
        contender("nothing")


@pytest.mark.parametrize("objective", [Objective(ttft_seconds=0), Objective(itl_seconds=0), Objective(warm_up=1)])
def test_an_objective_out_of_range_is_refused(objective: Objective) -> None:
    with pytest.raises(ConfigError):
        objective.validate()


def test_measures_of_a_cell_agree_with_each_other() -> None:
    experiment = Experiment(mixed(5, 200), Cluster(workers=3, engine=ENGINE), objective=Objective(warm_up=0.0))
    cell = experiment.cell([contender("kv"), contender("least-loaded")], 20.0)
    for _, measures in cell.results:
        assert measures.requests == 200
        assert measures.bound_ttft_mean <= measures.ttft.mean
        assert measures.ttft.p50 <= measures.ttft.p90 <= measures.ttft.p99
        assert 0 < measures.hit_rate <= measures.bound_hit_rate < 1
        assert 1 <= measures.hottest <= 3
        assert measures.goodput <= measures.request_rate
        assert 1 / 3 <= measures.hottest_share <= 1
    told = as_json(cell)
    assert [each["policy"] for each in told["results"]] == ["kv", "least-loaded"]
    assert json.loads(json.dumps(told)) == told
    head, _, row = markdown([cell]).splitlines()
    assert head.count("|") == row.count("|")
    kv = cell.results[0].measures
    assert f"| {kv.ttft.mean:.3f} / {kv.ttft.p99:.2f} /" in row


def test_turns_after_the_first_are_told_of_apart_where_there_are_any() -> None:
    agents = coding_agents(CodingAgents(sessions=8, seed=3))
    cell = Experiment(agents, Cluster(workers=3)).cell(
        [Contender.parse(name, lab_policies()) for name in ("session-sticky", "least-loaded")], 0.2
    )
    sticky, least_loaded = (measures for _, measures in cell.results)
    for measures in (sticky, least_loaded):
        # First turns find the instructions at most, and no answer of their own.
        assert measures.later_hit_rate > measures.hit_rate
        assert 0 < measures.later_ttft.mean < measures.ttft.mean
    assert sticky.later_hit_rate > least_loaded.later_hit_rate
    single = Experiment(documents(Documents(requests=60)), Cluster(workers=2, engine=EngineSettings(block_size=16)))
    without = single.cell([contender("kv")], 2.0)
    assert without.results[0].measures.later_ttft.mean == without.results[0].measures.later_hit_rate == 0
    for made, has_later in ((cell, True), (without, False)):
        for table_of in (table(made), seeds_table([made, made])):
            headers = [str(column.header) for column in table_of.columns]
            assert ("later turns: TTFT" in headers) == has_later


def test_a_session_sticks_to_its_worker_and_a_new_one_goes_where_the_fewest_are() -> None:
    class Sessions(NamedTuple):
        slots: list[int]
        active_requests: list[int]
        home: int

    policy = SessionSticky()
    for home, least in ((1, 1), (-1, 2)):
        costs = policy.costs(cast(Candidates, Sessions([0, 1, 2], [2, 9, 0], home)))
        assert costs.index(min(costs)) == least


def test_where_kv_saturates_is_between_what_it_carries_and_what_it_does_not() -> None:
    experiment = Experiment(mixed(5, 150), Cluster(workers=2, engine=ENGINE))
    rate = experiment.saturation()
    below, above = (experiment.run(contender("kv").settings, rate * factor) for factor in (0.5, 3.0))
    assert below.ttft.mean < 5 * below.bound_ttft_mean
    assert above.ttft.mean > 5 * above.bound_ttft_mean


def test_too_few_requests_saturate_nothing_and_it_says_so() -> None:
    experiment = Experiment(mixed(5, 3), Cluster(workers=4, engine=ENGINE))
    with pytest.raises(ConfigError, match="too few") as raised:
        experiment.saturation()
    assert raised.value.field == "requests"


def test_a_system_prompt_that_is_warm_on_one_worker_fills_that_worker_with_kv_and_not_with_kv_time() -> None:
    questions = shared_prompt(SharedPrompt(requests=500, prompt_tokens=32_768))
    experiment = Experiment(questions, Cluster(workers=20), lead_seconds=10)
    kv_time, kv = (experiment.run(contender(policy).settings, 24) for policy in ("kv-time", "kv"))
    assert kv_time.hottest < 4
    assert kv.hottest > 8
    assert kv_time.ttft.mean < kv.ttft.mean / 2


def test_idle_workers_share_out_documents_that_none_of_their_caches_could_hold() -> None:
    # 48 documents, of which each of four caches holds twelve; one request at a time.
    experiment = Experiment(documents(), Cluster(workers=4, engine=EngineSettings(block_size=16, kv_tokens=16_384)))
    measures = experiment.run(contender("kv-time").settings, 0.5)
    assert measures.hit_rate > 0.95 * measures.bound_hit_rate
    assert measures.hottest_share < 0.35


def test_the_command_prints_the_same_table_each_time() -> None:
    outputs = [CliRunner().invoke(main, [*SMALL, "--rate", "3", "--burst", "3"]) for _ in range(2)]
    assert [output.exit_code for output in outputs] == [0, 0]
    assert outputs[0].stdout == outputs[1].stdout
    assert "round-robin" in outputs[0].stdout
    assert "bound" in outputs[0].stdout


def test_real_processes_are_not_asked_for_a_policy_of_the_laboratory() -> None:
    asked = ["--policy", "session-sticky", "--rate", "3"]
    assert CliRunner().invoke(main, [*SMALL, *asked]).exit_code == 0
    result = CliRunner().invoke(main, ["replay", "--cross-check", *asked])
    assert result.exit_code == 2
    assert "unknown policy 'session-sticky'" in result.output


def test_the_command_makes_a_cell_of_each_combination() -> None:
    result = CliRunner().invoke(main, [*SMALL, "--workers", "3", "--rate", "2", "--rate", "4", "--json"])
    assert result.exit_code == 0, result.output
    cells = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(cell["workers"], cell["rate"]) for cell in cells] == [(2, 2.0), (2, 4.0), (3, 2.0), (3, 4.0)]


def test_replicas_and_their_delays_make_cells_and_one_replica_has_no_delay() -> None:
    arguments = [*SMALL, "--rate", "20", "--gateways", "2", "--replicas", "1", "--replicas", "2"]
    result = CliRunner().invoke(main, [*arguments, "--sync-ms", "2", "--sync-ms", "1e9", "--seeds", "2", "--json"])
    assert result.exit_code == 0
    cells = [json.loads(line) for line in result.output.splitlines()]
    assert [(cell["replicas"], cell["sync_ms"]) for cell in cells] == [(1, 2), (2, 2), (2, 1e9)]
    assert all(row["ttft_p99"]["mean"] > 0 and row["hottest"]["mean"] >= 1 for cell in cells for row in cell["results"])
    titles = CliRunner().invoke(main, [*arguments, "--sync-ms", "2"]).output
    assert titles.count("2 schedulers 2 ms apart") == 1


def test_cells_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra lab is not installed")
    picture = tmp_path / "cells.svg"
    result = CliRunner().invoke(main, [*SMALL, "--rate", "2", "--rate", "4", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert picture.read_text().startswith("<?xml")


def test_the_command_prints_all_cells_as_one_table() -> None:
    result = CliRunner().invoke(main, [*SMALL, "--rate", "2", "--rate", "4", "--markdown"])
    assert result.exit_code == 0, result.output
    assert [line.split(" | ")[3] for line in result.stdout.splitlines()[2:]] == ["2", "4"]


def test_the_command_replays_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    lines = [
        {"timestamp": 100 * number, "input_length": 1_100, "output_length": 5, "hash_ids": [number % 3, 9, number + 10]}
        for number in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(main, ["replay", "--trace", str(trace), "--policy", "kv", "--rate", "10", "--json"])
    assert result.exit_code == 0, result.output
    cell = json.loads(result.stdout)
    assert (cell["workload"], cell["results"][0]["requests"]) == ("mine", 20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "nothing"], "unknown policy"),
        (["--policy", "kv:queue_limit=0"], "queue_limit"),
        (["--kv-tokens", "10"], "kv_tokens"),
        (["--speed", "1"] * 17, "speeds"),
        (["--max-tokens", "many"], "max_tokens"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--unstreamed", "2"], "--unstreamed"),
        (["--restart-gateway", "0.5", "--prefill-workers", "1"], "restart_gateway"),
    ],
)
def test_wrong_usage_names_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["replay", "--requests", "10", "--rate", "1", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_cell_of_none_has_a_title() -> None:
    assert as_json(Cell("w", 1, 0, 1, 1.0, None, ()))["results"] == []


def test_dynamo_with_its_defaults_decides_as_kv_does_and_with_newer_weights_otherwise() -> None:
    experiment = Experiment(mixed(5, 200), Cluster(workers=3, engine=ENGINE))
    names = ("kv", "dynamo-defaults", "dynamo-scale-3", "dynamo-decay-1")
    kv, *dynamo = (experiment.run(Contender.parse(name, lab_policies()).settings, 40.0) for name in names)
    assert dynamo[0] == kv
    assert all(measures != kv for measures in dynamo[1:])
