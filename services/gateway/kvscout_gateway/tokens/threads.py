"""Work that would hold up the event loop, in a few threads, of which a few tasks may wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from kvscout_common.errors import ResourceExhausted

THREADS: Final = 2
MAX_WAITING: Final = 64
"""Tasks that run or wait; a further one is refused: it would be too late for its request."""

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """Two threads, made when they are first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the work returns. Cancelling it leaves the work to come to its end.

        Raises:
            ResourceExhausted: Too much work waits.
        """
        if self._waiting >= MAX_WAITING:
            raise ResourceExhausted(f"{self._waiting} prompts wait to be tokenized (limit)")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokens")
        self._waiting += 1
        loop, future = asyncio.get_running_loop(), self._pool.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: _ended(loop, self._end))
        return await asyncio.wrap_future(future)

    def _end(self) -> None:
        self._waiting -= 1

    def close(self) -> None:
        """Drop what waits; what runs comes to its end."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _ended(loop: asyncio.AbstractEventLoop, notify: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(notify)
