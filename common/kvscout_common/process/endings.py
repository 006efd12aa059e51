"""Ends of tasks and processes: what is closed is waited for, and the first defect is the last.

A panic of native code is no `Exception`, so that nobody takes it for an error to go on from: asyncio would log it, and
whatever it has left half done would stay so. Wherever it comes up, it ends the process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

INTENDED = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end tasks and processes because somebody wants it."""


class NobodyWaits(Exception):
    """Whoever was to have it is gone, so that it ends unfinished: nothing has failed."""


class Closing:
    """Cancelled tasks that have not ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, task: asyncio.Task[None] | None) -> None:
        """Keep a task until it has ended; None = nothing had to end."""
        if task is not None and not task.done():
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Return when all have ended, however they did."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class FirstDefect:
    """Ends a process with the first defect that is met in a callback, whose exception nobody would see.

    `watch` is a task of the process.
    """

    def __init__(self) -> None:
        self._met: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def report(self, error: BaseException) -> None:
        """Report a defect; the first one counts."""
        if not self._met.done():
            self._met.set_exception(error)

    def watch_loop(self) -> None:
        """Count what the running loop would only log: whatever our callbacks raise, and every panic."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        error = context.get("exception")
        # Tasks that nobody asks for their outcome have said what they had to; others' callbacks are theirs to judge.
        if error is not None and (is_panic(error) or ("handle" in context and _is_ours(error))):
            self.report(error)

    async def watch(self) -> None:
        """End with the first defect, and the process with it."""
        await asyncio.shield(self._met)


def is_panic(error: BaseException) -> bool:
    """Return whether it is what no `except Exception` sees, and nobody wanted."""
    return not isinstance(error, (Exception, *INTENDED))


def report_panic(error: BaseException) -> bool:
    """Report a panic that would be kept from the running loop; return whether it is one."""
    if is_panic(error):
        asyncio.get_running_loop().call_exception_handler({"message": "native code panicked", "exception": error})
        return True
    return False


def guarded(function: Callable[..., None], failed: Callable[[BaseException], None]) -> Callable[..., None]:
    """Return a callback whose exceptions are reported: loops and libraries that call it would only log them and go on,
    blind."""

    @functools.wraps(function)
    def guarding(*arguments: object) -> None:
        try:
            function(*arguments)
        except INTENDED:
            raise
        except BaseException as error:
            failed(error)

    return guarding


def _is_ours(error: BaseException) -> bool:
    """Return whether it went through code of kvscout."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__", "").startswith("kvscout"):
            return True
        step = step.tb_next
    return False
