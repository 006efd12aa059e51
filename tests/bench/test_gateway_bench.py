"""The gateway benchmark: a short run over real services, its stand-in engines, and what it makes of costs."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from math import isfinite

import pytest

from kvscout_bench.gateway_bench import CHUNKS, GATEWAY_CASES, GatewayBench
from kvscout_bench.gateway_load import CompletionClient, Send, Sent, at_rate
from kvscout_bench.gateway_loads import RATES, Cost, Saturation, Subject
from kvscout_bench.gateway_prompts import short_prompts
from kvscout_bench.gateway_stack import Stack, addresses_of, engines_process
from kvscout_bench.strangers import DriverFailed
from kvscout_common.errors import InvalidArgument


def test_a_quick_run_tells_what_each_process_takes_and_judges_nothing() -> None:
    said: list[str] = []
    (row,) = GatewayBench(only=("life/40",), quick=True, peers=("services",)).run(said.append)
    assert (row.case.name, row.case.unit, row.case.goal, row.met) == ("life/40", "µs", 1_000.0, None)
    value = row.as_json()
    assert set(value["parts"][0]) == {"serve"}
    assert set(value["peers"]["services"]["parts"][0]) == {"gateway", "scheduler", "indexer"}
    assert set(value["beside"][0]) == {"load", "engines"}
    assert "serve" in row.title
    assert "life/40, ours" in said


def test_what_a_chunk_costs_is_the_difference_of_many_and_one() -> None:
    request, chunk = (case for case in GATEWAY_CASES if case.name.startswith("generate/"))
    one, many = Cost({"gateway": 1_030.0}, p99=5.0), Cost({"gateway": 1_000.0 + 30.0 * CHUNKS}, p99=700.0)
    assert request.cost((one, many)).parts == pytest.approx({"gateway": 1_000.0})
    assert chunk.cost((one, many)).microseconds == pytest.approx(30.0)


def test_what_is_added_is_what_an_engine_alone_does_not_take() -> None:
    median, p99 = (case for case in GATEWAY_CASES if case.name.startswith("first/completion"))
    direct, through = Cost({}, first_ms={50: 1.0, 99: 4.0}), Cost({"gateway": 900.0}, first_ms={50: 2.5, 99: 9.0})
    assert median.value(median.cost((direct, through))) == 1.5
    assert p99.value(p99.cost((direct, through))) == 5.0


def test_memory_is_told_by_process_and_added_up() -> None:
    case = next(case for case in GATEWAY_CASES if case.name == "many/generate")
    cost = case.cost((Cost({"gateway": 1.0}, grown_kib={"gateway": 40.0, "scheduler": 2.0}),))
    assert case.value(cost) == 42.0
    assert cost.parts == {"gateway": 40.0, "scheduler": 2.0}


def test_the_time_to_the_first_output_and_growth_are_seen() -> None:
    (row,) = GatewayBench(only=("first/completion/p50",), quick=True).run(lambda line: None)
    assert (row.case.unit, row.case.goal, row.met) == ("ms", 1.0, None)
    # A difference of two medians of few requests: on a busy machine it may be anything.
    assert isfinite(row.ours.value)
    assert row.ours.parts[0]["serve"] > 0


async def test_the_engines_stream_as_many_events_as_they_are_asked_for() -> None:
    with engines_process(1) as engines:
        async with CompletionClient(addresses_of(engines)[0], short_prompts()) as client:
            sent = await at_rate(client.complete(3), per_second=100, seconds=0.05)
    assert sent.requests == len(sent.seconds) == len(sent.first_seconds) == 5
    assert all(first <= whole for first, whole in zip(sent.first_seconds, sent.seconds, strict=True))


async def test_a_request_that_fails_ends_the_run() -> None:
    async def send(number: int) -> None:
        await asyncio.sleep(0)
        raise OSError("no route to it")

    with pytest.raises(DriverFailed, match="no route to it"):
        await at_rate(send, per_second=100, seconds=0.05)


async def test_no_request_begins_after_too_many_were_late() -> None:
    async def send(number: int) -> float:
        await asyncio.sleep(0.01)
        return time.perf_counter()

    sent = await at_rate(send, per_second=200, seconds=1.0, give_up=0.001)
    assert 2 < sent.late <= sent.requests < 200


async def test_saturation_is_the_highest_rate_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    most = RATES[12]

    async def run(self: Subject, send: Send, per_second: float, seconds: float, give_up: float = 0.0) -> Sent:
        return Sent(first_seconds=[0.001], late=0 if per_second <= most else 1_000)

    monkeypatch.setattr(Subject, "run", run)
    with engines_process(1) as engines:
        subject = Subject(lambda addresses, flags: Stack({}, ExitStack(), "", addresses[0]), engines, ())
        cost = await Saturation(name="s", per_second=100, send=lambda client: client.complete(1)).run(subject, 1.0)
    assert cost is not None and cost.figure == most


def test_starts_are_timed_up_to_a_completion_that_was_routed() -> None:
    (row,) = GatewayBench(only=("start",), quick=True, peers=("services",)).run(lambda line: None)
    assert (row.case.unit, row.case.goal) == ("s", 0.7)
    assert row.ours.value > 0 < row.peers["services"].value


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as refused:
        GatewayBench(peers=("nginx",))
    assert refused.value.field == "peer"
