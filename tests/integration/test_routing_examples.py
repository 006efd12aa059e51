"""The examples of how a gateway is used, run as they stand."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.gateway_stack import MODEL, Stack, mocker_worker, running_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = Path(__file__).parents[2] / "examples/routing"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with running_stack(mockers=((), (), ("--model", "far", "--vocab-size", "4096"))) as started:
        await started.client.register(mocker_worker("w2", started.mockers[2], model="far"))
        yield started


async def run(stack: Stack, name: str, *arguments: str) -> list[str]:
    """The lines that an example prints; nothing is booked when it has ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / name),
        "--gateway",
        stack.gateway.address,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    await stack.client.until_idle()
    return out.decode().splitlines()


async def test_the_gateway_decides_and_runs(stack: Stack) -> None:
    first, _ = await run(stack, "automatic.py", "--model", MODEL)
    assert re.fullmatch(r"turn 1: w\d generated 16 tokens, 0 of the prompt were cached", first)
    # Its second turn may come before the events of the first.
    await stack.client.until_indexed(range(1, 513), 31)
    turns = await run(stack, "automatic.py", "--model", MODEL)
    told = [re.fullmatch(r"turn \d: w\d generated 16 tokens, (\d+) of the prompt were cached", turn) for turn in turns]
    assert [cached and cached[1] for cached in told] == ["496", "496"]


async def test_the_caller_sends_what_the_gateway_booked(stack: Stack) -> None:
    booked, generated = await run(stack, "manual_lifecycle.py", "--model", MODEL)
    assert re.fullmatch(r"booked on w\d: \d+ of 32 blocks cached", booked)
    assert generated == "generated 16 tokens"


async def test_the_caller_chooses_between_two_groups(stack: Stack) -> None:
    lines = await run(stack, "two_groups.py", "--models", "far", "nobody", MODEL)
    assert ["nobody is out of the question" in line for line in lines] == [True, False, True, False]
    ran = [re.search(r"ran on (\w+)", line) for line in lines[1::2]]
    assert all(ran)
    assert len({found[1] for found in ran if found}) == 1, "the second turn goes where the prompt is"


async def test_the_caller_chooses_by_load(stack: Stack) -> None:
    [ran] = await run(stack, "own_choice.py", "--model", MODEL)
    times = {worker: int(number) for worker, number in re.findall(r"(w\d) ran (\d)", ran)}
    assert sum(times.values()) == 8
    assert set(times) == {"w0", "w1"}


async def test_the_caller_minimises_the_time_to_first_token(stack: Stack) -> None:
    [told] = await run(stack, "least_ttft.py", "--model", MODEL, "--speed", "w0=1000", "--speed", "w1=1000000")
    assert told.startswith("w1: expected ")


async def test_predictions_are_held_against_what_the_engine_says(stack: Stack) -> None:
    metrics = f"http://127.0.0.1:{stack.gateway.ready['metrics_port']}/metrics"
    flags = ("--front", "grpc", "--metrics", metrics, "--requests", "6")
    asked, cached, predicted = await run(stack, "../predictions.py", "--model", "far", *flags)
    assert re.fullmatch(r"6 requests in \d+ s, [\d,]+ prompt tokens", asked)
    assert re.fullmatch(r"cached, as the engines say: [\d,]+ tokens, [\d.]+%", cached)
    # Where events are late on a busy machine, a prediction may be wrong; each is checked.
    assert re.fullmatch(r"predicted exactly: \d of 6 checked, [\d.]+%", predicted)
