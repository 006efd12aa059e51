"""How tasks and processes end: what is closed is waited for, and the first defect is the last."""

from __future__ import annotations

import asyncio


class Closing:
    """Tasks that were told to end, until they have."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, task: asyncio.Task[None] | None) -> None:
        """Keeps a task until it has ended; None = nothing had to end."""
        if task is not None and not task.done():
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Returns when all have ended, however they did."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class FirstDefect:
    """Ends a process with the first defect that is met in a callback, whose exception nobody would see.

    `watch` is a task of the process.
    """

    def __init__(self) -> None:
        self._met: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(self, error: BaseException) -> None:
        """A defect was met; the first one counts."""
        if not self._met.done():
            self._met.set_exception(error)

    async def watch(self) -> None:
        """Ends with the first defect, and the process with it."""
        await asyncio.shield(self._met)
