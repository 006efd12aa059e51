"""Takes the snapshots of one stream when they are due, and removes what they make superfluous.

Whoever gets the lock takes it. The lock only saves work: a holder that was stopped beyond the lock's life and goes on
later stores an older snapshot beside newer ones, keeps the two newest as everybody does, and purges no further than
both of them reach.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

import nats.errors
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig
from nats.js.errors import BadRequestError, KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from kvscout_common.nats.link import NatsLink, end_if_cancelled
from kvscout_common.nats.names import encode_name
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.shards import Shard
from kvscout_indexer.streams.position import retention, superseded
from kvscout_indexer.streams.reader import StreamReader
from kvscout_indexer.streams.snapshots import SnapshotBroken

log = logging.getLogger("kvscout.snapshots")

LOCK_SECONDS: Final = 30.0
"""A lock that was not given back ends by itself."""
LOOK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 10.0
"""After a snapshot that failed, or was another replica's to take."""


class SnapshotLock:
    """A key in NATS that one replica at a time creates.

    Args:
        js: JetStream.
        bucket: Name of the key-value bucket.
        key: What is locked.
        holder: Who we are, for people.
        replicas: Servers that keep a copy of a bucket made here.
    """

    def __init__(self, js: JetStreamContext, bucket: str, key: str, holder: str, replicas: int) -> None:
        self._js = js
        self._bucket = bucket
        self._key = key
        self._holder = holder
        self._replicas = replicas
        self._store: KeyValue | None = None

    async def acquire(self) -> int | None:
        """Take the lock; return its revision, None if another replica has it.

        Raises:
            nats.errors.Error: The server cannot be reached.
        """
        store = await self._bucket_store()
        try:
            return await store.create(self._key, self._holder.encode())
        except KeyWrongLastSequenceError:
            return None
        except KeyNotFoundError:
            # It ended between the try and the look.
            return None

    async def renew(self, revision: int) -> int | None:
        """Keep the lock for another `LOCK_SECONDS`; return its new revision, None if it ended.

        Raises:
            nats.errors.Error: The server cannot be reached.
        """
        store = await self._bucket_store()
        try:
            return await store.update(self._key, self._holder.encode(), last=revision)
        except (KeyWrongLastSequenceError, BadRequestError):
            return None

    async def release(self, revision: int) -> None:
        """Release the lock, unless another replica has it by now.

        Raises:
            nats.errors.Error: The server cannot be reached; the lock ends by itself.
        """
        store = await self._bucket_store()
        try:
            await store.delete(self._key, last=revision)
        except (KeyWrongLastSequenceError, BadRequestError):
            log.info("the lock of %s had expired", self._key)

    async def _bucket_store(self) -> KeyValue:
        config = KeyValueConfig(self._bucket, ttl=LOCK_SECONDS, history=1, replicas=self._replicas)
        try:
            return await self._js.create_key_value(config)
        except BadRequestError:
            # It is there, with settings of its own.
            return await self._js.key_value(self._bucket)


class HeldLock:
    """The lock while a snapshot is taken, which may take longer than a lock lives."""

    def __init__(self, lock: SnapshotLock, revision: int) -> None:
        self.revision = revision
        self._lock = lock

    async def renew(self) -> None:
        """Renew it until cancelled, or until another replica has it."""
        while True:
            await asyncio.sleep(LOCK_SECONDS / 3)
            try:
                renewed = await self._lock.renew(self.revision)
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.info("the lock of a snapshot was not renewed: %r", error)
                continue
            if renewed is None:
                return
            self.revision = renewed


