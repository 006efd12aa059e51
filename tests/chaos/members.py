"""The processes of a chaos run: each can be killed, stopped, continued and started again on its ports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

DEADLINE_SECONDS = 90.0
LOG_LINES = 60
TESTS = Path(__file__).parents[1]


class Member:
    """One process.

    Args:
        name: For the log.
        module: Such as "kvscout_indexer.main".
        flags: Its command line, ports included: a restart must find its place again.
        path: Where it finds further packages; None = there are none.
    """

    def __init__(self, name: str, module: str, *flags: str, path: Path | None = None) -> None:
        self.name = name
        self._path = path
        self.command: tuple[str, ...] = (sys.executable, "-m", module, *flags)
        self._process: asyncio.subprocess.Process | None = None
        self._draining: asyncio.Task[None] | None = None
        descriptor, log = tempfile.mkstemp(prefix=f"kvscout-{name}-", suffix=".log")
        os.close(descriptor)
        self._log = Path(log)
        weakref.finalize(self, self._log.unlink)
        self.ready: dict[str, Any] = {}

    async def start(self) -> None:
        """Starts it and waits for its ready line."""
        environment = {key: value for key, value in os.environ.items() if not key.upper().startswith("KVSCOUT_MOCKER")}
        # Some are modules of the tests.
        paths = (self._path and str(self._path), str(TESTS), environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        with self._log.open("w") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command, stdout=asyncio.subprocess.PIPE, stderr=log, env=environment
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.until_ready(self._process.stdout)
        self._draining = asyncio.create_task(_drain(self._process.stdout))

    async def until_ready(self, output: asyncio.StreamReader) -> None:
        """Waits until it serves: by its ready line."""
        line = await output.readline()
        if not line:
            await self.ended()
        self.ready = json.loads(line)

    async def ended(self) -> Never:
        """Fails: it was to be there."""
        assert self._process is not None
        code = await self._process.wait()
        raise AssertionError(f"{self.name} ended by itself with {code}:\n{self.log_tail}")

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process is not None and self._process.returncode is None

    async def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()

    async def stop(self) -> None:
        """Send SIGTERM and wait for the end, which must be its own and with 0."""
        assert self._process is not None
        self._process.terminate()
        async with asyncio.timeout(DEADLINE_SECONDS):
            code = await self._process.wait()
        assert code == 0, f"{self.name} ended with {code} at SIGTERM:\n{self.log_tail}"

    async def pause(self, seconds: float) -> None:
        """SIGSTOP for a while."""
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)

    @property
    def log_tail(self) -> str:
        """The last it wrote, since it was started."""
        return "\n".join(self._log.read_text().splitlines()[-LOG_LINES:])

    def log_about(self, word: str) -> list[str]:
        """What it wrote about something, since it was started."""
        return [line for line in self._log.read_text().splitlines() if word in line]

    def defects(self) -> list[str]:
        """What it called errors since it was started, each with what follows it in the log."""
        lines = self._log.read_text().splitlines()
        found = [number for number, line in enumerate(lines) if " ERROR " in line or " CRITICAL " in line]
        return ["\n".join(lines[number : number + LOG_LINES]) for number in found]

    def require_alive(self) -> None:
        """Fails if it ended by itself."""
        assert self._process is not None
        code = self._process.returncode
        assert code is None, f"{self.name} ended by itself with {code}:\n{self.log_tail}"


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass


async def kill_all(members: Sequence[Member]) -> None:
    """SIGKILL to everyone."""
    await asyncio.gather(*(member.kill() for member in members))
