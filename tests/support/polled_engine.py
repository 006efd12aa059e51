"""trtllm-serve with `/kv_cache_events`: its buffer that drops the oldest, its answers that drain it, its numbers.

::

    store, remove, move ─▶ events of each rank, numbered from 0 ─▶ buffer (oldest dropped) ─▶ next answer, whoever asks

Answers have the fields that the engine's serialiser writes, events of several ranks in the order in which rank 0
gathered them. It is kinder in one thing: without events the engine lets whoever asks wait for two seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from support.engine_events import BLOCK_SIZE
from support.web_servers import web_server


class PolledEngine:
    """One engine.

    Args:
        method: The one that its path has.
        buffer_size: Events that wait at most, of all ranks.
        windows: Attention windows, in tokens.
        dp_size: Ranks; with one alone, events name none.
    """

    def __init__(
        self, *, method: str = "POST", buffer_size: int = 1024, windows: Sequence[int] = (4096,), dp_size: int = 1
    ) -> None:
        self.url = ""
        self.polls = 0
        """Requests that were answered, or not."""
        self.answering = asyncio.Event()
        """Cleared: it hangs, and drains nothing."""
        self.answering.set()
        self.strange: list[bytes] = []
        """The next answers, whatever was to be in them, which is drained."""
        self.method = method
        self._buffer: deque[dict[str, Any]] = deque(maxlen=buffer_size)
        self._windows = tuple(windows)
        self._dp_size = dp_size
        self.restart()

    def restart(self) -> None:
        """Begin a new life: an empty cache, a buffer with its creation, numbers from 0."""
        self._buffer.clear()
        self._next = [0] * self._dp_size
        for rank in range(self._dp_size):
            for window in self._windows:
                self.emit({"type": "created", "num_blocks_per_cache_level": [64, 16]}, rank=rank, window=window)

    def emit(self, data: dict[str, Any], *, rank: int = 0, window: int | None = None) -> None:
        """Append an event."""
        event = {"event_id": self._next[rank], "data": data, "window_size": window or self._windows[0]}
        self._next[rank] += 1
        self._buffer.append({**event, "attention_dp_rank": rank} if self._dp_size > 1 else event)

    def store(
        self, hashes: Sequence[Any], tokens: Sequence[int], *, parent: Any = None, level: int = 0, rank: int = 0,
        window: int | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """Store blocks; the last one may be a part of one. `fields` are each block's."""
        blocks = []
        for number, block_hash in enumerate(hashes):
            part = tokens[number * BLOCK_SIZE : (number + 1) * BLOCK_SIZE]
            unique = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in part]
            block = {"type": "stored_block", "block_hash": block_hash, "tokens": unique, "cache_level": level}
            blocks.append({**block, "priority": 35, **fields})
        self.emit({"type": "stored", "parent_hash": parent, "blocks": blocks}, rank=rank, window=window)

    def remove(self, *hashes: Any, rank: int = 0, window: int | None = None) -> None:
        """Remove blocks."""
        self.emit({"type": "removed", "block_hashes": list(hashes)}, rank=rank, window=window)

    def move(self, block_hash: Any, old: int, new: int, *, rank: int = 0) -> None:
        """Move a block to another cache level."""
        diff = {"type": "event_diff", "new_value": new, "old_value": old}
        self.emit({"type": "updated", "block_hash": block_hash, "cache_level": diff, "priority": None}, rank=rank)

    def drain(self) -> list[dict[str, Any]]:
        """Take what waits, as another reader."""
        events = list(self._buffer)
        self._buffer.clear()
        return events

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request."""
        self.polls += 1
        await self.answering.wait()
        if request.method != self.method:
            return web.Response(status=405)
        events = self.drain()
        if self.strange:
            return web.Response(body=self.strange.pop(0), content_type="application/json")
        return web.Response(body=json.dumps(events).encode(), content_type="application/json")


@asynccontextmanager
async def polled_engine(engine: PolledEngine) -> AsyncIterator[PolledEngine]:
    """The engine, listening."""
    app = web.Application()
    app.router.add_route("*", "/kv_cache_events", engine.handle)
    async with web_server(app, handler_cancellation=True, shutdown_timeout=0.1) as engine.url:
        yield engine
