"""An event loop in a thread of its own, for code that has none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for any thread; it begins with the first one, and does not keep a process alive."""

    def __init__(self, name: str) -> None:
        """Begin nothing yet.

        Args:
            name: Name of the thread.
        """
        self._name = name
        self._lock = threading.Lock()
        """Guards the thread's state: a call and the end exclude one another only at their beginning."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, waited for. An interrupted wait cancels it.

        Raises:
            ValueError: The thread has ended.
        """
        with self._lock:
            if self._ended:
                coroutine.close()
                raise ValueError("its thread has ended")
            loop = self._begun()
            future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def end(self) -> None:
        """End the thread: what runs is cancelled. Repeated calls do nothing more."""
        with self._lock:
            self._ended = True
            thread, self._thread = self._thread, None
            loop = self._loop
        if thread is not None and loop is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _begun(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        # Calls that other threads made just before the end get their answer.
        loop.run_until_complete(asyncio.sleep(0))
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
