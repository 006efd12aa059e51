"""What a stream says of its sources, lane by lane, up to a position: what every replica of it has in memory.

::

    snapshot ──▶ lanes ──▶ takers (feeds of registered workers)
    messages ──▶   │
                   └──▶ cut ──▶ snapshot

The order of everything is that of `turn`: what is parked is delivered before what follows it, and nothing is delivered
while a lane is cut.
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
from kvscout_indexer.streams.partitions import Lane, Lanes, Taker
from kvscout_indexer.streams.position import Resume, SnapshotId, SnapshotSchedule, StreamState
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
        schedule: Told of every message.
        arrived: Called when a lane was taken; must not block.
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
        """Last stream sequence that the state contains."""
        self.incarnation: int | None = None
        """Of the stream that the position is of; None = there is no state yet."""
        self.lanes = Lanes(time.time)
        self.turn = asyncio.Lock()
        """Held while messages are delivered, and while a lane is cut."""
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
        self._taken: list[Lane] = []
        """Lanes with a new taker, not live yet."""
        self._unasked: list[Lane] = []
        """Live lanes whose publisher may have to be asked, once everything else was read."""
        self._past_lost = False
        """What the stream had before reading began is in no snapshot."""
        self._stopped = False

    def stop(self) -> None:
        """Nothing is read any more: takers that leave are the end of the process."""
        self._stopped = True

    def attach(self, worker: WorkerRank, taker: Taker) -> None:
        """Has the lane of a worker rank delivered to a taker, what is parked first."""
        subject = self._subject(worker)
        known = self.lanes.get(subject) is not None
        lane = self.lanes.of(subject, worker)
        # The stream may have had events of it, and no snapshot has.
        lane.unverified = lane.unverified or (not known and self._past_lost)
        lane.taker, lane.live, lane.unregistered_since = taker, False, 0.0
        self._taken.append(lane)
        self._arrived()

    def detach(self, worker: WorkerRank, taker: Taker, state: Callable[[], list[bytes] | None]) -> None:
        """Parks a lane again.

        Args:
            worker: Whose lane.
            taker: Who had it; a later one keeps it.
            state: What was delivered, as messages; None = too much to be kept.
        """
        lane = self.lanes.get(self._subject(worker))
        if lane is None or lane.taker is not taker:
            return
        if lane.live and not self._stopped:
            parked = state()
            lane.unverified = lane.unverified or parked is None or not taker.settled
            self.lanes.load(lane, parked or ())
        lane.taker, lane.live, lane.unregistered_since = None, False, time.time()

    def go_on(self, stream: StreamState, plan: Resume, snapshot: Snapshot | None) -> None:
        """Goes on elsewhere, in its turn.

        Args:
            stream: The stream now.
            plan: Where.
            snapshot: What the plan loads.
        """
        self._generation += 1
        known = {lane.subject for lane in self.lanes}
        if plan.anew:
            for lane in self.lanes:
                lane.covered = lane.contained = 0
        same_stream = snapshot is not None and snapshot.id.incarnation == stream.incarnation
        loaded = self._load(snapshot, known, same_stream=same_stream) if snapshot is not None else set()
        # What is in no snapshot has missed what was purged, if it has missed anything.
        for lane in self.lanes:
            if plan.missed or (lane.subject in known and lane.subject not in loaded and snapshot is not None):
                self._doubt(lane)
        self.incarnation, self.position = stream.incarnation, plan.position
        self._past_lost = self._past_lost or plan.missed
        self._schedule.restart(plan.position if same_stream else 0)

    def _load(self, snapshot: Snapshot, known: set[str], *, same_stream: bool) -> set[str]:
        """Parks the snapshot's sources, for those who take them; returns the subjects of all that it has."""
        subjects = set()
        for cut in snapshot.sources:
            subject = self._subject(cut.worker)
            subjects.add(subject)
            lane = self.lanes.of(subject, cut.worker)
            covered = cut.position if same_stream else 0
            if subject in known and self.incarnation is not None and same_stream and self.position >= covered:
                continue
            self.lanes.load(lane, cut.messages)
            lane.covered, lane.live = covered, False
            lane.unverified = cut.unverified
            if lane.taker is not None:
                self._taken.append(lane)
            elif cut.unregistered_since:
                lane.unregistered_since = min(lane.unregistered_since, cut.unregistered_since)
        return subjects

    def deliver(self, message: StreamMessage) -> None:
        """Takes the next message, in its turn."""
        self.position = message.sequence
        self._schedule.on_message(message.sequence, message.sent_at)
        lane = self.lanes.get(message.subject) or self._new_lane(message.subject)
        if lane is None:
            self.ignored += 1
        elif message.sequence <= lane.covered:
            pass
        elif lane.live:
            assert lane.taker is not None
            self._deliver_live(lane, lane.taker, message)
        else:
            self.lanes.park(lane, message.data)

    def _deliver_live(self, lane: Lane, taker: Taker, message: StreamMessage) -> None:
        if lane.unverified:
            before = taker.cursor
            lane.unverified = False
            self._hand_over(lane, taker, message.data)
            # What continues the cursor proves that nothing was missed; what leaves a gap has its source ask by itself.
            lane.unverified = lane.unverified or (taker.settled and taker.cursor == before)
        else:
            self._hand_over(lane, taker, message.data)
        if taker.settled:
            lane.contained, lane.doubtful = message.sequence, False

    def _new_lane(self, subject: str) -> Lane | None:
        try:
            event = self._names.parse_events(subject)
        except InvalidArgument:
            return None
        if not self._shard.has(event.tenant, event.worker.worker_id) or self.lanes.full:
            return None
        return self.lanes.of(subject, event.worker)

    def _hand_over(self, lane: Lane, taker: Taker, data: bytes) -> None:
        try:
            taker.deliver(data)
        except Exception:
            # It would come again after a restart: the message costs itself, and its source is verified.
            log.exception("a message of worker %s/%d cannot be applied", *lane.worker)
            self._doubt(lane)

    def _doubt(self, lane: Lane) -> None:
        lane.unverified = True
        if lane.live:
            self._unasked.append(lane)

    async def deliver_parked(self) -> None:
        """Makes lanes live that were taken."""
        while self._taken:
            lane = self._taken.pop(0)
            async with self.turn:
                if lane.taker is not None and not lane.live:
                    await self._make_live(lane, lane.taker)

    async def _make_live(self, lane: Lane, taker: Taker) -> None:
        ends = time.monotonic() + SLICE_SECONDS
        for data in self.lanes.unpark(lane):
            self._hand_over(lane, taker, data)
            await taker.caught_up()
            if time.monotonic() > ends:
                # The turn stays ours: nothing is cut or delivered amid this.
                await asyncio.sleep(0)
                ends = time.monotonic() + SLICE_SECONDS
                if lane.taker is not taker:
                    # What he had is gone with him.
                    lane.unverified = True
                    return
        lane.live = True
        lane.contained, lane.doubtful = self.position, not taker.settled
        self._unasked.append(lane)

    def verify(self) -> None:
        """Everything was read that the stream had: has publishers asked for what it did not have."""
        unasked, self._unasked = self._unasked, []
        for lane in unasked:
            if lane.taker is not None and lane.live and lane.unverified:
                # Until the answer is there, snapshots say that something may be missing.
                lane.unverified, lane.doubtful = False, True
                lane.taker.verify()

    def doubt_all(self) -> None:
        """Messages of any source may have been missed."""
        for lane in self.lanes:
            self._doubt(lane)

    async def cut(self) -> Snapshot | None:
        """The state of every source; None if the replica went on elsewhere in the meantime."""
        generation, sequence = self._generation, self.position
        incarnation = self.incarnation
        if incarnation is None:
            return None
        cut_at = time.time()
        cuts = []
        for lane in self.lanes:
            async with self.turn:
                cuts.append(await self._cut_lane(lane))
        if generation != self._generation:
            return None
        sequence = min([sequence, *(cut.position for cut in cuts)])
        return Snapshot(SnapshotId(incarnation, sequence), cut_at, [cut for cut in cuts if cut.messages])

    async def _cut_lane(self, lane: Lane) -> SourceCut:
        position = lane.position(self.position)
        messages = None
        if lane.live and lane.taker is not None:
            try:
                messages = await lane.taker.dump()
            except NotFound:
                log.info("worker %s/%d was removed while it was cut", *lane.worker)
        if messages is None:
            messages = list(lane.parked)
        unverified = lane.unverified or lane.doubtful
        return SourceCut(lane.worker, position, messages, unverified, lane.unregistered_since)

    def _subject(self, worker: WorkerRank) -> str:
        return self._names.stream_events(self._tenant, self._model, worker)
