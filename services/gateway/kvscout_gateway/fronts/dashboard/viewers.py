"""Those who watch: each is sent the newest of what there is, at its own pace; nothing waits for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvscout_common.errors import ResourceExhausted
from kvscout_common.http.http import HttpCall, SinkStalled

MAX_VIEWERS: Final = 32
WRITE_SECONDS: Final = 10.0
"""A viewer that takes nothing for so long is let go."""
SILENT_SECONDS: Final = 5.0
"""Something is sent at least so often, so that the page knows that somebody is there."""
EVENT_STREAM: Final = (
    ("Content-Type", "text/event-stream"),
    ("Cache-Control", "no-store"),
    ("X-Accel-Buffering", "no"),
    ("X-Content-Type-Options", "nosniff"),
)


class Viewers:
    """Everyone who watches, and the newest event of each kind.

    Args:
        write_seconds: Longest wait for one that takes nothing.
    """

    def __init__(self, *, write_seconds: float = WRITE_SECONDS) -> None:
        self._write_seconds = write_seconds
        self._events: dict[str, bytes] = {}
        self._news = asyncio.Event()
        """Set at the next event, and then replaced."""
        self.count = 0
        self.watched = asyncio.Event()
        """Set while there is a viewer."""
        self.unwatched = asyncio.Event()
        """Set while there is none."""
        self.unwatched.set()
        self._closed = False

    def publish(self, kind: str, document: Any) -> None:
        """Publish the newest event of a kind; it replaces one that is not sent yet."""
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        self._events[kind] = f"event: {kind}\ndata: {text}\n\n".encode()
        self._tell()

    def forget(self) -> None:
        """Withdraw what was published."""
        self._events.clear()

    def close(self) -> None:
        """Disconnect all viewers."""
        self._closed = True
        self._tell()

    async def serve(self, call: HttpCall) -> None:
        """Send one viewer what there is and what comes, until it leaves or all are let go.

        Raises:
            ResourceExhausted: There are too many.
            SinkGone: It has left.
            SinkStalled: It takes nothing.
        """
        with self._viewer():
            await call.start(200, EVENT_STREAM)
            await self._write(call, b"retry: 2000\n\n")
            sent: dict[str, bytes] = {}
            while not self._closed:
                news = self._news
                for kind, event in list(self._events.items()):
                    if sent.get(kind) is not event:
                        await self._write(call, event)
                        sent[kind] = event
                try:
                    async with asyncio.timeout(SILENT_SECONDS):
                        await news.wait()
                except TimeoutError:
                    await self._write(call, b":\n\n")
            await call.end()

    @contextmanager
    def _viewer(self) -> Iterator[None]:
        if self.count >= MAX_VIEWERS:
            raise ResourceExhausted(f"{MAX_VIEWERS} watch already (limit)", retry_after_seconds=5.0)
        self.count += 1
        self.watched.set()
        self.unwatched.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self.watched.clear()
                self.unwatched.set()

    async def _write(self, call: HttpCall, event: bytes) -> None:
        try:
            async with asyncio.timeout(self._write_seconds):
                await call.write(event)
        except TimeoutError as error:
            raise SinkStalled(f"a viewer has read nothing for {self._write_seconds:g} s") from error

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
