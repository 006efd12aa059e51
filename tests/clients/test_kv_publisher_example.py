"""The example of a custom engine, as its page says that it is run."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from support.indexer_client import indexer_process
from support.nats_server import nats_server

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_engine" / "engine.py"


async def run(*flags: str) -> str:
    """What the example prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), "--requests", "60", *flags,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("over_nats", [False, True], ids=["grpc", "nats"])
async def test_what_the_indexer_says_is_what_the_engine_holds(over_nats: bool) -> None:
    async with nats_server() as server:
        flags = ("--nats-server", server.url) if over_nats else ()
        async with indexer_process(*flags) as (_, running):
            printed = await run("--indexer", running.address, *(("--nats", server.url) if over_nats else ()))
    cached = [int(line.split()[2]) for line in printed.splitlines()[1:]]
    assert len(cached) == 12
    assert max(cached) > 4
