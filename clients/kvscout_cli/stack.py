"""A set of real processes that live and die together.

::

    start ──▶ stage 1: indexer, scheduler, engines ──▶ stage 2: gateway ──▶ run(work) ──▶ stop in reverse

* A stage is started in parallel and ready before the next begins.
* While work runs, any process that ends takes the work with it, as `ProcessFailed` with the last lines it wrote.
  `keep` starts some again instead.
* Leaving the block stops the stages in reverse order: SIGTERM, a grace, SIGKILL to what is left.
* If the supervisor itself is killed, the kernel kills the processes (`child`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, TypeVar

from kvscout_cli.process import ManagedProcess, ProcessFailed, Program

T = TypeVar("T")

READY_SECONDS = 60.0
"""Longest start of one process: generous, because a loaded machine imports slowly."""

GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""

FIRST_PAUSE_SECONDS = 1.0
"""Pause before a process is started again; it doubles each time."""
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""A process that ran for so long begins with the first pause again."""


class Stack:
    """Processes started in stages; use as an async context manager, on the main thread."""

    def __init__(
        self,
        *,
        on_line: Callable[[str, str], None] = lambda _name, _line: None,
        environment: Mapping[str, str] | None = None,
        ready_seconds: float = READY_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """An empty stack.

        Args:
            on_line: Called with (program name, line) for everything the processes write.
            environment: Whole environment of the processes; None = this process's.
            ready_seconds: Longest start of one process.
            grace_seconds: From SIGTERM to SIGKILL.
        """
        self._on_line = on_line
        self._environment = environment
        self._ready_seconds = ready_seconds
        self._grace_seconds = grace_seconds
        self._stages: list[list[ManagedProcess]] = []

    @property
    def processes(self) -> list[ManagedProcess]:
        """Return every process started so far, in order."""
        return [process for stage in self._stages for process in stage]

    async def start(self, *programs: Program) -> list[ManagedProcess]:
        """Start one more stage and wait until all of it is ready.

        Raises:
            ProcessFailed: One of them, or of an earlier stage, ended or took too long.
        """
        stage: list[ManagedProcess] = []
        self._stages.append(stage)
        for program in programs:
            process = await ManagedProcess.start(program, self._on_line, self._environment)
            stage.append(process)

        async def all_ready() -> None:
            deadline = asyncio.get_running_loop().time() + self._ready_seconds
            for process in stage:
                await process.ready(deadline - asyncio.get_running_loop().time())

        await self.run(all_ready())
        return stage

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work to its end, unless a process ends first: then the work is cancelled.

        Raises:
            ProcessFailed: A process ended.
            Exception: Whatever the work raises.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, *(p.ended for p in self.processes)}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            raise next(process.failure() for process in self.processes if process.ended.done())
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # retrieved: if the work failed, too, the process that ended is the reason to report

    async def keep(self, again: Callable[[ManagedProcess], Program | None], say: Callable[[str], None]) -> None:
        """Watch everything for ever. What ends and may is started again, after a pause that grows.

        Args:
            again: Gives the program to start in place of one that ended; None = the stack ends with it.
            say: Called with a sentence when a process has ended, and when it is ready again.

        Raises:
            ProcessFailed: A process ended that is not started again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for stage in self._stages:
                    for place in range(len(stage)):
                        group.create_task(self._keep(stage, place, again, say))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _keep(
        self,
        stage: list[ManagedProcess],
        place: int,
        again: Callable[[ManagedProcess], Program | None],
        say: Callable[[str], None],
    ) -> None:
        clock = asyncio.get_running_loop().time
        program: Program | None = None
        pause = FIRST_PAUSE_SECONDS
        while True:
            process, since = stage[place], clock()
            await asyncio.wait({process.ended})
            program = program or again(process)
            if program is None:
                raise process.failure()
            if clock() - since >= STEADY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            say(f"{process.failure()}; it is started again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)
            process = stage[place] = await ManagedProcess.start(program, self._on_line, self._environment)
            try:
                await process.ready(self._ready_seconds)
            except ProcessFailed:
                await process.stop(self._grace_seconds)
            else:
                say(f"{program.name} runs again (pid {process.pid})")

    async def stop(self) -> None:
        """Stop everything, the last stage first; what has ended stays ended. Cancelling it kills immediately."""
        interrupted: asyncio.CancelledError | None = None
        grace = self._grace_seconds
        for stage in reversed(self._stages):
            try:
                await _stop_all(stage, grace)
            except asyncio.CancelledError as error:
                interrupted, grace = error, 0.0
                await _stop_all(stage, grace)
        self._stages.clear()
        if interrupted is not None:
            raise interrupted

    async def __aenter__(self) -> Stack:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


async def _stop_all(stage: list[ManagedProcess], grace_seconds: float) -> None:
    async with asyncio.TaskGroup() as group:
        for process in stage:
            group.create_task(process.stop(grace_seconds))
