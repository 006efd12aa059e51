"""What a publisher was asked to send again, and what of it has come: from its stream to the source that waits."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.source.feed import Cursor, HistoryBroken, SourceState
from kvscout_blocks.source.sequence import SequencedBatch

RESEND_QUEUE: Final = 64
"""Messages of a history that wait to be applied; the stream is not read while they are that many."""

Item = SequencedBatch[DecodedBatch] | SourceState


class Question(NamedTuple):
    """What a publisher is asked to send again."""

    number: int
    """Among those of its stream, from 1."""
    first_id: int


class Resend:
    """What a publisher sends again.

    Args:
        question: What it was asked for.
    """

    def __init__(self, question: Question) -> None:
        self.question = question
        self.begun = False
        """Whether the publisher has turned back."""
        self.over = asyncio.Event()
        """Nobody waits for it any more."""
        self._items: asyncio.Queue[Item | HistoryBroken | None] = asyncio.Queue(RESEND_QUEUE)

    async def get(self) -> Item | HistoryBroken | None:
        """The next one; None = it has caught up."""
        return await self._items.get()

    async def put(self, item: Item | HistoryBroken | None) -> None:
        """Adds one, or drops it if nobody waits any more."""
        if not self._items.full():
            self._items.put_nowait(item)
            return
        adding = asyncio.ensure_future(self._items.put(item))
        over = asyncio.ensure_future(self.over.wait())
        try:
            await asyncio.wait({adding, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            adding.cancel()
            over.cancel()

    def turns_back(self, item: Item) -> bool:
        """Whether a message is the first that is sent again: what is under way is newer than what we have."""
        return isinstance(item, SourceState) or item.event_id <= self.question.first_id

    def caught_up(self, item: Item, live: Cursor, epoch: int) -> bool:
        """Whether all that was asked for, and all that came live meanwhile, is sent again with this one.

        Args:
            item: What came.
            live: What came live last; of another epoch than the item it tells nothing.
            epoch: That was asked about.
        """
        target = self.question.first_id
        if live.epoch == item.epoch and live.last_event_id is not None:
            target = max(target, live.last_event_id)
        if isinstance(item, SourceState):
            return item.last_event_id is None or item.last_event_id >= target or item.epoch != epoch
        return item.event_id >= target
