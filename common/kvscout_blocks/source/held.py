"""Live batches that wait for a replay to end, of one source and of all."""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

from kvscout_blocks.source.decisions import SequencedBatch

HELD_BATCHES: Final = 65_536
HELD_BYTES: Final = 64 * 1024 * 1024
"""Live batches held while a replay runs; more, and the replay is given up."""
HELD_BYTES_IN_ALL: Final = 256 * 1024 * 1024
"""Those of all sources together; more, and the source that holds the most drops them, to request them again."""

T = TypeVar("T")


class HeldBudget:
    """Bytes that sources hold together.

    Args:
        most: What they may hold.
    """

    def __init__(self, most: int = HELD_BYTES_IN_ALL) -> None:
        self.most = most
        self.used = 0
        """Bytes held now."""
        self.dropped = 0
        """Batches dropped since start, to be requested again."""
        self.lacking = 0
        """Sources of which dropped batches have not been replayed yet."""
        self._holders: dict[int, HeldBatches[Any]] = {}
        """Those that hold something, by identity."""

    def change(self, holder: HeldBatches[Any], size_bytes: int) -> None:
        """Note that a holder has more bytes, or fewer; if that is too much, whoever has the most makes room."""
        self.used += size_bytes
        if holder.size_bytes:
            self._holders[id(holder)] = holder
        else:
            self._holders.pop(id(holder), None)
        while size_bytes > 0 and self.used > self.most:
            max(self._holders.values(), key=lambda each: each.size_bytes).make_room()


class HeldBatches(dict[int, SequencedBatch[T]], Generic[T]):
    """Held batches by id; changed by `hold`, `release`, `drop` and `make_room` alone.

    Args:
        budget: What all sources share.
    """

    def __init__(self, budget: HeldBudget) -> None:
        super().__init__()
        self._budget = budget
        self.size_bytes = 0
        self.highest_id = -1
        """Highest id held since all were dropped; -1 = none."""
        self.lacks_to = -1
        """Highest id that was dropped to make room; -1 = none."""

    @property
    def too_much(self) -> bool:
        """Return whether more is held than may be."""
        return len(self) > HELD_BATCHES or self.size_bytes > HELD_BYTES

    def hold(self, batch: SequencedBatch[T]) -> None:
        """Add a batch."""
        self.release(batch.event_id)
        self[batch.event_id] = batch
        self.highest_id = max(self.highest_id, batch.event_id)
        self._resize(batch.size_bytes)

    def release(self, event_id: int) -> SequencedBatch[T] | None:
        """Remove and return a batch; None = it is not held."""
        batch = self.pop(event_id, None)
        if batch is not None:
            self._resize(-batch.size_bytes)
        return batch

    def drop(self, below: int | None = None) -> list[SequencedBatch[T]]:
        """Remove and return all batches, or those below an id, in the order in which they came."""
        dropped = [batch for event_id, batch in self.items() if below is None or event_id < below]
        for batch in dropped:
            self.release(batch.event_id)
        self.highest_id = max(self, default=-1)
        return dropped

    def make_room(self) -> None:
        """Drop all batches, which are to be requested again."""
        lacks_to = max(self.lacks_to, self.highest_id)
        self._budget.dropped += len(self.drop())
        self.lack(lacks_to)

    def lack(self, event_id: int = -1) -> None:
        """Note up to which id batches were dropped to make room; -1 = they came again, or are of no concern."""
        self._budget.lacking += (event_id >= 0) - (self.lacks_to >= 0)
        self.lacks_to = event_id

    def _resize(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._budget.change(self, size_bytes)
