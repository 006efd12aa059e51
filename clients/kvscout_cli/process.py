"""One supervised process: started, ready, watched, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvscout_common.errors import Unavailable

TAIL_LINES = 60
MAX_LINE_CHARACTERS = 2000
"""Longer lines are cut: a log is for a person to read."""

_CHILD = Path(__file__).with_name("child.py")


@dataclass(frozen=True, slots=True)
class Program:
    """Command of a process."""

    name: str
    """Such as "gateway"; unique within a stack."""
    module: str
    """Run as `python -m module`; prints a JSON line with `"ready": true` when it is."""
    arguments: tuple[str, ...] = ()


class ProcessFailed(Unavailable):
    """A process ended, or did not become ready, without a request to stop."""

    def __init__(self, message: str, tail: tuple[str, ...]) -> None:
        super().__init__(message)
        self.tail = tail
        """The last lines it wrote."""


class ManagedProcess:
    """A running program with its own session, so that a terminal's Ctrl-C reaches its supervisor alone."""

    def __init__(
        self, program: Program, process: asyncio.subprocess.Process, on_line: Callable[[str, str], None]
    ) -> None:
        self.program = program
        self.ready_line: Mapping[str, Any] = {}
        self._process = process
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.create_task(self._watch(), name=f"watch {program.name}")
        """Done when the process has ended and all it wrote is read."""

    @classmethod
    async def start(
        cls, program: Program, on_line: Callable[[str, str], None], environment: Mapping[str, str] | None = None
    ) -> ManagedProcess:
        """Start a program; it is not ready yet.

        Args:
            program: Program to run, under this interpreter.
            on_line: Called with (program name, line) for everything it writes but its ready line.
            environment: Its whole environment; None = this process's.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_CHILD), str(os.getpid())),
            *(sys.executable, "-m", program.module, *program.arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        return cls(program, process, on_line)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ready(self, timeout_seconds: float) -> Mapping[str, Any]:
        """Wait for the ready line and return it.

        Raises:
            ProcessFailed: The process ended before, or took too long.
        """
        events: set[asyncio.Future[Any]] = {self._ready, self.ended}
        await asyncio.wait(events, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            self.ready_line = self._ready.result()
            return self.ready_line
        if self.ended.done():
            raise self.failure()
        raise ProcessFailed(f"{self.program.name} was not ready in time", tuple(self._tail))

    def failure(self) -> ProcessFailed:
        """Return the error of a process that ended without a request to stop."""
        when = "unasked" if self._ready.done() else "before it was ready"
        code = self._process.returncode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}"
        return ProcessFailed(f"{self.program.name} {how} {when}", tuple(self._tail))

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, then SIGKILL to its whole group when the grace is over; return when it has ended.

        When cancelled, the grace is over immediately.
        """
        if self.ended.done():
            return
        self._signal(os.kill, signal.SIGTERM)
        try:
            await asyncio.wait({self.ended}, timeout=grace_seconds)
        finally:
            if not self.ended.done():
                self._signal(os.killpg, signal.SIGKILL)
        await asyncio.wait({self.ended})

    def _signal(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        if self._process.returncode is None:
            try:
                send(self._process.pid, number)
            except ProcessLookupError:
                pass  # it ended between the check and the call

    async def _watch(self) -> int:
        async with asyncio.TaskGroup() as group:
            for stream in filter(None, (self._process.stdout, self._process.stderr)):
                group.create_task(self._read(stream))
        return await self._process.wait()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        # Not readline(): a line without end must neither raise nor grow a buffer.
        pending = b""
        while data := await stream.read(65_536):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._take(line)
            pending = pending[: 4 * MAX_LINE_CHARACTERS]
        if pending:
            self._take(pending)

    def _take(self, raw: bytes) -> None:
        if not self._ready.done() and raw.startswith(b"{"):
            try:
                line = json.loads(raw)
            except ValueError:
                line = {}
            if isinstance(line, dict) and line.get("ready") is True:
                self._ready.set_result(line)
                return
        text = raw.decode(errors="replace").rstrip()[:MAX_LINE_CHARACTERS]
        self._tail.append(text)
        self._on_line(self.program.name, text)
