"""The protocol and the fixture of Python drivers, on our index."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from kvscout_bench.driver_commands import serve
from kvscout_bench.index_bench_driver import Kvscout
from kvscout_bench.index_bench_serve import Fixture, IndexDriver, mix

LOAD = "load prompts=3 blocks=32 holders=4 lengths={} event_blocks={} workers=8 seed=1"
ARGUMENTS = {
    "prompts": "3",
    "blocks": "32",
    "holders": "4",
    "lengths": "unequal",
    "event_blocks": "8",
    "workers": "8",
    "seed": "1",
}


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver freezes the collector's heap, which must not reach the other tests of this process."""
    monkeypatch.setattr("gc.freeze", lambda: None)


def answers(*lines: str) -> list[dict[str, Any]]:
    out = io.StringIO()
    serve(IndexDriver(Kvscout), lines, out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    # First output of SplitMix64 seeded with 0.
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_holders_are_distinct_and_one_of_unequal_ones_has_all() -> None:
    fixture = Fixture(ARGUMENTS)
    for prompt in range(3):
        held = list(fixture.held(prompt))
        assert len({worker for worker, _ in held}) == 4
        assert max(blocks for _, blocks in held) == 32
        assert all(1 <= blocks <= 32 for _, blocks in held)


def test_tokens_are_sixteen_a_block_and_the_same_every_time() -> None:
    fixture = Fixture(ARGUMENTS)
    assert len(fixture.tokens(0)) == 32 * 16 * 4
    assert fixture.tokens(0) == Fixture(ARGUMENTS).tokens(0) != fixture.tokens(1)


@pytest.mark.parametrize("lengths", ["equal", "unequal", "random"])
def test_hashes_and_tokens_find_what_the_fixture_says_however_it_was_stored(lengths: str) -> None:
    fixture = Fixture(ARGUMENTS | {"lengths": lengths})
    expected = sum(
        (worker + 1) * blocks * (query + 1)
        for query in range(256)
        for worker, blocks in fixture.held(fixture.queried(query))
    )
    for event_blocks in (32, 5):
        loaded, hashes, tokens, missed = answers(
            LOAD.format(lengths, event_blocks),
            "check workload=find_hashes",
            "check workload=find_tokens",
            "check workload=find_miss",
        )
        assert loaded["memberships"] == sum(blocks for prompt in range(3) for _, blocks in fixture.held(prompt))
        assert (hashes["answers"], tokens["answers"], missed["answers"]) == (expected, expected, 0)


def test_a_run_counts_its_operations_in_order() -> None:
    _, run = answers(LOAD.format("equal", 32), "run workload=find_hashes seconds=0.01")
    assert run["operations"] >= 1
    assert 0 <= run["median_ns"] <= run["p99_ns"] <= run["max_ns"]


def test_while_a_whole_rank_is_worked_on_finds_are_timed_and_again_from_the_same_state() -> None:
    workloads = ("rank_load", "rank_demote", "rank_expire", "rank_dump")
    lines = [f"run workload={workload} seconds=1" for workload in workloads * 2]
    _, *runs, check = answers(LOAD.format("equal", 32), *lines, "check workload=find_miss")
    assert [run["workload"] for run in runs] == [*workloads, *workloads]
    for run in runs:
        assert run["operations"] >= 1
        assert 0 < run["call_cpu_ns"] <= run["work_cpu_ns"]
        assert run["calls"] >= 2 or run["workload"] == "rank_expire"
    assert check["answers"] == 0


def test_what_cannot_be_done_is_answered_and_the_driver_goes_on() -> None:
    before, _, unsupported, again, nonsense, hello, bye = answers(
        "run workload=find_hashes seconds=1",
        LOAD.format("equal", 32),
        "run workload=store_4 seconds=0.01",
        LOAD.format("equal", 32),
        "run seconds",
        "hello",
        "quit",
        "hello",
    )
    assert "error" in before
    assert unsupported == {"unsupported": "store_4"}
    assert "error" in again
    assert "error" in nonsense
    assert hello["driver"] == "kvscout"
    assert bye == {}
