"""Waits of calls of either side: for something to happen, and for the next message."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


def running_task() -> asyncio.Task[Any]:
    """Return the task that runs now.

    Raises:
        RuntimeError: None does.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("no task runs")
    return task


class Notice:
    """Something that happens again and again; whoever waits goes on with the next time.

    Args:
        loop: The running one.
    """

    __slots__ = ("_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[asyncio.Future[None]] = []

    def next(self) -> asyncio.Future[None]:
        """Is done when it happens."""
        future = self._loop.create_future()
        self._waiting.append(future)
        return future

    async def wait(self) -> None:
        """Return when it happens."""
        await self.next()

    def notify(self) -> None:
        """Wake everybody who waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


class Inbox:
    """Messages that came and were not read.

    Args:
        loop: The running one.
    """

    __slots__ = ("_ended", "_messages", "news")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._messages: deque[bytes] = deque()
        self._ended = False
        self.news = Notice(loop)
        """Something came, or nothing will."""

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: bytes) -> None:
        """Add a message."""
        self._messages.append(message)
        self.news.notify()

    def end(self) -> None:
        """End the queue: no more messages follow."""
        self._ended = True
        self.news.notify()

    def clear(self) -> None:
        """Drop what came: it is not read any more."""
        self._messages.clear()

    def first(self) -> bytes | None:
        """Return the next message, which stays, if it is there."""
        return self._messages[0] if self._messages else None

    def take(self) -> bytes | None:
        """Return the next message, if it is there."""
        return self._messages.popleft() if self._messages else None

    async def next(self) -> bytes | None:
        """Return the next message; None = there are no more."""
        while not self._messages:
            if self._ended:
                return None
            await self.news.wait()
        return self._messages.popleft()
