"""State of a stream's sources, partition by partition, up to a position: the same in every replica's memory.

::

    snapshot ──▶ partitions ──▶ takers (feeds of registered workers)
    messages ──▶   │
                   └──▶ cut ──▶ snapshot

The lock `delivery` keeps the order: parked messages are delivered before those that follow them, and none while a
partition is cut.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.nats.names import NatsNames
from kvscout_common.shards import Shard
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.partitions import Partition, Partitions, Taker
from kvscout_indexer.streams.position import Resume, SnapshotId, SnapshotSchedule, StreamState, follows
from kvscout_indexer.streams.pull import StreamMessage
from kvscout_indexer.streams.snapshot import Snapshot, SourceCut

log = logging.getLogger("kvscout.jetstream")

SLICE_SECONDS: Final = 0.002
"""Longest turn on the event loop, but for a single message: others get theirs."""


class StreamSources:
    """The sources of one stream.

    Args:
        names: Names of the namespace.
        tenant: Tenant.
        model: Model.
        shard: Which workers are read.
        schedule: Called for every message.
        arrived: Called when a partition was taken; must not block.
    """

    def __init__(
        self,
        names: NatsNames,
        tenant: str,
        model: str,
        *,
        shard: Shard,
        schedule: SnapshotSchedule,
        arrived: Callable[[], None],
    ) -> None:
        self.position = 0
        """Return the last stream sequence that the state contains."""
        self.incarnation: int | None = None
        """Incarnation of the stream that the position is of; None = there is no state yet."""
        self.partitions = Partitions(time.time)
        self.delivery = asyncio.Lock()
        """Held while messages are delivered, and while a partition is cut."""
        self.ignored = 0
        """Messages of nobody: their subject cannot be read, or belongs to another shard."""
        self._names = names
        self._tenant = tenant
        self._model = model
        self._shard = shard
        self._schedule = schedule
        self._arrived = arrived
        self._generation = 0
        """Grows with each reload: what was cut across one is no snapshot."""
        self._taken: list[Partition] = []
        """Partitions with a new taker, not live yet."""
        self._to_verify: list[Partition] = []
        """Live partitions whose publisher may have to be asked, once everything else was read."""
        self._past_lost = False
        """True if events from before reading began are in no snapshot."""
        self._stopped = False

    def follows(self, stream: StreamState) -> bool:
        """Return whether reading can continue at the position, as the stream is now."""
        return self.incarnation is not None and follows(stream, self.incarnation, self.position)

    def stop(self) -> None:
        """Stop: takers that leave from now on are the end of the process."""
        self._stopped = True

    def attach(self, worker: WorkerRank, taker: Taker) -> None:
        """Have the partition of a worker rank delivered to a taker, what is parked first."""
        subject = self._subject(worker)
        known = self.partitions.get(subject) is not None
        partition = self.partitions.of(subject, worker)
        # The stream may have had events of it, and no snapshot has.
        partition.unverified = partition.unverified or (not known and self._past_lost)
        partition.taker, partition.live, partition.unregistered_since = taker, False, 0.0
        self._taken.append(partition)
        self._arrived()

    def detach(self, worker: WorkerRank, taker: Taker, state: Callable[[], list[bytes] | None]) -> None:
        """Park a partition again.

        Args:
            worker: Whose partition.
            taker: Who had it; a later one keeps it.
            state: What was delivered, as messages; None = too much to be kept.
        """
        partition = self.partitions.get(self._subject(worker))
        if partition is None or partition.taker is not taker:
            return
        if partition.live and not self._stopped:
            parked = state()
            partition.unverified = partition.unverified or parked is None or not taker.settled
            self.partitions.load(partition, parked or ())
        partition.taker, partition.live, partition.unregistered_since = None, False, time.time()

    def go_on(self, stream: StreamState, plan: Resume, snapshot: Snapshot | None) -> None:
        """Continue elsewhere in the stream, holding `delivery`.

        Args:
            stream: The stream now.
            plan: Where.
            snapshot: What the plan loads.
        """
        self._generation += 1
        known = {partition.subject for partition in self.partitions}
        if plan.anew:
            for partition in self.partitions:
                partition.covered = partition.contained = 0
        same_stream = snapshot is not None and snapshot.id.incarnation == stream.incarnation
        loaded = self._load(snapshot, known, same_stream=same_stream) if snapshot is not None else set()
        # What is in no snapshot has missed what was purged, if it has missed anything.
        for partition in self.partitions:
            if plan.missed or (partition.subject in known and partition.subject not in loaded and snapshot is not None):
                self._doubt(partition)
        self.incarnation, self.position = stream.incarnation, plan.position
        self._past_lost = self._past_lost or plan.missed
        self._schedule.restart(plan.position if same_stream else 0)

    def _load(self, snapshot: Snapshot, known: set[str], *, same_stream: bool) -> set[str]:
        """Park the snapshot's sources for their feeds; return the subjects of all that it has."""
        subjects = set()
        for cut in snapshot.sources:
            subject = self._subject(cut.worker)
            subjects.add(subject)
            partition = self.partitions.of(subject, cut.worker)
            covered = cut.position if same_stream else 0
            if subject in known and self.incarnation is not None and same_stream and self.position >= covered:
                continue
            self.partitions.load(partition, cut.messages)
            partition.covered, partition.live = covered, False
            partition.unverified = cut.unverified
            if partition.taker is not None:
                self._taken.append(partition)
            elif cut.unregistered_since:
                partition.unregistered_since = min(partition.unregistered_since, cut.unregistered_since)
        return subjects

    def deliver(self, message: StreamMessage) -> None:
        """Take the next message, holding `delivery`."""
        self.position = message.sequence
        self._schedule.on_message(message.sequence, message.sent_at)
        partition = self.partitions.get(message.subject) or self._new_partition(message.subject)
        if partition is None:
            self.ignored += 1
        elif message.sequence <= partition.covered:
            pass
        elif partition.live and partition.taker is not None:
            self._deliver_live(partition, partition.taker, message)
        else:
            self.partitions.park(partition, message.data)

    def _deliver_live(self, partition: Partition, taker: Taker, message: StreamMessage) -> None:
        if partition.unverified:
            before = taker.cursor
            partition.unverified = False
            self._hand_over(partition, taker, message.data)
            # What continues the cursor proves that nothing was missed; what leaves a gap has its source ask by itself.
            partition.unverified = partition.unverified or (taker.settled and taker.cursor == before)
        else:
            self._hand_over(partition, taker, message.data)
        if taker.settled:
            partition.contained, partition.doubtful = message.sequence, False

    def _new_partition(self, subject: str) -> Partition | None:
        try:
            event = self._names.parse_events(subject)
        except InvalidArgument:
            return None
        if not self._shard.has(event.tenant, event.worker.worker_id) or self.partitions.full:
            return None
        return self.partitions.of(subject, event.worker)

    def _hand_over(self, partition: Partition, taker: Taker, data: bytes) -> None:
        try:
            taker.deliver(data)
        except Exception:
            # It would come again after a restart: the message costs itself, and its source is verified.
            log.exception("a message of worker %s/%d cannot be applied", *partition.worker)
            self._doubt(partition)

    def _doubt(self, partition: Partition) -> None:
        partition.unverified = True
        if partition.live:
            self._to_verify.append(partition)

    async def deliver_parked(self) -> None:
        """Make partitions live that were taken."""
        while self._taken:
            partition = self._taken.pop(0)
            async with self.delivery:
                if partition.taker is not None and not partition.live:
                    await self._make_live(partition, partition.taker)

    async def _make_live(self, partition: Partition, taker: Taker) -> None:
        ends = time.monotonic() + SLICE_SECONDS
        for data in self.partitions.unpark(partition):
            self._hand_over(partition, taker, data)
            await taker.caught_up()
            if time.monotonic() > ends:
                # The turn stays ours: nothing is cut or delivered amid this.
                await asyncio.sleep(0)
                ends = time.monotonic() + SLICE_SECONDS
                if partition.taker is not taker:
                    # What he had is gone with him.
                    partition.unverified = True
                    return
        partition.live = True
        partition.contained, partition.doubtful = self.position, not taker.settled
        self._to_verify.append(partition)

    def verify(self) -> None:
        """Verify doubtful partitions with their publishers, once everything in the stream was read."""
        to_verify, self._to_verify = self._to_verify, []
        for partition in to_verify:
            if partition.taker is not None and partition.live and partition.unverified:
                # Until the answer is there, snapshots say that something may be missing.
                partition.unverified, partition.doubtful = False, True
                partition.taker.verify()

    def doubt_all(self) -> None:
        """Mark every partition for verification: messages of any source may have been missed."""
        for partition in self.partitions:
            self._doubt(partition)

    async def cut(self) -> Snapshot | None:
        """Return the state of every source; None if the replica was reloaded meanwhile."""
        generation, sequence = self._generation, self.position
        incarnation = self.incarnation
        if incarnation is None:
            return None
        cut_at = time.time()
        cuts = []
        for partition in self.partitions:
            async with self.delivery:
                cuts.append(await self._cut_partition(partition))
        if generation != self._generation:
            return None
        sequence = min([sequence, *(cut.position for cut in cuts)])
        return Snapshot(SnapshotId(incarnation, sequence), cut_at, [cut for cut in cuts if cut.messages])

    async def _cut_partition(self, partition: Partition) -> SourceCut:
        position = partition.position(self.position)
        messages = None
        if partition.live and partition.taker is not None:
            try:
                messages = await partition.taker.dump()
            except NotFound:
                log.info("worker %s/%d was removed while it was copied", *partition.worker)
        if messages is None:
            messages = list(partition.parked)
        unverified = partition.unverified or partition.doubtful
        return SourceCut(partition.worker, position, messages, unverified, partition.unregistered_since)

    def _subject(self, worker: WorkerRank) -> str:
        return self._names.stream_events(self._tenant, self._model, worker)
