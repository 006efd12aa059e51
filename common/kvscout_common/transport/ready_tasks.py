"""Tasks that stand ready, and are run from a callback at once, up to where they first wait.

A new `asyncio.Task` begins in the next turn of the loop, which costs a call that needs no second turn more than all of
its own work. One that stands ready waits for something that behaves as a future; whoever has work runs what asyncio
wants to have run when that is done, there and then. So what runs in it sees a task as any other: current, cancellable,
with a context of its own.

What has waited once has been seen by others, who may keep the task and cancel it later: such a task ends with its work.
One whose work came to its end at once stands ready again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from functools import partial
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
        """Run work up to where it first waits, or, where no task stands ready, from the next turn of the loop.

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


class _ReadyTask:
    """Its task awaits it: it is the future."""

    _asyncio_future_blocking = False

    def __init__(self, loop: asyncio.AbstractEventLoop, stands: Callable[[_ReadyTask], object]) -> None:
        self._loop = loop
        self._stands = stands
        self._work: Coroutine[Any, Any, None] | None = None
        self._resume: Callable[[], object] = _cannot_resume
        """Callback with which asyncio has the task go on."""
        self._awaited = False
        self._cancelled = False
        self._at_once = False
        """Its work began in the call of `begin` that runs now."""
        self.task = loop.create_task(self._run(), name="ready")

    @property
    def stands(self) -> bool:
        """Return whether it can begin: nobody has cancelled it."""
        return self._awaited and not self._cancelled

    def begin(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run work up to where it first waits; whether that was its end, and the task stands ready again."""
        self._work = work
        self._awaited = False
        self._at_once = True
        self._resume()
        self._at_once = False
        return self.stands

    async def _run(self) -> None:
        await self
        while self._work is not None:
            work, self._work = self._work, None
            await work
            if not self._at_once:
                return
            await self

    def __await__(self) -> Generator[Any, None, None]:
        self._asyncio_future_blocking = True
        yield self
        self.result()

    # What a task asks of what it waits for.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Context) -> None:
        first = self._resume is _cannot_resume
        self._resume, self._awaited = partial(context.run, callback, self), True
        if first:
            self._stands(self)

    def result(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError

    def cancel(self, msg: object = None) -> bool:
        """Cancel the task while it stands ready."""
        if not self.stands:
            return False
        self._cancelled = True
        self._loop.call_soon(self._resume)
        return True


def _cannot_resume() -> None:
    raise RuntimeError("the task does not stand ready")
