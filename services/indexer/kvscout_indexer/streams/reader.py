"""One stream, read for ever: its end for all sources at once, and the past of those that are behind.

::

    stream ══ consumer from the tail on ═══════════▶ StreamSources
       └──▶ snapshot ──▶ consumer of the past ──▶ ┘    (until nothing is behind)

Whatever goes wrong between the server and us (a consumer deleted, the stream purged beyond the tail or made anew, a
message that did not come) ends in the same place: look at the stream, decide where to go on, make the consumers anew.
What the server remembers of this replica decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from kvscout_blocks.publish.event_stream import ensure_stream
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.shards import Shard
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.position import SnapshotId, SnapshotSchedule, StreamState, fits, to_load
from kvscout_indexer.streams.pull import PullBroken, StreamMessage, StreamPull
from kvscout_indexer.streams.snapshots import SnapshotBroken, Snapshots
from kvscout_indexer.streams.sources import SLICE_SECONDS, PartitionFeed, StreamSources

log = logging.getLogger("kvscout.jetstream")

CHECK_SECONDS: Final = 1.0
"""Interval of comparing the stream with the position."""
RETRY_SECONDS: Final = 0.5
"""After the server could not be reached."""
AGAIN_SECONDS: Final = 0.05
"""After a consumer was lost."""
ACK_WAIT_SECONDS: Final = 60.0
"""Repeated deliveries are dropped by their sequence; this only makes them rare."""
INACTIVE_SECONDS: Final = 300.0
"""The server forgets the consumer of a replica that is gone."""
MAX_FILTERS: Final = 64
"""Sources whose past is read by subject; of more, the whole stream is read."""
READ_ATTEMPTS: Final = 3
"""Attempts to read a snapshot that exists, before the one before it is taken."""


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
        self.stream: StreamState | None = None
        """The stream as it was seen last; None = not yet."""
        self._arrived = asyncio.Event()
        """Something is to be done: a message, a worker that was registered."""
        self.schedule = SnapshotSchedule(threshold, max_age_seconds)
        self.sources = StreamSources(self.schedule)
        self.caught_up = asyncio.Event()
        """No source is behind."""
        self.problem = ""
        """Reason for which it is not read now; "" = it is."""
        self.reloads = 0
        """Times that this replica was overtaken or found the stream made anew."""
        js = link.client.jetstream()
        bucket = link.names.snapshots_bucket(tenant, model)
        self.snapshots = Snapshots(js, bucket, shard, link.config.replicas)
        self._js: JetStreamContext = js
        self._link = link
        self._consumer = consumer
        self._past_consumer = f"{consumer}-past"
        self._max_age_seconds = max_age_seconds
        self._shard = shard
        self._warnings = warnings
        self._connected = asyncio.Event()
        self._past: _Past | None = None
        """None = nothing is behind, or nothing of it is read yet."""
        self._past_partial = False
        """Not all that is behind is in it: it has to begin anew."""
        self._unreadable: dict[SnapshotId, int] = {}
        """Failed attempts by snapshot."""

    @property
    def position(self) -> int:
        """Return the last stream sequence that the state contains."""
        return self.sources.position

    @property
    def lag(self) -> int:
        """Return the number of messages that the stream had when it was seen last, and that are not read yet."""
        return max(0, self.stream.last - self.position) if self.stream is not None else 0

    def connected(self) -> None:
        """Note that the server is connected (again)."""
        self._connected.set()

    def attach(self, subject: str, worker: WorkerRank, feed: PartitionFeed) -> None:
        """Deliver the messages of a worker rank to its feed, from its past on."""
        self.sources.attach(subject, worker, feed)
        self.caught_up.clear()
        self._past_partial = True
        self._arrived.set()

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            end_if_cancelled()
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

    async def leave(self) -> None:
        """Remove this replica's consumers, if the server is there."""
        if self._link.connected:
            try:
                await self._delete_consumer(self._consumer)
                await self._delete_consumer(self._past_consumer)
            except nats.errors.Error as error:
                log.info("consumer %s was not deleted; the server will expire it: %r", self._consumer, error)

    async def state(self) -> StreamState:
        """Return the stream now; made if it is not there.

        Raises:
            nats.errors.Error: The server cannot be reached.
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
        return StreamState(created, info.state.first_seq, info.state.last_seq, info.state.num_deleted or 0)

    async def _place(self) -> None:
        """Continue at the tail if the stream still follows it, else at the stream's end."""
        stream = self.stream = await self.state()
        if self.sources.follows(stream):
            return
        if self.sources.incarnation is not None:
            self.reloads += 1
            log.warning(
                "stream of model %r: position %d is no longer within %d..%d; continuing at its end",
                self.model, self.position, stream.first, stream.last,
            )  # fmt: skip
        complete = (await self.snapshots.complete())[self._shard]
        async with self.sources.delivery:
            self.sources.place(stream)
        self.schedule.restart(max((each.sequence for each in complete if fits(each, stream)), default=0))

    async def _follow(self) -> None:
        """Read on from the tail, and what is behind, until something is wrong.

        Raises:
            PullBroken: Something is.
            nats.errors.Error: The server is not there.
        """
        await self._make_consumer(self._consumer, self.sources.tail)
        pull = StreamPull(self._link.client, self.name, self._consumer, arrived=self._arrived.set, clock=time.monotonic)
        try:
            await pull.open()
            check_at = time.monotonic() + CHECK_SECONDS
            while True:
                end_if_cancelled()
                # Before looking: what comes while we look is looked at again.
                self._arrived.clear()
                past = await self._catch_up()
                messages = await pull.take()
                if messages:
                    await self._deliver(messages, past=False)
                    await pull.acknowledge(messages[-1])
                self.sources.verify()
                if not self.sources.behind:
                    self.caught_up.set()
                    self.problem = ""
                if time.monotonic() >= check_at:
                    await self._check()
                    check_at = time.monotonic() + CHECK_SECONDS
                if not messages and not past:
                    await self._wait(check_at)
        finally:
            await pull.close()
            await self._end_past()

    async def _catch_up(self) -> bool:
        """Read on in the past of what is behind; return whether there is more to do immediately."""
        if not self.sources.behind:
            await self._end_past()
            return False
        if self._past is None or self._past_partial:
            await self._end_past()
            self._past = await self._begin_past()
        past = self._past
        messages = await past.pull.take()
        await self._deliver(messages, past=True)
        if messages:
            past.position, past.pending = messages[-1].sequence, messages[-1].pending
        if past.pending or self._past_partial:
            return bool(messages)
        self.stream = await self.state()
        if past.position + 1 < self.stream.first and past.first < self.stream.first:
            # Purged meanwhile, maybe unread: a newer snapshot has it.
            self._past_partial = True
        return self._past_partial or self.sources.caught_up(past.position)

    async def _begin_past(self) -> _Past:
        """Load what is behind from snapshots, and begin to read what follows them.

        Raises:
            nats.errors.Error: The server is not there.
        """
        self._past_partial = True
        while self._past_partial:
            # Again where a worker was registered meanwhile.
            self._past_partial = False
            stream = self.stream = await self.state()
            for snapshot in to_load(stream, (await self.snapshots.complete())[self._shard]):
                if self._unreadable.get(snapshot, 0) < READ_ATTEMPTS:
                    await self._load(snapshot, of_stream=fits(snapshot, stream))
        self._unreadable.clear()
        start = self.sources.begin_past(stream)
        subjects = list(self.sources.behind)
        pending = await self._make_consumer(
            self._past_consumer, start, subjects=subjects if len(subjects) <= MAX_FILTERS else None
        )
        pull = StreamPull(
            self._link.client, self.name, self._past_consumer, arrived=self._arrived.set, clock=time.monotonic
        )
        await pull.open()
        return _Past(pull, stream.first, start, pending)

    async def _load(self, snapshot: SnapshotId, *, of_stream: bool) -> None:
        try:
            if self.sources.wants(await self.snapshots.positions(snapshot), fits=of_stream):
                async with aclosing(self.snapshots.read(snapshot)) as cuts:
                    await self.sources.load(cuts, fits=of_stream)
        except SnapshotBroken as error:
            log.warning("skipping a snapshot of model %r: %s", self.model, error)
        except (nats.errors.Error, TimeoutError):
            self._unreadable[snapshot] = self._unreadable.get(snapshot, 0) + 1
            raise

    async def _end_past(self) -> None:
        past, self._past = self._past, None
        if past is not None:
            await past.pull.close()
            if self._link.connected:
                await self._delete_consumer(self._past_consumer)

    async def _make_consumer(self, name: str, position: int, subjects: list[str] | None = None) -> int:
        """Make a consumer of what follows a position, of these subjects or all; return its number of messages."""
        await self._delete_consumer(name)
        config = ConsumerConfig(
            name=name,
            durable_name=name,
            description="indexer",
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=position + 1,
            filter_subjects=subjects,
            ack_policy=AckPolicy.ALL,
            ack_wait=ACK_WAIT_SECONDS,
            max_ack_pending=-1,
            inactive_threshold=INACTIVE_SECONDS,
            # It is made again at every doubt: no need to keep it on disks, or in copies.
            mem_storage=True,
            num_replicas=1,
        )
        return (await self._js.add_consumer(self.name, config)).num_pending or 0

    async def _delete_consumer(self, name: str) -> None:
        try:
            await self._js.delete_consumer(self.name, name)
        except NotFoundError:
            pass

    async def _wait(self, until: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._arrived.wait()
        except TimeoutError:
            pass

    async def _check(self) -> None:
        """Compare the stream with the position.

        Raises:
            PullBroken: They do not fit.
        """
        self.stream = await self.state()
        if not self.sources.follows(self.stream):
            raise PullBroken(f"the stream has {self.stream.first}..{self.stream.last} now")
        self.problem = ""
        past = self._past
        if past is not None and past.pending:
            consumer = await self._js.consumer_info(self.name, self._past_consumer)
            delivered = consumer.delivered.stream_seq if consumer.delivered is not None else 0
            if not consumer.num_pending and delivered <= past.position:
                # The rest was removed from the stream.
                past.pending = 0
                self._arrived.set()

    async def _deliver(self, messages: list[StreamMessage], *, past: bool) -> None:
        at = 0
        while at < len(messages):
            async with self.sources.delivery:
                ends = time.monotonic() + SLICE_SECONDS
                while at < len(messages) and time.monotonic() < ends:
                    message = messages[at]
                    if past:
                        self.sources.deliver_past(message)
                    elif message.sequence > self.sources.tail:
                        if message.sequence > self.sources.tail + 1:
                            await self._check_hole(message.sequence)
                        self.sources.deliver(message)
                    at += 1
            await asyncio.sleep(0)

    async def _check_hole(self, sequence: int) -> None:
        """Check why messages before `sequence` were removed from the stream.

        Raises:
            PullBroken: A snapshot may have them: it is looked for.
        """
        stream = await self.state()
        if not self.sources.follows(stream):
            raise PullBroken(f"{self.sources.tail + 1}..{sequence - 1} were purged")
        log.warning("stream of model %r: %d..%d were removed", self.model, self.sources.tail + 1, sequence - 1)
        self.sources.doubt_all()


@dataclass(slots=True)
class _Past:
    """The consumer of the past of what is behind."""

    pull: StreamPull
    first: int
    """First stream sequence when it began."""
    position: int
    """Everything up to this stream sequence was read."""
    pending: int
    """Messages that are left; 0 = it is read."""
