"""The matrix: its cells, what of them is run again, and what its table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvscout_cli.main import main
from kvscout_common.errors import ConfigError
from kvscout_lab.cells.cells import Contender
from kvscout_lab.matrix.rates import SATURATED
from kvscout_lab.matrix.report import markdown, verdicts
from kvscout_lab.matrix.run import MatrixPlan, Results, RunKey, experiment_of, run_matrix
from kvscout_lab.matrix.setups import TRACE, MatrixCell, matrix, setups
from kvscout_lab.workloads.generators import GENERATED
from kvscout_scheduler.policies import installed_policies

SMALL = "embeddings/8w@600/s"


def contenders(*labels: str) -> tuple[Contender, ...]:
    return tuple(Contender.parse(label, installed_policies()) for label in labels)


def plan(*labels: str, seeds: int = 2, pattern: str = SMALL) -> MatrixPlan:
    return MatrixPlan(tuple(matrix(pattern=pattern)), contenders(*labels), seeds, 0.02)


def test_there_are_a_hundred_cells_each_with_a_name_and_a_rate_of_its_own() -> None:
    cells = matrix()
    assert len(cells) >= 100
    assert len({cell.name for cell in cells}) == len(cells)
    assert all(cell.rate > 0 for cell in matrix(trace=True))
    groups = {cell.name.partition("/")[0] for cell in cells}
    assert {
        "max-tokens",
        "unstreamed",
        "long-answers",
        "bursts",
        "mixed",
        "apart",
        "faults",
        "cold",
        "engines",
    } <= groups
    assert {cell.setup.workload for cell in cells} == set(GENERATED)
    assert any(cell.setup.workload == TRACE for cell in matrix(trace=True))


def test_what_does_not_count_is_a_share_and_in_cold_cells_all_counts() -> None:
    for cell in matrix(trace=True):
        cold = cell.name.startswith("cold/")
        assert (cell.setup.uncounted == 0) == cold
        assert 0 <= cell.setup.uncounted < 0.5
    assert experiment_of(matrix(pattern="cold/agents-as*")[0].setup, 0, 0.3).objective.warm_up == 0
    assert experiment_of(matrix(pattern="shared-prompt/8w*")[0].setup, 0, 0.1).objective.warm_up == 0.3


def test_every_saturated_rate_is_of_a_setup() -> None:
    names = {setup.name for setup in setups()}
    assert SATURATED.keys() <= names
    assert {setup.rates_of for setup in setups() if setup.rates_of} <= SATURATED.keys()


@pytest.mark.parametrize(
    "name", sorted({setup.name.partition("/")[0] for setup in setups() if setup.workload != TRACE})
)
def test_each_group_can_be_run(name: str) -> None:
    cell = matrix(pattern=f"{name}/*")[-1]
    measures = experiment_of(cell.setup, 1, 0.03).run(contenders("kv-time")[0].settings, cell.rate)
    assert measures.requests >= 90
    assert not measures.errors
    assert 0 < measures.well_served <= 1


def test_processes_and_one_process_find_the_same(tmp_path: Path) -> None:
    two = plan("kv-time", "lmetric")
    assert run_matrix(two) == run_matrix(two, jobs=2, path=tmp_path / "runs.jsonl")


def test_what_was_run_before_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.jsonl"
    first = run_matrix(plan("kv-time", "kv"), path=path)
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == len(first) == 4
    # Stopped while it wrote the last one: that one is run again, and what is there stays.
    path.write_text("".join(lines[:3]) + lines[3][:40])
    ran: list[str] = []
    run_matrix(plan("kv-time", "kv"), path=path, on_done=lambda *each: ran.append(each[2]))
    assert len(ran) == 2
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
    # Another seed, another policy, and one that is to be run anew: each alone.
    for made, again, runs in (
        (plan("kv-time", "kv", seeds=3), (), 2),
        (plan("kv-time", "kv", "lmetric", seeds=3), (), 3),
        (plan("kv-time", "kv", "lmetric", seeds=3), ("kv-time",), 3),
        (plan("kv-time", "kv", "lmetric", seeds=3), (), 0),
    ):
        before = len(path.read_text().splitlines())
        results = run_matrix(made, path=path, again=again)
        assert len(path.read_text().splitlines()) == before + runs
        assert len(results) == len(made.contenders) * made.seeds
    # A cell that is another one under the same name is run again.
    (cell,) = matrix(pattern=SMALL)
    other = replace(plan("kv"), cells=(replace(cell, setup=replace(cell.setup, warm_up=0.2)),))
    before = len(path.read_text().splitlines())
    run_matrix(other, path=path)
    assert len(path.read_text().splitlines()) == before + 2


@pytest.mark.parametrize("text", ["no json\n", "[]\n", '{"cell": "x"}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1") as raised:
        run_matrix(plan("kv"), path=path)
    assert raised.value.field == "out"
    assert path.read_text() == text


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "from kvscout_lab.matrix.run import end_with_parent\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, mp_context=get_context('spawn'), initializer=end_with_parent)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    deadline = time.monotonic() + 60
    while _runs(child):
        assert time.monotonic() < deadline, f"process {child} goes on"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    """Whether a process is there, and is more than the record of one that has ended."""
    try:
        return (Path("/proc") / str(process) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def made_up(cell: MatrixCell, values: dict[str, list[tuple[float, float]]]) -> Results:
    """TTFT and goodput by policy and seed."""

    def run(ttft: float, well: float) -> dict[str, Any]:
        return {"ttft": {"mean": ttft}, "well_served": well, "hit_rate": 0.5, "errors": 0, "requests": 7}

    return {
        RunKey(cell.name, label, seed): run(*pair) for label, pairs in values.items() for seed, pair in enumerate(pairs)
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "ttft_lost", "goodput_lost"),
    [
        # Always 5 % worse: lost, however much seeds differ.
        ([(1.05, 1.0), (2.1, 1.0), (3.15, 1.0)], [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)], True, False),
        # Worse on average, and by chance; then by less than counts.
        ([(1.3, 1.0), (1.0, 1.0), (0.9, 1.0)], [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], False, False),
        ([(1.01, 1.0), (1.01, 1.0), (1.01, 1.0)], [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], False, False),
        ([(0.5, 0.96), (0.5, 0.96), (0.5, 0.96)], [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], False, True),
        ([(0.5, 0.98), (0.5, 0.98), (0.5, 0.98)], [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)], False, False),
    ],
)
def test_what_is_lost_is_bold(
    ours: list[tuple[float, float]], theirs: list[tuple[float, float]], ttft_lost: bool, goodput_lost: bool
) -> None:
    (cell,) = matrix(pattern=SMALL)
    three = replace(plan("kv-time", "kv", "lmetric", seeds=3), cells=(cell,))
    worst = [(9.0, 0.1)] * 3
    (found,) = verdicts(three, made_up(cell, {"kv-time": ours, "kv": worst, "lmetric": theirs}))
    assert (found.ttft_lost, found.goodput_lost) == (ttft_lost, goodput_lost)
    assert (found.best_ttft, found.best_goodput) == ("lmetric", "lmetric")
    text = markdown([found], three, "the command")
    begins = ("| cell", "| **8w" if found.lost else "| 8w")
    head, row = (next(line for line in text.splitlines() if line.startswith(begin)) for begin in begins)
    assert head.count("|") == row.count("|")
    assert text.splitlines()[1] == "the command"
    assert ("**" in row) == found.lost


def test_a_policy_that_fails_requests_wins_nothing() -> None:
    (cell,) = matrix(pattern=SMALL)
    three = replace(plan("kv-time", "kv", "lmetric", seeds=3), cells=(cell,))
    results = made_up(cell, {"kv-time": [(1.0, 1.0)] * 3, "kv": [(0.1, 1.0)] * 3, "lmetric": [(2.0, 1.0)] * 3})
    results[RunKey(SMALL, "kv", 1)]["errors"] = 5
    (found,) = verdicts(three, results)
    assert (found.best_ttft, found.lost, found.failed) == ("lmetric", False, 0)
    results[RunKey(SMALL, "kv-time", 2)]["errors"] = 3
    (found,) = verdicts(three, results)
    assert (found.lost, found.failed) == (True, 3)
    assert "**3 requests failed**" in markdown([found], three, "the command")


def test_the_command_runs_cells_and_says_how_to_run_them_again(tmp_path: Path) -> None:
    arguments = ["replay", "--matrix", "--cells", SMALL, "--scale", "0.02", "--seeds", "2"]
    arguments += ["--policy", "kv-time", "--policy", "kv", "--out", str(tmp_path / "runs.jsonl")]
    outputs = [CliRunner().invoke(main, [*arguments, *more]) for more in ((), ("--json",), ("--markdown",))]
    assert [each.exit_code for each in outputs] == [0, 0, 0], outputs[0].output
    assert "1 cells" in outputs[0].stdout
    told = json.loads(outputs[1].stdout)
    assert (told["cell"], set(told["ttft"])) == (SMALL, {"kv-time", "kv"})
    command = "kvscout replay --matrix --cells embeddings/8w@600/s --seeds 2 --scale 0.02 --policy kv-time --policy kv"
    assert f"{command} --markdown" in outputs[2].stdout


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--cells", "nothing/*"], "cells"),
        (["--cells", SMALL, "--scale", "1000"], "scale"),
        (["--cells", SMALL, "--policy", "kv", "--policy", "kv"], "policy"),
        (["--cells", SMALL, "--policy", "nothing"], "unknown policy"),
    ],
)
def test_wrong_usage_names_what_is_wrong(arguments: list[str], field: str) -> None:
    result = CliRunner().invoke(main, ["replay", "--matrix", *arguments])
    assert result.exit_code == 2
    assert field in result.output


def test_a_cell_that_replays_a_trace_needs_one(tmp_path: Path) -> None:
    cell = next(cell for cell in matrix(trace=True) if cell.setup.workload == TRACE)
    with pytest.raises(ConfigError) as raised:
        experiment_of(cell.setup, 0)
    assert raised.value.field == "trace"
    path = tmp_path / "mine.jsonl"
    lines = [
        {"timestamp": 100 * number, "input_length": 1_100 + number, "output_length": 5, "hash_ids": [number % 3, 9, 10]}
        for number in range(250)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    # Each seed has another part of it.
    experiments = [experiment_of(replace(cell.setup, requests=100), seed, 1.0, path) for seed in (0, 1, 2)]
    parts = [experiment.run(contenders("kv")[0].settings, 5.0) for experiment in experiments]
    assert [each.requests for each in parts] == [100, 100, 100]
    assert parts[0].ttft != parts[1].ttft
