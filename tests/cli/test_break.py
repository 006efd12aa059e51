"""`kvscout break`, `load` and `logs` beside a real `kvscout up`: an engine fails, is started again, is mended."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from cli.test_up import kvscout, output, state_of, up
from support.processes import DEADLINE_SECONDS, eventually

from kvscout_cli.commands.up import how_to_talk_to_it
from kvscout_client import Router, StopConditions
from kvscout_common.errors import Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="module")

Up = tuple[asyncio.subprocess.Process, Path]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    directory = tmp_path_factory.mktemp("up")
    async with up(directory, "--mockers", "2") as (process, _):
        yield process, directory
        process.send_signal(signal.SIGINT)
        await output(process)
        assert await process.wait() == 0


async def told(running: Up, *words: str) -> tuple[int | None, str]:
    """What a command about the stack prints."""
    done = await kvscout(words[0], *words[1:], "--state-dir", str(running[1]))
    return done.returncode, await output(done)


async def state(running: Up) -> dict[str, Any]:
    return await state_of(running[1], running[0])


async def healthy(url: str) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(1)) as http,
            http.get(f"{url}/health") as answer,
        ):
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def test_a_killed_engine_is_started_again_with_its_ports_and_the_log_says_so(running: Up) -> None:
    before = await state(running)
    code, text = await told(running, "break", "mocker-0", "--kill")
    assert (code, text.endswith("`kvscout up` starts it again\n")) == (0, True)

    async def runs_again() -> bool:
        pid = (await state(running))["processes"]["mocker-0"]
        return pid != before["processes"]["mocker-0"] and await healthy(before["engines"]["mocker-0"])

    await eventually(runs_again, what="engine that runs again")
    _, log = await told(running, "logs", "up")
    assert "mocker-0 was killed by SIGKILL unasked; it is started again in 1 s" in log
    async with Router(before["gateway"], model="mock-model") as router:
        prompt, only = range(1_000, 1_064), StopConditions(max_tokens=2)

        async def serves() -> bool:
            try:
                return bool([one async for one in router.generate(prompt, stop=only, pinned_worker_id="mocker-0")])
            except Unavailable:
                return False  # the gateway has not yet seen that it is back

        await eventually(serves, what="answers of the new engine")

        async def indexed() -> bool:
            return (await router.route(prompt, pinned_worker_id="mocker-0")).overlap_blocks == 4

        await eventually(indexed, what="the new engine's blocks in the index")


async def test_a_hanging_engine_answers_nothing_until_it_is_mended(running: Up) -> None:
    url = (await state(running))["engines"]["mocker-1"]
    code, text = await told(running, "break", "mocker-1", "--hang")
    assert (code, "`kvscout break mocker-1 --mend` undoes it" in text) == (0, True)
    pid = (await state(running))["processes"]["mocker-1"]
    assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    assert not await healthy(url)
    assert await told(running, "break", "mocker-1", "--mend") == (0, "mocker-1 is well\n")
    await eventually(lambda: healthy(url), what="an engine that answers again")


async def test_a_slow_and_a_mute_engine_are_so_until_they_are_mended(running: Up) -> None:
    read = await state(running)
    async with Router(read["gateway"], model="mock-model") as router:

        async def blocks_after(prompt: range) -> int:
            async for _ in router.generate(prompt, stop=StopConditions(max_tokens=2), pinned_worker_id="mocker-1"):
                pass
            return (await router.route(prompt, pinned_worker_id="mocker-1")).overlap_blocks

        for fault, effect in (("--slow", "takes 10 times as long"), ("--mute-events", "publishes no events")):
            code, text = await told(running, "break", "mocker-1", fault)
            assert (code, effect in text) == (0, True)
        assert await blocks_after(range(5_000, 5_064)) == 0
        assert (await told(running, "break", "mocker-1", "--mend"))[0] == 0

        async def heard() -> bool:
            return await blocks_after(range(6_000, 6_064)) == 4

        await eventually(heard, what="events again")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("break", "mocker-11", "--kill"),
            "there is no simulated engine 'mocker-11'; did you mean 'mocker-1'? Known: ",
        ),
        (("break", "mocker-1"), "Give one of --kill, --hang, --slow, --mute-events, --mend."),
        (("logs", "gatewy"), "there is no process 'gatewy'; did you mean 'gateway'? Known: "),
    ],
)
async def test_what_is_not_there_is_told_with_what_is(running: Up, words: tuple[str, ...], expected: str) -> None:
    code, text = await told(running, *words)
    assert code != 0
    assert expected in text


async def test_without_a_stack_it_is_told_how_to_start_one(tmp_path: Path) -> None:
    for words in (("break", "mocker-0", "--kill"), ("logs",)):
        done = await kvscout(*words, "--state-dir", str(tmp_path))
        assert done.returncode == 1
        assert "kvscout up" in await output(done)


async def test_logs_follow_one_process_until_ctrl_c(running: Up) -> None:
    following = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", "logs", "up", "--follow", "--state-dir", str(running[1])),
        stdout=asyncio.subprocess.PIPE,
    )
    assert following.stdout is not None
    seen = b""
    async with asyncio.timeout(2 * DEADLINE_SECONDS):
        assert (await told(running, "break", "mocker-0", "--kill"))[0] == 0
        while b"mocker-0 runs again" not in seen:
            seen += await following.stdout.readline()
        following.send_signal(signal.SIGINT)
        assert await following.wait() == 0
    assert all(line.startswith(b"up ") for line in seen.splitlines())


@pytest.mark.parametrize("workload", ["sessions", "agents"])
async def test_load_is_sent_and_its_measures_are_printed(running: Up, workload: str) -> None:
    read = await state(running)
    flags = ("--workload", workload, "--rate", "4", "--duration", "1", "--json", "--gateway", read["gateway"])
    done = await kvscout("load", *flags)
    measured = json.loads(await output(done))
    assert (done.returncode, measured["errors"], measured["error_texts"]) == (0, 0, {})
    assert measured["requests"] >= 4
    assert measured["hit_rate"] is not None
    assert measured["ttft_p99_seconds"] >= measured["ttft_mean_seconds"] > 0


async def test_load_that_fails_is_told_and_exits_with_1(running: Up, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        json.dumps({"timestamp": 0, "input_length": 100_000, "output_length": 2, "hash_ids": [*range(196)]})
    )
    read = await state(running)
    done = await kvscout("load", "--trace", str(trace), "--gateway", read["gateway"])
    text = await output(done)
    assert done.returncode == 1
    assert "last 10 s" in text
    assert "1 × InvalidArgument: " in text


async def test_the_commands_that_up_prints_work_where_they_are_pasted(running: Up) -> None:
    read = await state(running)
    lines = how_to_talk_to_it(read).partition("Try, in any terminal:\n\n")[2].splitlines()
    commands = [line.strip() for line in lines if line.startswith("  ")]
    assert [shlex.split(command)[0].rpartition("/")[2] for command in commands] == [
        "export",
        "kvscout",
        "kvscout",
        "curl",
        "kvscout",
    ]
    script = "\n".join(["set -e", *commands[:-1], f"{commands[-1]} --once"])
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", script),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVSCOUT_")},
    )
    text = await output(process)
    assert await process.wait() == 0, text
    assert '"text_completion"' in text


async def test_a_text_is_tokenized_by_an_engine(running: Up) -> None:
    gateway = ("--gateway", (await state(running))["gateway"])
    done = await kvscout("generate", "--text", "once upon a time " * 8, "--max-tokens", "2", "--json", *gateway)
    answer = json.loads(await output(done))
    assert (done.returncode, answer["usage"]["prompt_tokens"]) == (0, 32)
    done = await kvscout("route", "--text", "once upon a time " * 8, *gateway)
    assert "overlap   " in await output(done)
    done = await kvscout("route", "1", "--text", "once", *gateway)
    assert (done.returncode, "Give token ids" in await output(done)) == (2, True)
