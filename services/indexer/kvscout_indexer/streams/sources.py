"""State of a stream's sources, partition by partition: the same in every replica's memory.

::

    stream ═ tail ═══════════▶ live partitions ──▶ feeds of registered workers
       └──▶ snapshot, past ──▶ partitions behind ──▶ feeds ── caught up ──▶ live

Each registered worker rank has a partition with a position of its own. A partition begins behind: what the tail brings
of it is passed over and left to the catch-up, which reads its past from a snapshot and the stream. Messages of workers
that are not registered are ignored.

The lock `delivery` keeps the order: nothing is delivered while a partition is loaded or cut.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Final, Protocol

from kvscout_blocks.source.feed import Cursor
from kvscout_common.errors import NotFound
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.position import SnapshotId, SnapshotSchedule, StreamState, follows
from kvscout_indexer.streams.pull import StreamMessage
from kvscout_indexer.streams.snapshot import Snapshot, SourceCut

log = logging.getLogger("kvscout.jetstream")

SLICE_SECONDS: Final = 0.002
"""Longest stretch on the event loop, but for a single message."""


class PartitionFeed(Protocol):
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

    __slots__ = ("contained", "doubtful", "feed", "fresh", "passed", "position", "subject", "unverified", "worker")

    def __init__(self, subject: str, worker: WorkerRank, feed: PartitionFeed) -> None:
        self.subject = subject
        self.worker = worker
        self.feed = feed
        self.fresh = True
        """No state was looked for yet."""
        self.position = 0
        """Its messages up to this stream sequence were delivered."""
        self.contained = 0
        """Its messages up to this stream sequence are in the index; while the feed is not settled."""
        self.passed = 0
        """Stream sequence of its last message that the tail left to the catch-up."""
        self.unverified = False
        """Events may have been missed, and the publisher got no request yet."""
        self.doubtful = False
        """The publisher got a request, and the feed was not settled since."""

    def cut_position(self, read_to: int) -> int:
        """Return the stream sequence up to which the index contains its messages, of which it had all to `read_to`."""
        if not self.feed.settled:
            return self.contained
        self.doubtful = False
        return max(self.position, read_to)


class StreamSources:
    """The sources of one stream.

    Args:
        schedule: Called for every message.
    """

    def __init__(self, schedule: SnapshotSchedule) -> None:
        self.tail = 0
        """Last stream sequence read at the end of the stream."""
        self.incarnation: int | None = None
        """Incarnation of the stream that positions are of; None = it was not seen yet."""
        self.live: dict[str, Partition] = {}
        """Partitions read at the end of the stream, by subject."""
        self.behind: dict[str, Partition] = {}
        """Partitions that catch up, by subject."""
        self.delivery = asyncio.Lock()
        """Held while messages are delivered, and while a partition is cut."""
        self.ignored = 0
        """Messages of no worker that is registered here."""
        self._schedule = schedule
        self._generation = 0
        """Number of times that reading went on at another place: what was cut across one is no snapshot."""
        self._to_verify: list[Partition] = []

    @property
    def position(self) -> int:
        """Return the last stream sequence that the state contains."""
        return min([self.tail, *(partition.position for partition in self.behind.values())])

    def attach(self, subject: str, worker: WorkerRank, feed: PartitionFeed) -> None:
        """Add the partition of a worker rank, which begins behind."""
        self.live.pop(subject, None)
        self.behind[subject] = Partition(subject, worker, feed)

    def detach(self, subject: str, feed: PartitionFeed) -> None:
        """Remove the partition of a feed, unless a later feed has it."""
        for partitions in (self.live, self.behind):
            if subject in partitions and partitions[subject].feed is feed:
                del partitions[subject]

    def follows(self, stream: StreamState) -> bool:
        """Return whether reading can continue at the tail, as the stream is now."""
        return self.incarnation is not None and follows(stream, self.incarnation, self.tail)

    def place(self, stream: StreamState) -> None:
        """Continue at the end of the stream, holding `delivery`; every partition has to catch up."""
        anew = self.incarnation is not None and (self.incarnation != stream.incarnation or self.tail > stream.last)
        self._generation += 1
        for partition in self.live.values():
            partition.position = partition.cut_position(self.tail)
        self.behind.update(self.live)
        self.live.clear()
        if anew:
            for partition in self.behind.values():
                # Sequences of before mean nothing.
                partition.position = partition.contained = 0
                self._doubt(partition)
        self.incarnation, self.tail = stream.incarnation, stream.last

    def wants(self, positions: Mapping[WorkerRank, int], *, fits: bool) -> bool:
        """Return whether a partition should load a snapshot with these positions; `fits` = it is of this stream."""
        return any(
            partition.worker in positions and _gains(partition, positions[partition.worker], fits=fits)
            for partition in self.behind.values()
        )

    async def load(self, cuts: AsyncIterable[SourceCut], *, fits: bool) -> None:
        """Deliver the sources of a snapshot to the partitions that gain from it; `fits` = it is of this stream."""
        by_worker = {partition.worker: partition for partition in self.behind.values()}
        async for cut in cuts:
            partition = by_worker.get(cut.worker)
            if partition is None or not _gains(partition, cut.position, fits=fits):
                continue
            async with self.delivery:
                await self._load(partition, cut.messages)
                partition.position = partition.contained = cut.position if fits else 0
                if cut.unverified or not fits:
                    self._doubt(partition)

    async def _load(self, partition: Partition, messages: Iterable[bytes]) -> None:
        ends = time.monotonic() + SLICE_SECONDS
        for data in messages:
            if self.behind.get(partition.subject) is not partition:
                return
            self._receive(partition, data)
            await partition.feed.caught_up()
            if time.monotonic() > ends:
                await asyncio.sleep(0)
                ends = time.monotonic() + SLICE_SECONDS

    def begin_past(self, stream: StreamState) -> int:
        """Return the stream sequence after which the partitions behind have to read their past."""
        for partition in self.behind.values():
            if partition.position + 1 < stream.first:
                # What was purged no snapshot has.
                partition.position = stream.first - 1
                self._doubt(partition)
            elif stream.deleted:
                self._doubt(partition)
            partition.passed, partition.fresh = 0, False
        return min(partition.position for partition in self.behind.values())

    def deliver(self, message: StreamMessage) -> None:
        """Take the next message at the end of the stream, holding `delivery`."""
        self.tail = message.sequence
        self._schedule.on_message(message.sequence, message.sent_at)
        partition = self.live.get(message.subject)
        if partition is not None:
            self._deliver(partition, message)
        elif message.subject in self.behind:
            self.behind[message.subject].passed = message.sequence
        else:
            self.ignored += 1

    def deliver_past(self, message: StreamMessage) -> None:
        """Take the next message of the catch-up, holding `delivery`."""
        partition = self.behind.get(message.subject)
        if partition is not None:
            self._schedule.on_message(message.sequence, message.sent_at)
            self._deliver(partition, message)

    def caught_up(self, position: int) -> bool:
        """Make partitions live if the catch-up, which read to its end, has read what the tail passed over."""
        if any(partition.passed > position for partition in self.behind.values()):
            return False
        self.live.update(self.behind)
        self.behind.clear()
        return True

    def _deliver(self, partition: Partition, message: StreamMessage) -> None:
        if message.sequence <= partition.position:
            return
        feed, before, settled = partition.feed, partition.feed.cursor, partition.feed.settled
        unverified, partition.unverified = partition.unverified, False
        self._receive(partition, message.data)
        partition.position = message.sequence
        if feed.settled:
            # What continues the cursor proves that nothing was missed; what leaves a gap makes its source request them.
            partition.unverified = partition.unverified or (unverified and feed.cursor == before)
            partition.contained, partition.doubtful = message.sequence, False
        elif settled:
            # It left a gap or began a state. Until that is over, snapshots say that something may be missing.
            partition.doubtful = partition.doubtful or unverified
        else:
            # It waits behind other work, and proves nothing yet.
            partition.unverified = partition.unverified or unverified

    def _receive(self, partition: Partition, data: bytes) -> None:
        try:
            partition.feed.deliver(data)
        except Exception:
            # It would come again after a restart: the message costs itself, and its source is verified.
            log.exception("a message of worker %s/%d cannot be applied", *partition.worker)
            self._doubt(partition)

    def _doubt(self, partition: Partition) -> None:
        partition.unverified = True
        self._to_verify.append(partition)

    def doubt_all(self) -> None:
        """Mark every partition for verification: messages of any source may have been missed."""
        for partition in (*self.live.values(), *self.behind.values()):
            self._doubt(partition)

    def verify(self) -> None:
        """Verify doubtful partitions with their publishers, unless something of the stream is still to be read."""
        if self.behind:
            return
        to_verify, self._to_verify = self._to_verify, []
        for partition in to_verify:
            if not partition.unverified or self.live.get(partition.subject) is not partition:
                continue
            if not partition.feed.settled:
                # It asks for what it knows of; whether that is all is asked afterwards.
                self._to_verify.append(partition)
            else:
                # Until the answer is there, snapshots say that something may be missing.
                partition.unverified, partition.doubtful = False, True
                partition.feed.verify()

    async def cut(self) -> Snapshot | None:
        """Return the state of every source; None if there is none, or reading went on at another place meanwhile."""
        generation, sequence, incarnation = self._generation, self.tail, self.incarnation
        partitions = sorted((*self.live.values(), *self.behind.values()), key=lambda each: each.subject)
        if incarnation is None or not partitions:
            return None
        cut_at = time.time()
        cuts = []
        for partition in partitions:
            async with self.delivery:
                read_to = self.tail if self.live.get(partition.subject) is partition else partition.position
                position = partition.cut_position(read_to)
                try:
                    messages = await partition.feed.dump()
                except NotFound:
                    log.info("worker %s/%d was removed while it was copied", *partition.worker)
                    continue
                unverified = partition.unverified or partition.doubtful
                cuts.append(SourceCut(partition.worker, position, messages, unverified))
        if generation != self._generation:
            return None
        sequence = min([sequence, *(cut.position for cut in cuts)])
        return Snapshot(SnapshotId(incarnation, sequence), cut_at, [cut for cut in cuts if cut.messages])


def _gains(partition: Partition, position: int, *, fits: bool) -> bool:
    """Return whether a snapshot's state of this position brings a partition further."""
    return position > partition.position if fits else partition.fresh
