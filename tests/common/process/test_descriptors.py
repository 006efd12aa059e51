"""Limits of open files, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import resource
import sys

import pytest
from support.processes import DEADLINE_SECONDS, running

from kvscout_common.process.descriptors import FEW

RAISE = """
import logging
from kvscout_common.process.descriptors import *
logging.basicConfig()
print(raise_descriptor_limit())
"""

ENGINE = ("--worker-id", "w", "--model", "m", "--block-size", "16", "--event-endpoint", "tcp://127.0.0.1:1")


async def limited(soft: int, hard: int) -> tuple[int, str]:
    """The limit that a process comes to, and what it says."""
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$0" -c "$1"', sys.executable, RAISE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(DEADLINE_SECONDS):
        out, said = await process.communicate()
    return int(out), said.decode()


async def test_a_process_may_open_as_many_files_as_its_hard_limit_says() -> None:
    assert await limited(256, FEW) == (FEW, "")


async def test_a_small_hard_limit_is_told() -> None:
    limit, said = await limited(256, 1000)
    assert limit == 1000
    assert "the limit of open files is only 1000" in said


@pytest.mark.parametrize("service", ["indexer", "scheduler", "gateway", "bridge"])
async def test_every_service_lifts_its_limit(service: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        async with running(
            f"kvscout_{service}.main", *(ENGINE if service == "bridge" else ()), environment=dict(os.environ)
        ) as process:
            soft, hard = resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft == hard
