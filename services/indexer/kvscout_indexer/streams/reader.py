"""One stream, read from this replica's position on, for ever.

::

    start, reload ──▶ snapshot ──▶ StreamSources ◀── messages, in order ◀── consumer at position + 1

Whatever goes wrong between the server and us (the consumer deleted, the stream purged beyond the position or made anew,
a message that did not come) ends in the same place: look at the stream, decide where to go on (`position.resume`), make
the consumer anew. What the server remembers of this replica decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from kvscout_blocks.publish.event_stream import ensure_stream
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.shards import Shard
from kvscout_indexer.streams.position import SnapshotId, SnapshotSchedule, StreamState, resume
from kvscout_indexer.streams.pull import PullBroken, StreamMessage, StreamPull
from kvscout_indexer.streams.snapshots import SnapshotBroken, Snapshots
from kvscout_indexer.streams.sources import SLICE_SECONDS, StreamSources

log = logging.getLogger("kvscout.jetstream")

CHECK_SECONDS: Final = 1.0
"""Interval of comparing the stream with the position."""
RETRY_SECONDS: Final = 0.5
"""After the server could not be asked."""
AGAIN_SECONDS: Final = 0.05
"""After a consumer was lost."""
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
        self.stream: StreamState | None = None
        """The stream as it was seen last; None = not yet."""
        self._arrived = asyncio.Event()
        """Something is to be done: a message, a partition that was taken."""
        self.schedule = SnapshotSchedule(threshold, max_age_seconds)
        self.sources = StreamSources(
            link.names, tenant, model, shard=shard, schedule=self.schedule, arrived=self._arrived.set
        )
        self.caught_up = asyncio.Event()
        """Everything was read that the stream had when reading began."""
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
        self._max_age_seconds = max_age_seconds
        self._shard = shard
        self._warnings = warnings
        self._connected = asyncio.Event()
        self._target = 0
        """Sequence to reach to have caught up."""
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

    async def run(self) -> None:
        """Read until cancelled."""
        try:
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
        finally:
            self.sources.stop()

    async def leave(self) -> None:
        """Remove this replica's consumer, if the server is there."""
        if self._link.connected:
            try:
                await self._js.delete_consumer(self.name, self._consumer)
            except nats.errors.Error as error:
                log.info("consumer %s was not deleted; the server will expire it: %r", self._consumer, error)

    async def state(self) -> StreamState:
        """Return the stream now; made if it is not there.

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
        """Decide where to continue, and load what is needed for it."""
        while True:
            end_if_cancelled()
            stream = await self.state()
            self.stream = stream
            if self.sources.follows(stream):
                return
            complete = (await self.snapshots.complete())[self._shard]
            usable = [each for each in complete if self._unreadable.get(each, 0) < READ_ATTEMPTS]
            plan = resume(stream, usable, self.sources.incarnation, self.position)
            snapshot = None
            if plan.load is not None:
                try:
                    snapshot = await self.snapshots.read(plan.load)
                except SnapshotBroken as error:
                    log.warning("skipping a snapshot of model %r: %s", self.model, error)
                    self._unreadable[plan.load] = READ_ATTEMPTS
                    continue
                except (nats.errors.Error, TimeoutError):
                    self._unreadable[plan.load] = self._unreadable.get(plan.load, 0) + 1
                    raise
            break
        if self.sources.incarnation is not None:
            self.reloads += 1
            log.warning(
                "stream of model %r: position %d is no longer within %d..%d; continuing at %d%s",
                self.model, self.position, stream.first, stream.last, plan.position + 1,
                " with a snapshot" if snapshot is not None else "",
            )  # fmt: skip
        self._unreadable.clear()
        self._target = stream.last
        async with self.sources.delivery:
            self.sources.go_on(stream, plan, snapshot)

    async def _follow(self) -> None:
        """Read on from the position, until something is wrong.

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
                end_if_cancelled()
                # Before looking: what comes while we look is looked at again.
                self._arrived.clear()
                await self.sources.deliver_parked()
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
        """Compare the stream with the position.

        Raises:
            PullBroken: They do not fit.
        """
        self.stream = await self.state()
        if not self.sources.follows(self.stream):
            raise PullBroken(f"the stream has {self.stream.first}..{self.stream.last} now")
        self.problem = ""
        if self.position < self._target:
            consumer = await self._js.consumer_info(self.name, self._consumer)
            if not consumer.num_pending and (
                consumer.delivered is None or consumer.delivered.stream_seq <= self.position
            ):
                # The rest was removed from the stream.
                self._target = self.position
        self.sources.partitions.expire(self.schedule.max_age_seconds)

    async def _deliver(self, messages: list[StreamMessage]) -> None:
        at = 0
        while at < len(messages):
            async with self.sources.delivery:
                ends = time.monotonic() + SLICE_SECONDS
                while at < len(messages) and time.monotonic() < ends:
                    message = messages[at]
                    if message.sequence > self.position:
                        if message.sequence > self.position + 1:
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
            raise PullBroken(f"{self.position + 1}..{sequence - 1} were purged")
        log.warning("stream of model %r: %d..%d were removed", self.model, self.position + 1, sequence - 1)
        self.sources.doubt_all()

    def _notice_caught_up(self) -> None:
        if self.position < self._target:
            return
        self.caught_up.set()
        self.problem = ""
        self.sources.verify()
