"""Laboratory and stack side by side: the same requests, and what is made of both."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from kvscout_cli.topology import Mockers, Topology, _mocker
from kvscout_lab.cells.cells import Contender
from kvscout_lab.real_time import cross_check
from kvscout_lab.real_time.cross_check import (
    CELLS,
    Checked,
    RealCell,
    conversations,
    markdown,
    outcome,
    simulated,
    table,
)
from kvscout_lab.real_time.record import Replay, RequestRecord
from kvscout_scheduler.policies import installed_policies

SECONDS = 20.0


def turns(name: str, seed: int = 3) -> list[Any]:
    return [turn for flow in CELLS[name].workload(SECONDS, seed).flows for turn in flow.turns]


def contender(name: str = "kv-time") -> Contender:
    return Contender.parse(name, installed_policies())


def test_a_cell_is_what_its_name_says() -> None:
    plain = [turn.output_tokens for turn in turns("bounded-conversations")]
    assert {turn.max_tokens for turn in turns("bounded-conversations")} == {4_096}
    assert {turn.max_tokens for turn in turns("bounded-agents")} == {32_768}
    assert max(plain) < 4_096 / 50
    whole = Counter(turn.streamed for turn in turns("unstreamed"))
    assert 0.2 < whole[False] / whole.total() < 0.4
    long = [turn.output_tokens > 45 for turn in turns("long-answers")]
    assert 0.2 < sum(long) / len(long) < 0.4
    assert CELLS["slow-decoder"].decode_speed == pytest.approx(1 / 3)
    for name, api in (("agents-messages", "messages"), ("agents-responses", "responses")):
        cell = CELLS[name]
        assert (cell.engines, cell.api().path) == (8, api)
        assert {4, 12} <= {len(flow.turns) for flow in cell.workload(200.0, 3).flows} <= set(range(4, 13))
    starts = [flow.start_seconds % 15.0 for flow in CELLS["bursts"].workload(60.0, 3).flows]
    assert sum(start < 3.0 for start in starts) / len(starts) > 0.95


def test_cells_are_the_same_every_time_and_fit_the_engines() -> None:
    room = (cross_check.BLOCKS - 1) * cross_check.BLOCK_SIZE
    for cell in CELLS.values():
        workload = cell.workload(SECONDS, 1)
        assert workload == cell.workload(SECONDS, 1) != cell.workload(SECONDS, 2)
        assert all(turn.prompt_tokens + turn.max_tokens <= room for flow in workload.flows for turn in flow.turns)
        assert all(turn.output_tokens >= 1 for flow in workload.flows for turn in flow.turns)


def test_one_engine_alone_is_slow() -> None:
    mockers = Mockers(3, flags=cross_check.step_flags(), first_flags=cross_check.step_flags(1 / 3))

    def costs(index: int) -> list[str]:
        words = list(_mocker(Topology(mockers), index).arguments)
        names = ("--step-base-ms", "--prefill-us-per-token", "--decode-us-per-request", "--context-ns-per-token")
        return [words[words.index(name) + 1] for name in names]

    first, second, third = ([float(cost) for cost in costs(index)] for index in range(3))
    assert second == third
    assert first == pytest.approx([3 * second[0], second[1], 3 * second[2], 3 * second[3]])


def test_the_laboratory_simulates_what_the_stack_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_check, "DRAWS", 2)
    cell = RealCell(conversations)
    workload = cell.workload(5.0, 1)
    found = simulated(cell, workload, contender())
    assert [each.requests for each in found] == [workload.requests] * 2
    assert found[0].ttft != found[1].ttft, "a little later each time"


def record(number: int, *, ttft: float, cached: int, error: str = "") -> RequestRecord:
    due = float(number)
    first = due + ttft
    gaps = (0.1, 0.3)
    return RequestRecord(f"{number}", 0, due, due, first + 0.4, 100, first, gaps, 3, cached_tokens=cached, error=error)


def checked(monkeypatch: pytest.MonkeyPatch, *stack: tuple[str, float, float]) -> Checked:
    """What the laboratory says of two policies, and what a stack did: policy, hit rate, TTFT."""
    monkeypatch.setattr(cross_check, "DRAWS", 2)
    cell = RealCell(conversations)
    workload = cell.workload(5.0, 1)
    outcomes = []
    for policy, hit_rate, ttft in stack:
        run = Replay(tuple(record(number, ttft=ttft, cached=round(100 * hit_rate)) for number in range(10)), 0, 10.0)
        outcomes.append(outcome(contender(policy), simulated(cell, workload, contender(policy)), run, 0.5))
    return Checked("some", tuple(outcomes))


def test_what_a_stack_did_is_taken_without_its_first_requests_and_without_those_that_failed() -> None:
    records = [record(0, ttft=50.0, cached=0), *(record(number, ttft=0.5, cached=60) for number in range(1, 9))]
    records.append(record(9, ttft=9.0, cached=0, error="gone"))
    one = outcome(contender(), (), Replay(tuple(records), 0, 20.0), None)
    assert (one.hit_rate, one.errors, one.requests) == (0.6, 1, 10)
    assert one.ttft == pytest.approx(0.5)
    assert one.itl == pytest.approx(0.2)


def test_the_order_of_policies_and_the_difference_of_hit_rates_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    same = checked(monkeypatch, ("kv-time", 0.5, 0.1), ("round-robin", 0.2, 9.0))
    assert same.orders == (["kv-time", "round-robin"], ["kv-time", "round-robin"])
    other = checked(monkeypatch, ("kv-time", 0.5, 9.0), ("round-robin", 0.2, 0.1))
    assert other.orders == (["kv-time", "round-robin"], ["round-robin", "kv-time"])
    expected = max(abs(one.hit_rate - one.simulated_hit_rate) for one in other.outcomes)
    assert other.hit_rate_difference == expected > 0
    document = json.loads(json.dumps(other.as_json()))
    assert (document["cell"], document["same_order"]) == ("some", False)
    assert [each["policy"] for each in document["policies"]] == ["kv-time", "round-robin"]
    assert document["policies"][0]["ttft_ms"]["stack"] == pytest.approx(9_000)
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(table([same, other]))
    text = captured.get()
    assert "the same order" in text
    assert "round-robin < kv-time" in text
    page = markdown([same, other])
    assert "| `some` | `kv-time` |" in page
    assert "by TTFT kv-time < round-robin, on the stack round-robin < kv-time." in page
