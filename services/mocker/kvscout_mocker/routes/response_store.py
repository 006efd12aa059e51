"""Responses that their clients asked to store, and those that are generated in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvscout_mocker.requests.responses import Messages
from kvscout_mocker.server import Document

MAX_STORED = 1024
"""Responses that are kept: the oldest go first. vLLM keeps all of them."""


@dataclass(eq=False)
class StoredResponse:
    """One response."""

    document: Document
    """As it is now."""
    messages: Messages
    """Its prompt."""
    events: list[bytes] = field(default_factory=list)
    """Of one that is streamed from the background, so far."""
    task: asyncio.Task[None] | None = None
    """Generates it in the background."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add_event(self, event: bytes) -> None:
        """Append an event."""
        self.events.append(event)
        self._changed.set()

    async def stream(self, first: int) -> AsyncIterator[bytes]:
        """Yield its events from a number on, until the last one is there."""
        position = first
        while True:
            self._changed.clear()
            for event in self.events[position:]:
                yield event
            position = max(position, len(self.events))
            if self.task is None or self.task.done():
                return
            waiting = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()


class ResponseStore:
    """The last `MAX_STORED` responses by id."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response; None if it is not stored."""
        return self._responses.get(response_id)

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response."""
        self._responses[response_id] = response
        while len(self._responses) > MAX_STORED:
            _, oldest = self._responses.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()
