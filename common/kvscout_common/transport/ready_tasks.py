"""Tasks that stand ready, and are run from a callback immediately, up to where they first wait.

A new `asyncio.Task` begins in the next iteration of the loop, which costs a call that needs no second one more than all
of its own work. One that stands ready waits for something that behaves as a future; whoever has work runs what asyncio
wants to have run when that is done, there and then. So what runs in it sees a task as any other: current, cancellable,
with a context of its own.

What has waited once has been seen by others, who may keep the task and cancel it later: such a task ends with its work.
One whose work came to its end without waiting stands ready again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any

READY = 2
"""Largest number of tasks that stand ready."""


class ReadyTasks:
    """See the module.

    Args:
        loop: The running one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: list[_ReadyTask] = []
        self._idle: set[asyncio.Task[None]] = set()
        """Tasks that stand ready, or are about to."""
        self._closed = False
        self._keep_ready()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work up to where it first waits, or, where no task stands ready, from the next iteration of the loop.

        To be called from a callback, not from a task.
        """
        while self._ready and not self._ready[-1].stands:
            self._ready.pop()
        if not self._ready:
            self._keep_ready()
            return self._loop.create_task(work)
        ready = self._ready.pop()
        self._idle.discard(ready.task)
        if ready.begin(work):
            self._idle.add(ready.task)
            self._ready.append(ready)
        else:
            self._keep_ready()
        return ready.task

    def close(self) -> None:
        """None stands ready any more."""
        self._closed = True
        for task in self._idle:
            task.cancel()

    def _keep_ready(self) -> None:
        while len(self._idle) < READY and not self._closed:
            ready = _ReadyTask(self._loop, self._ready.append)
            ready.task.add_done_callback(self._idle.discard)
            self._idle.add(ready.task)


class Resumption:
    """Something that one task waits for, which goes on in the call that says so, not in the loop's next iteration.

    The task awaits it as a future; it can be awaited again when it was resumed. `resume` is called from a callback of
    the loop, not from a task.

    Args:
        loop: The running one.
    """

    _asyncio_future_blocking = False
    _context: Context

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._callback: Callable[[Any], object] | None = None
        self._cancelled = False

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True
        yield self

    def resume(self) -> None:
        """Have the task go on, if it waits."""
        if self._callback is not None and not self._cancelled:
            callback, self._callback = self._callback, None
            self._context.run(callback, self)

    # What a task asks of what it waits for.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        self._callback, self._context = callback, context

    def result(self) -> None:
        if self._cancelled:
            self._cancelled = False
            raise asyncio.CancelledError

    def cancel(self, msg: object = None) -> bool:
        """Cancel the task while it waits."""
        if self._callback is None or self._cancelled:
            return False
        self._cancelled = True
        self._loop.call_soon(self._cancel, context=self._context)
        return True

    def _cancel(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(self)


class _ReadyTask(Resumption):
    """Its task awaits it: it is the future."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stands: Callable[[_ReadyTask], object]) -> None:
        super().__init__(loop)
        self._stands: Callable[[_ReadyTask], object] | None = stands
        self._work: Coroutine[Any, Any, None] | None = None
        self._at_once = False
        """Its work began in the call of `begin` that runs now."""
        self.task = loop.create_task(self._run(), name="ready")

    @property
    def stands(self) -> bool:
        """Return whether it can begin: nobody has cancelled it."""
        return self._callback is not None and not self._cancelled

    def begin(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run work up to where it first waits; whether that was its end, and the task stands ready again."""
        self._work = work
        self._at_once = True
        self.resume()
        self._at_once = False
        return self.stands

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        super().add_done_callback(callback, context=context)
        if self._stands is not None:
            self._stands(self)
            self._stands = None

    async def _run(self) -> None:
        await self
        while self._work is not None:
            work, self._work = self._work, None
            await work
            if not self._at_once:
                return
            await self