class Snapshotter:
    """Takes a stream's snapshots.

    Args:
        link: The process's connection.
        reader: Reads the stream.
        holder: Name of this replica.
        shard: Which workers it reads.
        warnings: Where failures are logged.
    """

    def __init__(
        self, link: NatsLink, reader: StreamReader, *, holder: str, shard: Shard, warnings: RateLimitedLog
    ) -> None:
        self.taken = 0
        """Snapshots that this replica took."""
        self.failed = 0
        self._link = link
        self._js = link.client.jetstream()
        self._reader = reader
        self._shard = shard
        self._warnings = warnings
        key = f"snapshot.{encode_name(reader.tenant)}.{encode_name(reader.model)}.{shard.index}of{shard.count}"
        self._lock = SnapshotLock(self._js, link.names.locks_bucket, key, holder, link.config.replicas)

    async def run(self) -> None:
        """Take snapshots until cancelled."""
        await self._reader.caught_up.wait()
        while True:
            end_if_cancelled()
            await asyncio.sleep(LOOK_SECONDS)
            if not self._due():
                continue
            try:
                done = await self.take()
            except (nats.errors.Error, TimeoutError, OSError, SnapshotBroken) as error:
                self.failed += 1
                done = False
                self._warnings.warning(
                    (self._reader.name, "snapshot"), "no snapshot of model %r: %r", self._reader.model, error
                )
            if not done:
                await asyncio.sleep(RETRY_SECONDS)

    async def take(self) -> bool:
        """Take one, if it is still due once we have the lock; False = another replica has it, or it cannot be now.

        Raises:
            nats.errors.Error: The server cannot be reached.
        """
        revision = await self._lock.acquire()
        if revision is None:
            return False
        held = HeldLock(self._lock, revision)
        renewing = asyncio.create_task(held.renew(), name=f"lock of snapshots {self._reader.model}")
        try:
            await self._learn()
            return await self._take() if self._due() else True
        finally:
            renewing.cancel()
            (ended,) = await asyncio.gather(renewing, return_exceptions=True)
            await self._lock.release(held.revision)
            if isinstance(ended, Exception):
                raise ended

    def _due(self) -> bool:
        reader = self._reader
        return self._link.connected and reader.caught_up.is_set() and reader.schedule.due(reader.position, time.time())

    async def _learn(self) -> None:
        """Look for a snapshot of another replica."""
        reader = self._reader
        stream = await reader.state()
        there = (await reader.snapshots.complete())[self._shard]
        newest = max((each.sequence for each in there if each.incarnation == stream.incarnation), default=0)
        if newest:
            # It does not show when it was cut; its messages were in no other before it was stored.
            reader.schedule.on_snapshot(newest, time.time(), reader.position)

    async def _take(self) -> bool:
        reader = self._reader
        started = time.monotonic()
        snapshot = await reader.sources.cut()
        if snapshot is None or snapshot.id.sequence <= reader.schedule.covered:
            # A source that is amid a state or a replay holds the snapshot back.
            return False
        cut_seconds = time.monotonic() - started
        size = await reader.snapshots.write(snapshot)
        reader.schedule.on_snapshot(snapshot.id.sequence, snapshot.cut_at, reader.position)
        self.taken += 1
        log.info(
            "snapshot of model %r through %d: %d sources, %d bytes, built in %.3f s, stored in %.3f s",
            reader.model, snapshot.id.sequence, len(snapshot.sources), size, cut_seconds,
            time.monotonic() - started - cut_seconds,
        )  # fmt: skip
        await self.clean()
        return True

    async def clean(self) -> None:
        """Keep the two newest snapshots, and purge the stream of what the older one of every shard contains.

        Snapshots of a former number of shards go once nothing of the stream follows them.

        Raises:
            nats.errors.Error: The server cannot be reached.
        """
        reader = self._reader
        stream = await reader.state()
        by_shard = await reader.snapshots.complete()
        kept = {shard: retention(snapshots, stream.incarnation) for shard, snapshots in by_shard.items()}
        await reader.snapshots.drop(self._shard, kept[self._shard].drop)
        through = min(each.purge_through for shard, each in kept.items() if shard.count == self._shard.count)
        if through >= stream.first:
            await self._js.purge_stream(reader.name, seq=through + 1)
        for shard, snapshots in by_shard.items():
            if shard.count != self._shard.count:
                await reader.snapshots.drop(shard, superseded(snapshots, stream.incarnation, through))
        await reader.snapshots.sweep(time.time())
