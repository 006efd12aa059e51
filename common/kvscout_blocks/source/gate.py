"""Lets a source's steps through in order, and keeps those that come while work on its rank is under way.

::

    batch, reconnect, state ──▶ gate ──▶ sequence ──▶ index
                                  └ closed: they wait, in order, until the work is done
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from kvscout_blocks.index.block_index import Work
from kvscout_blocks.source.held import HELD_BATCHES, HELD_BYTES
from kvscout_common.errors import KvscoutError
from kvscout_common.process.endings import INTENDED

Step = Callable[[], None]
Then = Callable[[KvscoutError | None], None]
"""Called with why the work ended early; None: it did not, or too much waited for its end."""

STEPS_PER_SLICE: Final = 32
"""Steps that waited, between two iterations of the event loop."""


class Gate:
    """See the module. Everything runs on one event loop.

    Args:
        name: Of the tasks that work.
        failed: Called with a defect of this program.
    """

    def __init__(self, name: str, *, failed: Callable[[BaseException], None]) -> None:
        self._name = name
        self._failed = failed
        self._waiting: deque[tuple[Step, int]] = deque()
        self._waiting_bytes = 0
        self._work: asyncio.Task[None] | None = None
        self._passing: asyncio.Handle | None = None
        """The next steps of what waited, as scheduled."""
        self._ended = False
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        """Return whether a step that comes now is done immediately."""
        return self._opened.is_set()

    async def opened(self) -> None:
        """Wait until it is open; it is, until the caller gives the loop away."""
        while not self.is_open:
            await self._opened.wait()

    def do(self, step: Step, size_bytes: int = 0) -> None:
        """Do a step, now or after what waits.

        Args:
            step: Must not wait for anything.
            size_bytes: What it keeps in memory while it waits.
        """
        if self.is_open:
            step()
            return
        self._waiting.append((step, size_bytes))
        self._waiting_bytes += size_bytes
        if self._work is not None and (len(self._waiting) > HELD_BATCHES or self._waiting_bytes > HELD_BYTES):
            self._work.cancel()

    def close_for(self, work: Work, then: Then, *, given_up: Step = lambda: None) -> None:
        """Close for work, and call `then` before anything that waits; it may close again.

        Args:
            work: What is to be done.
            then: Called in any case but one.
            given_up: Called instead if `end` was called before.
        """
        assert self._work is None
        self._opened.clear()
        self._work = asyncio.get_running_loop().create_task(self._run(work, then, given_up), name=self._name)

    def end(self) -> asyncio.Task[None] | None:
        """End the work, and drop what waits; return the task to wait for."""
        self._ended = True
        self._waiting.clear()
        if self._passing is not None:
            self._passing.cancel()
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
        return work

    async def _run(self, work: Work, then: Then, given_up: Step) -> None:
        ended: KvscoutError | None = None
        try:
            await work.run()
        except KvscoutError as error:
            ended = error
        except asyncio.CancelledError:
            # Else too much waits for its end.
            if self._ended:
                given_up()
                raise
        except INTENDED:
            raise
        except BaseException as error:
            self._failed(error)
            return
        self._work = None
        self._guarded(lambda: then(ended))
        self._pass()

    def _pass(self) -> None:
        """Do what waited, some steps an iteration of the event loop."""
        self._passing = None
        for _ in range(STEPS_PER_SLICE):
            if self._work is not None:
                return
            if not self._waiting:
                self._opened.set()
                return
            step, size_bytes = self._waiting.popleft()
            self._waiting_bytes -= size_bytes
            self._guarded(step)
        self._passing = asyncio.get_running_loop().call_soon(self._pass)

    def _guarded(self, step: Step) -> None:
        try:
            step()
        except INTENDED:
            raise
        except BaseException as error:
            self._failed(error)
