"""Which incarnation of its engine a publisher sees: the same as before its own restart, or another.

Engines have no epochs: each begins to count at 0. Their publisher gives them one, and keeps beside it the number and
the digest of a batch that it has published. After a restart it compares what the engine still has with that::

    the engine has batch n, with that digest ────▶ the same incarnation: the same epoch goes on
    it has n with another digest,                ┐
    it has only older ones, or none,             ├▶ another, or it is unknown: a higher epoch, beginning
    it has only newer ones: history is gone      ┘  with the engine's state
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum, auto
from typing import Final

DIGESTS_KEPT: Final = 65_536
"""Batches that can be compared with a record; engines replay their last 10,000."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record of a rank that outlives its publisher."""

    epoch: int
    event_id: int | None = None
    """A batch that was published in this epoch; None = none was yet."""
    digest: int | None = None
    """Digest of that batch's payload, as the engine sent it."""

    def encode(self) -> bytes:
        """Return the bytes to store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, value: bytes) -> Record | None:
        """Read a stored record; None: it is none, which is the same as if it were lost."""
        try:
            read = cls(**json.loads(value))
        except (ValueError, TypeError):
            return None
        numbers = (read.epoch, read.event_id or 0, read.digest or 0)
        return read if all(type(number) is int and 0 <= number < 2**64 for number in numbers) else None


class Verdict(Enum):
    """Result of a comparison."""

    SAME = auto()
    OTHER = auto()


def next_epoch(previous: int, wall_clock_seconds: float) -> int:
    """Return an epoch above every former one, even where their record was lost: the time in milliseconds, or one more.

    Args:
        previous: The last epoch that is known; 0 = none.
        wall_clock_seconds: Seconds since the Unix epoch.
    """
    return max(previous + 1, int(wall_clock_seconds * 1000))


class Comparison:
    """Compares what the engine sends after our start with a record of before, whichever comes first. Bounded."""

    def __init__(self) -> None:
        self._digests: dict[int, int] = {}
        self._last_id: int | None = None
        self._restarted = False

    def applied(self, event_id: int, digest: int) -> None:
        """Note that a batch of the engine was applied."""
        self._last_id = event_id
        self._digests[event_id] = digest
        if len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    def restarted(self) -> None:
        """Note that the engine restarted while it was being read."""
        self._digests.clear()
        self._last_id = None
        self._restarted = True

    def judge(self, record: Record | None, *, replayed: bool) -> Verdict | None:
        """Return whether the engine is the one of the record.

        Args:
            record: None = there is none.
            replayed: The engine has sent all that it has of before now.

        Returns:
            None: not known yet; more is to come.
        """
        if record is None or record.event_id is None or record.digest is None or self._restarted:
            return Verdict.OTHER
        known = self._digests.get(record.event_id)
        if known is not None:
            return Verdict.SAME if known == record.digest else Verdict.OTHER
        gone_by = self._last_id is not None and self._last_id >= record.event_id
        return Verdict.OTHER if gone_by or replayed else None
