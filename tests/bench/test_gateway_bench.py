"""The gateway benchmark: a short run over real services, its stand-in engines, and what it makes of costs."""

from __future__ import annotations

import asyncio
from math import isfinite

import pytest

from kvscout_bench.gateway_bench import CHUNKS, GATEWAY_CASES, Cost, GatewayBench
from kvscout_bench.gateway_load import CompletionClient, at_rate
from kvscout_bench.gateway_stack import addresses_of, engines_process
from kvscout_bench.peer import DriverFailed
from kvscout_common.errors import InvalidArgument


def test_a_quick_run_tells_what_each_process_takes_and_judges_nothing() -> None:
    said: list[str] = []
    (row,) = GatewayBench(only=("life/40",), quick=True).run(said.append)
    assert (row.workload, row.unit, row.goal, row.met, row.peer) == ("life/40", "µs", 1_000.0, None, None)
    assert set(row.as_json()["parts"]) == {"gateway", "scheduler", "indexer"}
    assert "gateway" in row.title
    assert "life/40, ours" in said


def test_what_a_chunk_costs_is_the_difference_of_many_and_one() -> None:
    request, chunk = (case for case in GATEWAY_CASES if case.name.startswith("generate/"))
    one, many = Cost({"gateway": 1_030.0}, p99=5.0), Cost({"gateway": 1_000.0 + 30.0 * CHUNKS}, p99=700.0)
    assert request.cost((one, many)).parts == pytest.approx({"gateway": 1_000.0})
    assert chunk.cost((one, many)).microseconds == pytest.approx(30.0)


def test_what_is_added_is_what_an_engine_alone_does_not_take() -> None:
    median, p99 = (case for case in GATEWAY_CASES if case.name.startswith("first/completion"))
    direct, through = Cost({}, first_ms=(1.0, 4.0)), Cost({"gateway": 900.0}, first_ms=(2.5, 9.0))
    assert median.value(median.cost((direct, through))) == 1.5
    assert p99.value(p99.cost((direct, through))) == 5.0


def test_memory_is_told_by_process_and_added_up() -> None:
    case = next(case for case in GATEWAY_CASES if case.name == "many/generate")
    cost = case.cost((Cost({"gateway": 1.0}, grown_kib={"gateway": 40.0, "scheduler": 2.0}),))
    assert case.value(cost) == 42.0
    assert cost.parts == {"gateway": 40.0, "scheduler": 2.0}


def test_the_time_to_the_first_output_and_growth_are_seen() -> None:
    (row,) = GatewayBench(only=("first/completion/p50",), quick=True).run(lambda line: None)
    assert (row.unit, row.goal, row.met) == ("ms", 3.0, None)
    # A difference of two medians of few requests: on a busy machine it may be anything.
    assert isfinite(row.value)
    assert row.parts["gateway"] > 0


async def test_the_engines_stream_as_many_events_as_they_are_asked_for() -> None:
    with engines_process(1) as engines:
        async with CompletionClient(addresses_of(engines)[0], tokens=16, seed=1, as_text=False) as client:
            sent = await at_rate(client.complete(3), per_second=100, seconds=0.05)
    assert sent.requests == len(sent.seconds) == len(sent.first_seconds) == 5
    assert all(first <= whole for first, whole in zip(sent.first_seconds, sent.seconds, strict=True))


async def test_a_request_that_fails_ends_the_run() -> None:
    async def send(number: int) -> None:
        await asyncio.sleep(0)
        raise OSError("no route to it")

    with pytest.raises(DriverFailed, match="no route to it"):
        await at_rate(send, per_second=100, seconds=0.05)


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as refused:
        GatewayBench(peers=("nginx",))
    assert refused.value.field == "peer"
