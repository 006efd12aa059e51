"""Digests of a source's last batches, 8 bytes each: a mass restart leaves thousands of them for each rank."""

from __future__ import annotations

from array import array
from typing import Final

NONE: Final = 0
"""In place of the digest of a batch that did not come."""


class Digests:
    """Digests of a window of ids, which ends at the last batch that was added.

    Args:
        most: Ids of the window; those before it are forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._first = 0
        self._values = array("Q")

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Forget all."""
        self._values = array("Q")

    def get(self, event_id: int) -> int | None:
        """Return the digest of a batch; None = it is not known."""
        place = event_id - self._first
        known = self._values[place] if 0 <= place < len(self._values) else NONE
        return known if known != NONE else None

    def add(self, event_id: int, digest: int) -> None:
        """Note the digest of a batch, from now on the last one unless it is within the window."""
        place = event_id - self._first
        if 0 <= place < len(self._values):
            self._values[place] = digest
        else:
            self._go_on(event_id)
            self._values.append(digest)

    def extend(self, last_id: int, packed: bytes) -> None:
        """Add the digests of consecutive batches, as of `packed`, which end with `last_id`."""
        added = array("Q", packed)
        if added:
            self._go_on(last_id + 1 - len(added))
            self._values.extend(added)

    def packed(self) -> bytes:
        """Return the digests of all, 8 bytes each in the machine's order."""
        return self._values.tobytes()

    def forget(self, *, below: int, keep: int) -> None:
        """Forget the digests of batches below an id, but keep so many of the last ones."""
        excess = min(len(self._values) - keep, below - self._first)
        # Not one by one: each time all others are moved.
        excess = max(excess, len(self._values) - self._most if len(self._values) > self._most + keep else 0)
        if excess > 0:
            del self._values[:excess]
            self._first += excess

    def _go_on(self, event_id: int) -> None:
        """Have the window end before an id."""
        missing = event_id - self._first - len(self._values)
        if not self._values or not 0 <= missing <= self._most:
            self.clear()
            self._first = event_id
        else:
            self._values.extend(array("Q", [NONE]) * missing)
