"""One source that the native thread reads: its index, and what was told of it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable

from kvscout_blocks.bytes.frames import Message
from kvscout_blocks.index.block_index import WorkerOptions
from kvscout_blocks.index.native import NativeIndex
from kvscout_blocks.source.decisions import digest
from kvscout_blocks.source.intake import Intake, IntakeSubscription, make_intake
from kvscout_blocks.source.subscriber import Callbacks
from kvscout_common.worker import EventEndpoint, WorkerRank
from support.engine_events import BLOCK_SIZE

RANK = WorkerRank("w", 0)
DEADLINE_SECONDS = 30.0


def packed(digests: Iterable[int]) -> bytes:
    """Return digests as a bypass has them."""
    return array("Q", digests).tobytes()


class IntakeWorld:
    """An intake on the running loop, and a source of it."""

    def __init__(self, threads: int = 1) -> None:
        self.defects: list[BaseException] = []
        made = make_intake(threads=threads, failed=self.defects.append)
        assert made is not None
        self.intake: Intake = made
        self.index = NativeIndex(BLOCK_SIZE)
        self.index.add_worker(RANK, WorkerOptions(total_kv_blocks=0))
        self.told: list[str | int] = []
        """Sequence numbers of messages, what was malformed, and words for all else."""
        self.during: Callable[[Message], None] = lambda _: None
        self.callbacks = Callbacks(
            on_message=self._on_message,
            on_malformed=self.told.append,
            on_connected=lambda: self.told.append("connected"),
            on_unconnected=lambda: self.told.append("unconnected"),
            on_refused=lambda reason: self.told.append(f"refused: {reason}"),
        )

    def subscribe(self, endpoint: str, *, topic: str = "", bind: bool = False) -> IntakeSubscription:
        """Begins to read."""
        where = EventEndpoint(0, endpoint, topic=topic, bind=bind)
        subscription = self.intake.subscribe(where, RANK, self.index, self.callbacks)
        assert subscription is not None
        return subscription

    def lend(self, subscription: IntakeSubscription, last_id: int, payload: bytes = b"") -> bool:
        """Lets the bypass go on."""
        return subscription.lend(last_id, packed([digest(payload)]), lambda: self.told.append("stopped"))

    async def until(self, reached: Callable[[], bool]) -> None:
        """Waits until something is so."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not reached():
                await asyncio.sleep(0.001)

    async def until_told(self, count: int) -> None:
        """Waits until so much was told."""
        await self.until(lambda: len(self.told) >= count)

    def close(self) -> None:
        """Ends it; there must have been no defect."""
        self.intake.close()
        assert not self.defects

    def _on_message(self, message: Message) -> None:
        self.told.append(message.seq)
        self.during(message)
