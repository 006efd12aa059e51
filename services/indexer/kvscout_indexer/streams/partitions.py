"""The sources of one stream, each in its partition: taken by a worker's feed, or parked until somebody registers it.

::

    message ──▶ partition ── taken, live ─────────────────────▶ feed ──▶ source ──▶ index
                  └──── nobody registered it, or just now ──▶ parked: its state, then what came after it

Parked messages are bounded, in bytes for each partition and for all, and in time. A partition above its bound is
forgotten, and its source is verified with its publisher, or shown as incomplete, once it is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from kvscout_blocks.source.feed import Cursor
from kvscout_common.worker import WorkerRank

PARKED_BYTES: Final = 512 * 1024 * 1024
"""Bound of all partitions of a stream together: the state of 30 million blocks."""
PARKED_PARTITION_BYTES: Final = 128 * 1024 * 1024
"""Bound of one partition."""
MAX_PARTITIONS: Final = 65_536
"""Worker ranks of one model and tenant; messages of further ones are ignored until others are gone."""


class Taker(Protocol):
    """Receiver of a partition's messages: the feed of a registered worker rank."""

    @property
    def settled(self) -> bool:
        """Return whether everything that was delivered is in its index, and nothing waits."""

    @property
    def cursor(self) -> Cursor:
        """Return the cursor of its source."""

    def deliver(self, data: bytes) -> None:
        """Take the next message; what cannot be read costs itself."""

    async def caught_up(self) -> None:
        """Wait until nothing of what was delivered waits for work on the whole rank."""

    def verify(self) -> None:
        """Verify with the publisher that no events were missed."""

    async def dump(self) -> list[bytes]:
        """Return the state of its source as messages; batches of its source must not be delivered meanwhile.

        Raises:
            NotFound: The worker was removed.
        """


class Partition:
    """One source of a stream."""

    __slots__ = (
        "contained", "covered", "doubtful", "live", "parked", "parked_bytes", "subject", "taker", "unregistered_since",
        "unverified", "worker",
    )  # fmt: skip

    def __init__(self, subject: str, worker: WorkerRank, now: float) -> None:
        self.subject = subject
        self.worker = worker
        self.taker: Taker | None = None
        self.live = False
        """Messages go to the taker; else they are parked, since there is none or it has not had what is parked."""
        self.parked: list[bytes] = []
        self.parked_bytes = 0
        self.covered = 0
        """Messages up to this sequence are in the state that was loaded."""
        self.contained = 0
        """Messages up to this sequence are in the index, or parked; while the taker is not settled."""
        self.doubtful = False
        """Not settled since parked messages were delivered: some of them may be in neither place."""
        self.unverified = False
        """Events may have been missed, and the publisher was not asked yet."""
        self.unregistered_since = now
        """Seconds since the Unix epoch; 0 = it has a taker."""

    def position(self, stream_position: int) -> int:
        """Return the sequence up to which a cut of this partition contains its messages."""
        settled = self.taker is None or not self.live or self.taker.settled
        if settled:
            self.doubtful = False
        return max(stream_position if settled else self.contained, self.covered)

    def park(self, data: bytes) -> None:
        """Keep a message."""
        self.parked.append(data)
        self.parked_bytes += len(data)

    def unpark(self) -> None:
        """Drop what is parked."""
        self.parked, self.parked_bytes = [], 0

    def replace(self, messages: Iterable[bytes]) -> None:
        """Park a whole state in place of what is parked."""
        self.parked = list(messages)
        self.parked_bytes = sum(map(len, self.parked))


class Partitions:
    """Every source of a stream that belongs to this replica's shard.

    Args:
        now: Seconds since the Unix epoch.
        max_partition_bytes: Parked for one partition.
        max_bytes: Parked for all.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        max_partition_bytes: int = PARKED_PARTITION_BYTES,
        max_bytes: int = PARKED_BYTES,
    ) -> None:
        self._now = now
        self._max_partition_bytes = max_partition_bytes
        self._max_bytes = max_bytes
        self._partitions: dict[str, Partition] = {}
        self.parked_bytes = 0
        """Kept of all partitions that are not live."""
        self.forgotten = 0
        """Partitions whose parked messages were dropped."""

    def __iter__(self) -> Iterator[Partition]:
        return iter([self._partitions[subject] for subject in sorted(self._partitions)])

    def get(self, subject: str) -> Partition | None:
        """Return the partition of a subject; None if nothing came there yet."""
        return self._partitions.get(subject)

    @property
    def full(self) -> bool:
        """Return whether there are as many as there may be."""
        return len(self._partitions) >= MAX_PARTITIONS

    def of(self, subject: str, worker: WorkerRank) -> Partition:
        """Return the partition of a subject, made if need be, also if it is one too many."""
        partition = self._partitions.get(subject)
        if partition is None:
            partition = self._partitions[subject] = Partition(subject, worker, self._now())
        return partition

    def park(self, partition: Partition, data: bytes) -> None:
        """Keep a message until the partition is live, within the bounds."""
        partition.park(data)
        self.parked_bytes += len(data)
        self._bound(partition)

    def load(self, partition: Partition, messages: Iterable[bytes]) -> None:
        """Park a state in place of what is parked, within the bounds."""
        self.parked_bytes -= partition.parked_bytes
        partition.replace(messages)
        self.parked_bytes += partition.parked_bytes
        self._bound(partition)

    def unpark(self, partition: Partition) -> list[bytes]:
        """Take what is parked."""
        parked = partition.parked
        self.parked_bytes -= partition.parked_bytes
        partition.unpark()
        return parked

    def expire(self, max_age_seconds: float) -> None:
        """Forget partitions that were not registered for as long as the stream keeps messages."""
        oldest = self._now() - max_age_seconds
        for partition in list(self._partitions.values()):
            if partition.taker is None and partition.unregistered_since < oldest:
                self.unpark(partition)
                del self._partitions[partition.subject]

    def _bound(self, partition: Partition) -> None:
        if partition.parked_bytes > self._max_partition_bytes:
            self._forget(partition)
        while self.parked_bytes > self._max_bytes:
            self._forget(max(self._partitions.values(), key=lambda each: each.parked_bytes))

    def _forget(self, partition: Partition) -> None:
        self.unpark(partition)
        partition.unverified = True
        self.forgotten += 1
