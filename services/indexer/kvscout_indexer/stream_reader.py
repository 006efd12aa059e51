"""One stream, read from this replica's position on: into the lanes of its sources, for ever.

::

    start, reload ──▶ snapshot ──▶ lanes ◀── messages, in order ◀── consumer at position + 1
                                     │
                                     └──▶ cut ──▶ snapshots (`snapshotter`)

The order of everything is this one task's: what is parked is delivered before what follows it, and nothing is delivered
while a lane is cut. Whatever goes wrong between the server and us (the consumer deleted, the stream purged beyond the
position or made anew, a message that did not come) ends in the same place: look at the stream, decide where to go on
(`position.resume`), make the consumer anew. What the server remembers of this replica decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from kvscout_blocks.event_stream import ensure_stream
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.nats_link import NatsLink
from kvscout_common.shards import Shard
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerRank
from kvscout_indexer.position import Resume, SnapshotId, SnapshotSchedule, StreamState, follows, resume
from kvscout_indexer.snapshot import Snapshot, SourceCut
from kvscout_indexer.snapshots import SnapshotBroken, Snapshots
from kvscout_indexer.stream_lanes import Lane, Lanes, Taker
from kvscout_indexer.stream_pull import PullBroken, StreamMessage, StreamPull

log = logging.getLogger("kvscout.jetstream")

CHECK_SECONDS: Final = 1.0
"""How often the stream is compared with the position."""
RETRY_SECONDS: Final = 0.5
"""After the server could not be asked."""
AGAIN_SECONDS: Final = 0.05
"""After a consumer was lost."""
SLICE_SECONDS: Final = 0.002
"""Longest turn on the event loop, but for a single message: others get theirs."""
ACK_WAIT_SECONDS: Final = 60.0
"""Repeated deliveries are dropped by their sequence; this only makes them rare."""
INACTIVE_SECONDS: Final = 300.0
"""The server forgets the consumer of a replica that is gone."""
READ_ATTEMPTS: Final = 3
"""Times that a snapshot that exists is tried before the one before it is taken."""


class StreamReader:
    """Reads one stream.

    Args:
        link: The process's connection.
        tenant: Tenant.
        model: Model.
        consumer: Name of this replica's consumer.
        max_age_seconds: Retention of the stream, if it is made here.
        threshold: Messages between two snapshots.
        shard: Which workers are read.
        warnings: Where what is wrong is logged.
    """

    def __init__(
        self,
        link: NatsLink,
        tenant: str,
        model: str,
        *,
        consumer: str,
        max_age_seconds: float,
        threshold: int,
        shard: Shard,
        warnings: RateLimitedLog,
    ) -> None:
        self.tenant = tenant
        self.model = model
        self.name = link.names.stream(tenant, model)
        self.position = 0
        """Last stream sequence that the state contains."""
        self.stream: StreamState | None = None
        """The stream as it was seen last; None = not yet."""
        self.lanes = Lanes(time.time)
        self.schedule = SnapshotSchedule(threshold, max_age_seconds)
        self.caught_up = asyncio.Event()
        """Everything was read that the stream had when reading began."""
        self.problem = ""
        """Why it is not read now; "" = it is."""
        self.reloads = 0
        """Times that this replica was overtaken or found the stream made anew."""
        self.ignored = 0
        """Messages of nobody: their subject cannot be read, or belongs to another shard."""
        self.generation = 0
        """Grows with each reload: what was cut across one is no snapshot."""
        js = link.client.jetstream()
        bucket = link.names.snapshots_bucket(tenant, model)
        self.snapshots = Snapshots(js, bucket, shard, link.config.replicas)
        self._js: JetStreamContext = js
        self._link = link
        self._consumer = consumer
        self._max_age_seconds = max_age_seconds
        self._shard = shard
        self._warnings = warnings
        self._connected = asyncio.Event()
        self._arrived = asyncio.Event()
        """Something is to be done: a message, a lane that was taken."""
        self._turn = asyncio.Lock()
        """Held while messages are delivered, and while a lane is cut."""
        self._taken: list[Lane] = []
        """Lanes with a new taker, not live yet."""
        self._unasked: list[Lane] = []
        """Live lanes whose publisher may have to be asked, once everything else was read."""
        self._past_lost = False
        """What the stream had before reading began is in no snapshot."""
        self._incarnation: int | None = None
        self._target = 0
        """Sequence to reach to have caught up."""
        self._unreadable: dict[SnapshotId, int] = {}
        """Failed attempts by snapshot."""
        self._stopped = False

    @property
    def lag(self) -> int:
        """Messages that the stream had when it was seen last, and that were not read."""
        return max(0, self.stream.last - self.position) if self.stream is not None else 0

    # --- takers ---------------------------------------------------------------------------------------

    def attach(self, worker: WorkerRank, taker: Taker) -> None:
        """Has the lane of a worker rank delivered to a taker, what is parked first."""
        subject = self._link.names.stream_events(self.tenant, self.model, worker)
        known = self.lanes.get(subject) is not None
        lane = self.lanes.of(subject, worker)
        # The stream may have had events of it, and no snapshot has.
        lane.unverified = lane.unverified or (not known and self._past_lost)
        lane.taker, lane.live, lane.unregistered_since = taker, False, 0.0
        self._taken.append(lane)
        self._arrived.set()

    def detach(self, worker: WorkerRank, taker: Taker, state: Callable[[], list[bytes] | None]) -> None:
        """Parks a lane again.

        Args:
            worker: Whose lane.
            taker: Who had it; a later one keeps it.
            state: What was delivered, as messages; None = too much to be kept.
        """
        lane = self.lanes.get(self._link.names.stream_events(self.tenant, self.model, worker))
        if lane is None or lane.taker is not taker:
            return
        if lane.live and not self._stopped:
            parked = state()
            lane.unverified = lane.unverified or parked is None or not taker.settled
            self.lanes.load(lane, parked or ())
        lane.taker, lane.live, lane.unregistered_since = None, False, time.time()

    # --- reading --------------------------------------------------------------------------------------

    def connected(self) -> None:
        """The server is there (again)."""
        self._connected.set()

    async def run(self) -> None:
        """Reads until cancelled."""
        try:
            while True:
                await self._connected.wait()
                try:
                    await self._place()
                    await self._follow()
                except PullBroken as broken:
                    log.info("stream of model %r: %s", self.model, broken)
                    await asyncio.sleep(AGAIN_SECONDS)
                except (nats.errors.Error, TimeoutError, OSError) as error:
                    self.problem = f"stream of model {self.model!r} cannot be read: {error!r}"
                    self._warnings.warning((self.name, type(error)), "%s; trying again", self.problem)
                    await asyncio.sleep(RETRY_SECONDS)
                if not self._link.connected:
                    self._connected.clear()
        finally:
            self._stopped = True

    async def leave(self) -> None:
        """Removes this replica's consumer, if the server is there."""
        if self._link.connected:
            try:
                await self._js.delete_consumer(self.name, self._consumer)
            except nats.errors.Error as error:
                log.info("consumer %s is left to the server to forget: %r", self._consumer, error)

    async def state(self) -> StreamState:
        """The stream now; made if it is not there.

        Raises:
            nats.errors.Error: The server cannot be asked.
        """
        try:
            info = await self._js.stream_info(self.name)
        except NotFoundError:
            await ensure_stream(
                self._js,
                self._link.names,
                self.tenant,
                self.model,
                max_age_seconds=self._max_age_seconds,
                replicas=self._link.config.replicas,
            )
            info = await self._js.stream_info(self.name)
        if info.config.max_age:
            # Who made it decided; an operator may have changed it.
            self.schedule.max_age_seconds = info.config.max_age
        created = round(info.created.timestamp() * 1_000_000) if info.created is not None else 0
        return StreamState(created, info.state.first_seq, info.state.last_seq)

    async def _place(self) -> None:
        """Decides where to go on, and loads what is needed for it."""
        while True:
            stream = await self.state()
            self.stream = stream
            if self._incarnation is not None and follows(stream, self._incarnation, self.position):
                return
            complete = (await self.snapshots.complete())[self._shard]
            usable = [each for each in complete if self._unreadable.get(each, 0) < READ_ATTEMPTS]
            plan = resume(stream, usable, self._incarnation, self.position)
            snapshot = None
            if plan.load is not None:
                try:
                    snapshot = await self.snapshots.read(plan.load)
                except SnapshotBroken as error:
                    log.warning("snapshot of model %r is passed over: %s", self.model, error)
                    self._unreadable[plan.load] = READ_ATTEMPTS
                    continue
                except (nats.errors.Error, TimeoutError):
                    self._unreadable[plan.load] = self._unreadable.get(plan.load, 0) + 1
                    raise
            break
        if self._incarnation is not None:
            self.reloads += 1
            log.warning(
                "stream of model %r: position %d is not within %d..%d any more; going on at %d%s",
                self.model, self.position, stream.first, stream.last, plan.position + 1,
                " with a snapshot" if snapshot is not None else "",
            )  # fmt: skip
        async with self._turn:
            self._go_on(stream, plan, snapshot)

    def _go_on(self, stream: StreamState, plan: Resume, snapshot: Snapshot | None) -> None:
        self.generation += 1
        self._unreadable.clear()
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
        self._incarnation, self.position = stream.incarnation, plan.position
        self._past_lost = self._past_lost or plan.missed
        self._target = stream.last
        self.schedule.restart(plan.position if same_stream else 0)

    def _load(self, snapshot: Snapshot, known: set[str], *, same_stream: bool) -> set[str]:
        """Parks the snapshot's sources, for those who take them; returns the subjects of all that it has."""
        subjects = set()
        for cut in snapshot.sources:
            subject = self._link.names.stream_events(self.tenant, self.model, cut.worker)
            subjects.add(subject)
            lane = self.lanes.of(subject, cut.worker)
            covered = cut.position if same_stream else 0
            if subject in known and self._incarnation is not None and same_stream and self.position >= covered:
                continue
            self.lanes.load(lane, cut.messages)
            lane.covered, lane.live = covered, False
            lane.unverified = cut.unverified
            if lane.taker is not None:
                self._taken.append(lane)
            elif cut.unregistered_since:
                lane.unregistered_since = min(lane.unregistered_since, cut.unregistered_since)
        return subjects

    async def _follow(self) -> None:
        """Reads on from the position, until something is wrong.

        Raises:
            PullBroken: Something is.
            nats.errors.Error: The server is not there.
        """
        await self._make_consumer()
        pull = StreamPull(self._link.client, self.name, self._consumer, arrived=self._arrived.set, clock=time.monotonic)
        try:
            await pull.open()
            check_at = time.monotonic() + CHECK_SECONDS
            while True:
                # Before looking: what comes while we look is looked at again.
                self._arrived.clear()
                await self._deliver_parked()
                messages = await pull.take()
                if messages:
                    await self._deliver(messages)
                    await pull.acknowledge(messages[-1])
                self._notice_caught_up()
                if time.monotonic() >= check_at:
                    await self._check()
                    check_at = time.monotonic() + CHECK_SECONDS
                if not messages:
                    await self._wait(check_at)
        finally:
            await pull.close()

    async def _make_consumer(self) -> None:
        try:
            await self._js.delete_consumer(self.name, self._consumer)
        except NotFoundError:
            pass
        config = ConsumerConfig(
            name=self._consumer,
            durable_name=self._consumer,
            description="indexer",
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.position + 1,
            ack_policy=AckPolicy.ALL,
            ack_wait=ACK_WAIT_SECONDS,
            max_ack_pending=-1,
            inactive_threshold=INACTIVE_SECONDS,
            # It is made again at every doubt: no need to keep it on disks, or in copies.
            mem_storage=True,
            num_replicas=1,
        )
        await self._js.add_consumer(self.name, config)

    async def _wait(self, until: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._arrived.wait()
        except TimeoutError:
            pass

    async def _check(self) -> None:
        """Compares the stream with the position.

        Raises:
            PullBroken: They do not fit.
        """
        self.stream = await self.state()
        assert self._incarnation is not None
        if not follows(self.stream, self._incarnation, self.position):
            raise PullBroken(f"the stream has {self.stream.first}..{self.stream.last} now")
        self.problem = ""
        if self.position < self._target:
            consumer = await self._js.consumer_info(self.name, self._consumer)
            if not consumer.num_pending and (
                consumer.delivered is None or consumer.delivered.stream_seq <= self.position
            ):
                # The rest was removed from the stream.
                self._target = self.position
        self.lanes.expire(self.schedule.max_age_seconds)

    async def _deliver(self, messages: list[StreamMessage]) -> None:
        at = 0
        while at < len(messages):
            async with self._turn:
                ends = time.monotonic() + SLICE_SECONDS
                while at < len(messages) and time.monotonic() < ends:
                    message = messages[at]
                    if message.sequence > self.position:
                        if message.sequence > self.position + 1:
                            await self._check_hole(message.sequence)
                        self._deliver_one(message)
                    at += 1
            await asyncio.sleep(0)

    async def _check_hole(self, sequence: int) -> None:
        """Messages before `sequence` were removed from the stream, and not because they are in a snapshot of ours.

        Raises:
            PullBroken: A snapshot may have them: it is looked for.
        """
        stream = await self.state()
        assert self._incarnation is not None
        if not follows(stream, self._incarnation, self.position):
            raise PullBroken(f"{self.position + 1}..{sequence - 1} were purged")
        log.warning("stream of model %r: %d..%d were removed", self.model, self.position + 1, sequence - 1)
        for lane in self.lanes:
            self._doubt(lane)

    def _deliver_one(self, message: StreamMessage) -> None:
        self.position = message.sequence
        self.schedule.on_message(message.sequence, message.sent_at)
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
            event = self._link.names.parse_events(subject)
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

    async def _deliver_parked(self) -> None:
        """Makes lanes live that were taken."""
        while self._taken:
            lane = self._taken.pop(0)
            async with self._turn:
                if lane.taker is not None and not lane.live:
                    await self._make_live(lane, lane.taker)

    async def _make_live(self, lane: Lane, taker: Taker) -> None:
        ends = time.monotonic() + SLICE_SECONDS
        for data in self.lanes.unpark(lane):
            self._hand_over(lane, taker, data)
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

    def _notice_caught_up(self) -> None:
        if self.position < self._target:
            return
        self.caught_up.set()
        self.problem = ""
        unasked, self._unasked = self._unasked, []
        for lane in unasked:
            taker = lane.taker
            if taker is None or not lane.live:
                continue
            if lane.unverified:
                lane.unverified = False
                taker.verify()

    # --- cutting --------------------------------------------------------------------------------------

    async def cut(self) -> Snapshot | None:
        """The state of every source; None if the replica went on elsewhere in the meantime."""
        generation, sequence = self.generation, self.position
        incarnation = self._incarnation
        if incarnation is None:
            return None
        cut_at = time.time()
        cuts = []
        for lane in self.lanes:
            async with self._turn:
                cuts.append(await self._cut_lane(lane))
        if generation != self.generation:
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
