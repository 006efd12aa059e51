"""Real kvscout processes for tests: started on free ports, stopped when the block ends."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

from support.forked_process import ForkedProcess, Forker

Process = asyncio.subprocess.Process | ForkedProcess

DEADLINE_SECONDS = 60.0
HTTP_SERVICES = frozenset({"kvscout_gateway.main", "kvscout_serve.main"})
"""Those that serve HTTP as well, whether a test wants it or not."""
START_SECONDS = 90.0
"""Longest wait for a process to be ready: cold files on a busy machine take most of it."""


@dataclass(slots=True)
class Running:
    """A process that said it is ready."""

    process: Process
    ready: dict[str, Any]
    """Its ready line."""

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""
        return f"127.0.0.1:{self.ready['port']}"

    async def stop(self) -> int:
        """SIGTERM, unless it has ended; returns the exit code."""
        if self.process.returncode is None:
            self.process.terminate()
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await self.process.communicate()
        except TimeoutError:
            # Where each of its threads is goes to its log.
            self.process.send_signal(signal.SIGABRT)
            await self.process.wait()
            raise AssertionError(f"process {self.process.pid} did not stop at SIGTERM") from None
        assert self.process.returncode is not None
        return self.process.returncode


@cache
def _forker() -> Forker:
    return Forker()


async def spawn(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, stderr: IO[bytes] | None = None
) -> Process:
    """`python -m module`, with a pipe for what it prints.

    Args:
        module: Its main module.
        arguments: Its command line.
        environment: Replaces the environment if given; then Python is started anew.
        stderr: Where its log goes; None = where ours does.
    """
    if environment is None and _forker().serves(os.environ):
        return await _forker().fork(module, arguments, 2 if stderr is None else stderr.fileno())
    return await asyncio.create_subprocess_exec(
        sys.executable, "-X", "faulthandler", "-m", module, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=stderr, env=environment,
    )  # fmt: skip


async def start(
    module: str, *flags: str, environment: Mapping[str, str] | None = None, stderr: IO[bytes] | None = None
) -> Running:
    """Starts `python -m module` and waits for its ready line.

    Args:
        module: Such as "kvscout_indexer.main".
        flags: Command line; "--port 0" and "--metrics-port 0" come first.
        environment: Replaces the environment if given.
        stderr: Where its log goes; None = where ours does.
    """
    ports = ["--port", "0", "--metrics-port", "0", *(["--http-port", "0"] if module in HTTP_SERVICES else [])]
    process = await spawn(module, *ports, *flags, environment=environment, stderr=stderr)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            line = await process.stdout.readline()
    except BaseException:
        # Nobody else knows of it.
        process.kill()
        await process.wait()
        raise
    if not line:
        raise AssertionError(f"{module} ended with {await process.wait()} before it was ready")
    return Running(process, json.loads(line))


@asynccontextmanager
async def running(
    module: str, *flags: str, environment: Mapping[str, str] | None = None, stderr: IO[bytes] | None = None
) -> AsyncIterator[Running]:
    """A process for the length of a block; it must still run then, unless the block ended it, and exit with 0."""
    started = await start(module, *flags, environment=environment, stderr=stderr)
    try:
        yield started
    finally:
        ended_before = started.process.returncode is not None
        code = await started.stop()
        assert ended_before or code == 0, f"{module} exited with {code}"


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def eventually(
    condition: Callable[[], Any], *, deadline_seconds: float = DEADLINE_SECONDS, what: str = "condition"
) -> Any:
    """Wait until a condition is truthy and return its value; AssertionError past the deadline.

    Args:
        condition: Called again and again; what it returns is awaited if it can be.
        deadline_seconds: Longest wait.
        what: Named in the error.
    """
    last: Any = None
    try:
        async with asyncio.timeout(deadline_seconds):
            began = time.monotonic()
            while not (last := await _result(condition())):
                # Looking costs both sides: the longer the wait, the more rarely.
                await asyncio.sleep(min(0.1, max(0.02, (time.monotonic() - began) / 10)))
    except TimeoutError:
        raise AssertionError(f"{what} not reached within {deadline_seconds} s; last: {last!r}") from None
    return last
