"""Work on a whole rank, slice by slice, so that neither queries nor the event loop wait for all of it.

::

    demotion   every slice counts at once; the next write to the rank finds all of it done
    cut        what it was begun with; the next write to the rank has the rest copied first
    loading    beside what is known, and in its place with `commit`
"""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol


class Work(Protocol):
    """Work under way."""

    @property
    def detached(self) -> bool:
        """Whether slices may be done on another thread, and do not hold the interpreter."""
        ...

    def step(self) -> bool:
        """Does a slice; True while more is left."""
        ...


def at_once(work: Work) -> None:
    """Does all that is left."""
    while work.step():
        pass


async def in_slices(work: Work) -> None:
    """Does all that is left, in slices between which others get their turn; if cancelled, not all of it."""
    if not work.detached:
        more = work.step()
        while more:
            await asyncio.sleep(0)
            more = work.step()
        return
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set() and work.step():
            pass

    try:
        await asyncio.to_thread(run)
    finally:
        stopped.set()
