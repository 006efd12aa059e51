"""Live batches that wait for a replay to end."""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from kvscout_blocks.source.decisions import SequencedBatch

HELD_BATCHES: Final = 65_536
HELD_BYTES: Final = 64 * 1024 * 1024
"""Live batches held while a replay runs; more, and the replay is given up."""

T = TypeVar("T")


class HeldBatches(dict[int, SequencedBatch[T]], Generic[T]):
    """Held batches by id, with their size and the highest id; changed by `hold`, `release` and `drop` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0
        self.highest_id = -1
        """Highest id held since all were dropped; -1 = none."""

    @property
    def too_much(self) -> bool:
        """Return whether more is held than may be."""
        return len(self) > HELD_BATCHES or self._size_bytes > HELD_BYTES

    def hold(self, batch: SequencedBatch[T]) -> None:
        """Add a batch."""
        self[batch.event_id] = batch
        self._size_bytes += batch.size_bytes
        self.highest_id = max(self.highest_id, batch.event_id)

    def release(self, event_id: int) -> SequencedBatch[T] | None:
        """Remove and return a batch; None = it is not held."""
        batch = self.pop(event_id, None)
        if batch is not None:
            self._size_bytes -= batch.size_bytes
        return batch

    def drop(self, below: int | None = None) -> list[SequencedBatch[T]]:
        """Remove and return all batches, or those below an id, in the order in which they came."""
        dropped = [batch for event_id, batch in self.items() if below is None or event_id < below]
        for batch in dropped:
            self.release(batch.event_id)
        self.highest_id = max(self, default=-1)
        return dropped
