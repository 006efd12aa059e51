"""`kvscout demo`, end to end, small."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import psutil
from processes import DEADLINE_SECONDS, eventually

SMALL = ("--sessions", "12", "--rate", "4", "--think-seconds", "0.5", "--blocks", "768", "--seed", "9")


async def demo(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvscout_cli.main", "demo", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_kv_reuses_at_least_twice_the_tokens_of_round_robin_without_errors() -> None:
    process = await demo(*SMALL, "--json")
    async with asyncio.timeout(4 * DEADLINE_SECONDS):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    result = json.loads(out)
    for policy in ("round-robin", "kv"):
        summary = result["policies"][policy]
        assert (summary["requests"], summary["errors"], summary["refused"]) == (61, 0, 0)
        assert (summary["unreported"], summary["mispredicted"], summary["prompt_tokens"] > 0) == (0, 0, True)
    assert result["policies"]["round-robin"]["request_balance"] < 0.05
    assert result["improvement"]["token_hit_rate"] >= 2


async def test_ctrl_c_in_the_middle_leaves_nothing() -> None:
    process = await demo(*SMALL, "--mockers", "1")
    children: set[psutil.Process] = set()

    async def replaying() -> bool:
        children.update(psutil.Process(process.pid).children(recursive=True))
        return len(children) >= 4 and any("kvscout_gateway.main" in child.cmdline() for child in children)

    await eventually(replaying, what="a whole stack")
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(DEADLINE_SECONDS):
        _, err = await process.communicate()
    assert process.returncode == 130, err.decode()
    assert "Traceback" not in err.decode()
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
