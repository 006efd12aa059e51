"""`kvscout demo`, end to end, small."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
from support.processes import DEADLINE_SECONDS, eventually

SMALL = ("--sessions", "14", "--rate", "5", "--think-seconds", "0.5", "--blocks", "768", "--seed", "1")


@asynccontextmanager
async def demo(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", "demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


async def test_kv_reuses_at_least_twice_the_tokens_of_round_robin_without_errors() -> None:
    async with demo(*SMALL, "--mockers", "6", "--json") as process, asyncio.timeout(4 * DEADLINE_SECONDS):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    result = json.loads(out)
    for policy in ("round-robin", "kv-time"):
        summary = result["policies"][policy]
        assert (summary["requests"], summary["errors"], summary["refused"]) == (82, 0, 0)
        assert (summary["unreported"], summary["abandoned_turns"]) == (0, 0)
    sent = [result["policies"][policy]["prompt_tokens"] for policy in result["policies"]]
    assert sent[0] == sent[1] > 0
    assert result["policies"]["round-robin"]["request_balance"] < 0.05
    assert result["improvement"]["token_hit_rate"] >= 2


async def test_prefill_and_decode_apart_serve_the_same_sessions_without_errors() -> None:
    arguments = ("--sessions", "6", "--rate", "5", "--think-seconds", "0.2", "--mockers", "4", "--disagg", "--json")
    async with demo(*arguments) as process, asyncio.timeout(4 * DEADLINE_SECONDS):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    policies = json.loads(out)["policies"]
    assert list(policies) == ["aggregated", "disaggregated"]
    sent = [(summary["requests"], summary["errors"], summary["prompt_tokens"]) for summary in policies.values()]
    assert sent[0] == sent[1]
    assert sent[0][1] == 0
    assert policies["disaggregated"]["token_hit_rate"] > 0


async def test_ctrl_c_in_the_middle_leaves_nothing() -> None:
    children: set[psutil.Process] = set()

    async with demo(*SMALL, "--mockers", "1") as process:

        async def replaying() -> bool:
            assert process.returncode is None
            children.update(psutil.Process(process.pid).children(recursive=True))
            return any("kvscout_gateway.main" in command_of(child) for child in children)

        await eventually(replaying, what="a whole stack")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_SECONDS):
            _, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    assert "Traceback" not in err.decode()
    assert len(children) == 4
    assert not any(command_of(child) for child in children)
