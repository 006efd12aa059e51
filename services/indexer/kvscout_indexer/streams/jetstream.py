"""Events over JetStream: one stream a model and tenant, read by every replica from a position of its own.

::

    bridges ──▶ stream ──▶ StreamReader ──partition by partition──▶ JetStreamFeed ──▶ Source ──▶ index
                              │    ▲
                              ▼    └─ snapshots ◀─ Snapshotter

`docs/jetstream.md` says what happens when.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import nats.errors
from nats.js.errors import NotFoundError

from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.feed import Cursor, Feed
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.shards import WHOLE, Shard
from kvscout_common.worker import Transport, WorkerRank, WorkerSpec
from kvscout_indexer.feeds.publisher_feed import PublisherFeed
from kvscout_indexer.streams.reader import StreamReader
from kvscout_indexer.streams.snapshots import Snapshots
from kvscout_indexer.streams.snapshotter import Snapshotter

log = logging.getLogger("kvscout.jetstream")

CONNECT_SECONDS: Final = 5.0
"""Longest time at start that health waits for NATS."""
CATCH_UP_SECONDS: Final = 30.0
"""Longest time at start that health waits until everything was read that the streams had then."""
RETRY_SECONDS: Final = 2.0
ABANDONED_SECONDS: Final = 60.0
"""A state whose next chunk has not come for so long has no end: its publisher died amid it."""


class JetStream:
    """`transports.EventTransport` of JetStream.

    Args:
        link: The process's connection.
        security: How bridges are called.
        max_age_seconds: Retention of streams made here.
        snapshot_threshold: Messages between two snapshots of a stream.
        reset_states: Clear streams, snapshots and consumers of the namespace at start.
        shard: Which workers are read.
        warnings: Where what is wrong is logged.
    """

    def __init__(
        self,
        link: NatsLink,
        *,
        max_age_seconds: float,
        snapshot_threshold: int,
        reset_states: bool = False,
        security: ClientSecurity = PLAINTEXT,
        shard: Shard = WHOLE,
        warnings: RateLimitedLog,
    ) -> None:
        self.link = link
        self.replica = replica_name()
        """Name of this replica's consumers."""
        self.readers: dict[tuple[str, str], StreamReader] = {}
        """By tenant and model."""
        self.snapshotters: dict[tuple[str, str], Snapshotter] = {}
        self._max_age_seconds = max_age_seconds
        self._threshold = snapshot_threshold
        self._reset_states = reset_states
        self._security = security
        self._shard = shard
        self._warnings = warnings
        self._group: asyncio.TaskGroup | None = None
        self._connected = asyncio.Event()
        self._discovered = asyncio.Event()
        """The streams of the namespace are known, or cannot be."""
        self._problem = ""
        link.on_connected(self._on_connected)

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """See `EventTransport.feed`."""
        try:
            self.reader_of(spec.tenant, spec.model)
            return JetStreamFeed(self, spec, rank, index, self._security)
        except InvalidArgument as error:
            log.error("events of worker %s/%d cannot be read from NATS: %s", *rank, error)
            return None

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what reads the streams."""
        return {"jetstream": self.run}

    async def close(self) -> None:
        """Remove this replica's consumers."""
        for reader in self.readers.values():
            await reader.leave()

    async def run(self) -> None:
        """Read every stream of the namespace, and those of models registered later, until cancelled."""
        await self._connected.wait()
        await self._discover()
        async with asyncio.TaskGroup() as group:
            self._group = group
            for key in self.readers:
                self._start(group, key)
            await asyncio.Event().wait()

    async def warm(self) -> None:
        """Wait until everything was read that the streams had at start, for `CATCH_UP_SECONDS` at most."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._discovered.wait()
            async with asyncio.timeout(CATCH_UP_SECONDS):
                for reader in list(self.readers.values()):
                    await reader.caught_up.wait()
        except TimeoutError:
            log.warning("serving before the event streams were read")

    def warnings(self) -> list[Warned]:
        """Return what an operator should know, in sentences."""
        if not self.link.connected:
            return []  # the link's own problem says it
        own: list[Warned] = [self._problem] if self._problem and self.readers else []
        return own + [
            TenantWarning(tenant, reader.problem) for (tenant, _), reader in self.readers.items() if reader.problem
        ]

    def reader_of(self, tenant: str, model: str) -> StreamReader:
        """Read the stream of a model; begun if need be."""
        reader = self.readers.get((tenant, model))
        if reader is None:
            reader = self.readers[tenant, model] = StreamReader(
                self.link,
                tenant,
                model,
                consumer=self.replica,
                max_age_seconds=self._max_age_seconds,
                threshold=self._threshold,
                shard=self._shard,
                warnings=self._warnings,
            )
            self.snapshotters[tenant, model] = Snapshotter(
                self.link, reader, holder=self.replica, shard=self._shard, warnings=self._warnings
            )
            if self._group is not None:
                self._start(self._group, (tenant, model))
        return reader

    def add(self, feed: JetStreamFeed) -> None:
        """Begin to deliver to a feed."""
        self.reader_of(feed.spec.tenant, feed.spec.model).attach(feed.subject, feed.rank, feed)

    def remove(self, feed: JetStreamFeed) -> None:
        """End delivery."""
        self.reader_of(feed.spec.tenant, feed.spec.model).sources.detach(feed.subject, feed)

    def _start(self, group: asyncio.TaskGroup, key: tuple[str, str]) -> None:
        reader, snapshotter = self.readers[key], self.snapshotters[key]
        if self.link.connected:
            reader.connected()
        group.create_task(reader.run(), name=f"stream {key[1]}")
        group.create_task(snapshotter.run(), name=f"snapshots {key[1]}")

    async def _on_connected(self) -> None:
        """Wake the readers; a hook of the link."""
        self._connected.set()
        for reader in self.readers.values():
            reader.connected()

    async def _discover(self) -> None:
        """Find the streams of the namespace: their sources may be registered at any time."""
        while True:
            end_if_cancelled()
            try:
                if self._reset_states:
                    await self._reset()
                    self._reset_states = False
                for tenant, model in await self._streams():
                    self.reader_of(tenant, model)
                self._problem = ""
                self._discovered.set()
                return
            except (nats.errors.Error, TimeoutError, OSError) as error:
                self._problem = f"NATS has no JetStream, or it does not answer: {error!r}"
                self._warnings.warning("jetstream", "%s; trying again", self._problem)
                if not self.readers and self.link.connected:
                    # Nobody needs it so far: plain NATS is enough for the rest.
                    self._discovered.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def _streams(self) -> list[tuple[str, str]]:
        """Return tenant and model of every stream of the namespace."""
        js = self.link.client.jetstream()
        found: list[tuple[str, str]] = []
        offset = 0
        while True:
            page = await js.streams_info(offset)
            if not page:
                return found
            offset += len(page)
            for info in page:
                owner = self.link.names.parse_stream(info.config.name or "")
                if owner is not None:
                    found.append(owner)

    async def _reset(self) -> None:
        """Clear what the namespace has of before: messages, snapshots, the positions of all replicas."""
        js = self.link.client.jetstream()
        for tenant, model in await self._streams():
            name = self.link.names.stream(tenant, model)
            bucket = self.link.names.snapshots_bucket(tenant, model)
            await Snapshots(js, bucket, self._shard).clear()
            await js.purge_stream(name)
            for consumer in await js.consumers_info(name):
                try:
                    await js.delete_consumer(name, consumer.name)
                except NotFoundError:
                    pass
            log.warning("stream of model %r, tenant %r: cleared by --router-reset-states", model, tenant)


class JetStreamFeed(PublisherFeed):
    """The feed of one worker rank from the partition of its subject.

    Args:
        transport: Delivers its messages.
        spec: The worker.
        rank: Which of its ranks.
        index: Where its blocks go.
        security: How its bridge is called.
    """

    def __init__(
        self, transport: JetStream, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex, security: ClientSecurity
    ) -> None:
        subject = transport.link.names.stream_events(spec.tenant, spec.model, rank)
        super().__init__(transport, spec, rank, index, security, transport=Transport.JETSTREAM, subject=subject)
        self.spec = spec
        self.rank = rank
        self._transport = transport
        self._received_at = 0.0

    @property
    def outage(self) -> str:
        """See `Feed.outage`."""
        return self._transport.link.problem or self._transport.reader_of(self.spec.tenant, self.spec.model).problem

    @property
    def settled(self) -> bool:
        """See `PartitionFeed.settled`."""
        amid_state = self._reader.amid_state and time.monotonic() - self._received_at < ABANDONED_SECONDS
        return not self._source.replaying and not amid_state

    @property
    def cursor(self) -> Cursor:
        """See `PartitionFeed.cursor`."""
        return self._source.cursor

    def deliver(self, data: bytes) -> None:
        """See `PartitionFeed.deliver`."""
        self._received_at = time.monotonic()
        self.receive(data)

    def verify(self) -> None:
        """See `PartitionFeed.verify`."""
        self._source.on_reconnect()

    async def caught_up(self) -> None:
        """See `PartitionFeed.caught_up`."""
        await self._source.caught_up()

    async def dump(self) -> list[bytes]:
        """See `PartitionFeed.dump`."""
        taken = await self._source.cut()
        messages = None
        if taken is not None:
            messages = await taken.cut.encode(
                self.spec.pool, history_incomplete=taken.history_incomplete, epoch=taken.epoch
            )
        if messages is None:
            raise NotFound(f"worker {self.rank.worker_id} rank {self.rank.dp_rank} is not known")
        return messages


def replica_name() -> str:
    """Return a unique name for this process's consumers: a position belongs to a state, which dies with it."""
    host = "".join(c if c.isalnum() else "_" for c in socket.gethostname())[:64]
    return f"indexer-{host}-{os.urandom(6).hex()}"
