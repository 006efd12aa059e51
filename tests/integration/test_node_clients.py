"""The clients of Node, `@anthropic-ai/sdk` and `openai`, against gateway and engines: an agent in each dialect."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.gateway_stack import MODEL, Stack, running_stack, until_all_indexed

FOLDER = Path(__file__).resolve().parents[1] / "node_clients"
MISSING = "node is not installed" if shutil.which("node") is None else "its packages are not installed: make setup"

pytestmark = [
    pytest.mark.usefixtures("each_mode"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        shutil.which("node") is None or not (FOLDER / "node_modules" / "openai").exists(), reason=MISSING
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    engine = ("--tool-call-share", "1")
    async with running_stack("--tokenize-timeout-ms", "5000", mockers=(engine, engine)) as started:
        yield started


async def lines_of_agent(stack: Stack, api: str) -> list[dict[str, Any]]:
    url = f"http://127.0.0.1:{stack.gateway.ready['http_port']}"
    process = await asyncio.create_subprocess_exec(
        "node",
        "agent.mjs",
        url,
        MODEL,
        api,
        cwd=FOLDER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lines: list[dict[str, Any]] = []
    async for line in process.stdout:
        lines.append(json.loads(line))
        # Its tool runs until the next turn can find what this one left.
        await stack.client.until_idle()
        await until_all_indexed(stack)
        process.stdin.write(b"\n")
    _, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return lines


@pytest.mark.parametrize("api", ["messages", "responses", "chat"])
async def test_an_agents_turns_find_what_the_ones_before_left(stack: Stack, api: str) -> None:
    *turns, error = await lines_of_agent(stack, api)
    assert [(turn["tool"], turn["arguments"]) for turn in turns] == [("read_file", ["path"])] * 3
    assert all(turn["prompt"] == turn.get("counted", turn["prompt"]) for turn in turns)
    before = 0
    for turn in turns:
        assert turn["cached"] >= before // 16 * 16
        before = turn["prompt"]
    assert error == {"error": 404, "known": True} | ({"type": "error"} if api == "messages" else {})
    await stack.client.until_idle()
