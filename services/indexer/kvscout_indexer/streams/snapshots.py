"""The snapshots of a stream in its object store: immutable objects, read only if they are complete.

An object's name has all that is needed to choose among them: `snap-<S>-<incarnation>-<shard>of<shards>`. Its entry is
written after its content and has the content's SHA-256: an upload that was broken off has no entry, and what is left of
it is swept up later. The object store's layout is NATS' own (ADR-20), so its tools show the snapshots.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import logging
import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final

from nats.js import JetStreamContext
from nats.js.api import ObjectInfo, ObjectMeta, ObjectMetaOptions, ObjectStoreConfig
from nats.js.errors import BucketNotFoundError, NotFoundError
from nats.js.object_store import ObjectStore

from kvscout_common.errors import KvscoutError
from kvscout_common.shards import Shard
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.position import SnapshotId
from kvscout_indexer.streams.snapshot import (
    Snapshot,
    SnapshotDecoder,
    SourceCut,
    decode_positions,
    encode,
    header_bytes,
    size_bytes,
)

log = logging.getLogger("kvscout.snapshots")

CHUNK_BYTES: Final = 512 * 1024
"""Chunk size of an object: NATS refuses messages of over 1 MiB by default."""
MAX_SNAPSHOT_BYTES: Final = 4 * 1024 * 1024 * 1024
"""Read and written at most; 200 million held blocks."""
KEPT_BYTES: Final = 64 * 1024 * 1024
"""A snapshot up to this size is kept while it is verified; a larger one is read from the store once more."""
SWEEP_AFTER_SECONDS: Final = 600.0
"""Content without an entry is of an upload that was broken off, once nothing was added to it for so long."""

_NAME = re.compile(r"snap-(\d+)-(\d+)-(\d+)of(\d+)", re.ASCII)


class SnapshotBroken(Exception):
    """A snapshot is not complete, or cannot be read by this release."""


class Snapshots:
    """Reads and writes the snapshots of one stream.

    Args:
        js: JetStream.
        bucket: Name of the object store.
        shard: The workers that the snapshots of this replica are of; those of other shards are never read.
        replicas: Servers that keep a copy of a bucket made here.
    """

    def __init__(self, js: JetStreamContext, bucket: str, shard: Shard, replicas: int = 1) -> None:
        self._js = js
        self._bucket = bucket
        self._stream = f"OBJ_{bucket}"
        self._shard = shard
        self._replicas = replicas

    async def complete(self) -> dict[Shard, list[SnapshotId]]:
        """Return every snapshot whose upload was completed, by shard: those of now, and former ones that have any.

        Raises:
            nats.errors.Error: The store cannot be reached.
        """
        found: dict[Shard, list[SnapshotId]] = {Shard(i, self._shard.count): [] for i in range(self._shard.count)}
        prefix = f"$O.{self._bucket}.M."
        for subject in await self._subjects(prefix):
            match = _NAME.fullmatch(_decoded(subject.removeprefix(prefix)))
            if match is not None:
                sequence, incarnation, index, count = map(int, match.groups())
                found.setdefault(Shard(index, count), []).append(SnapshotId(incarnation, sequence))
        return found

    async def positions(self, snapshot: SnapshotId) -> dict[WorkerRank, int]:
        """Return the sources of a snapshot, each with the stream sequence that its state reaches.

        Raises:
            SnapshotBroken: It is not complete, or no longer there, or of a version that cannot be read.
            nats.errors.Error: The store cannot be reached; trying again may help.
        """
        name = _name(self._shard, snapshot)
        with _broken(name):
            info = await self._info(name)
            data = b""
            async with aclosing(self._chunks(info)) as chunks:
                async for chunk in chunks:
                    data += chunk
                    if len(data) >= header_bytes(data):
                        break
            return decode_positions(data[: header_bytes(data)])

    async def read(self, snapshot: SnapshotId) -> AsyncGenerator[SourceCut, None]:
        """Yield the sources of one, once all of it was verified; each is in memory alone.

        Raises:
            SnapshotBroken: It is not complete, or no longer there, or of a version that cannot be read.
            nats.errors.Error: The store cannot be reached; trying again may help.
        """
        name = _name(self._shard, snapshot)
        with _broken(name):
            info = await self._info(name)
            kept = await self._verified(name, info, keep=(info.size or 0) <= KEPT_BYTES)
            decoder = SnapshotDecoder()
            async with aclosing(_each(kept) if kept else self._chunks(info)) as chunks:
                async for chunk in chunks:
                    for cut in decoder.feed(chunk):
                        yield cut

    async def verify(self, snapshot: SnapshotId) -> None:
        """Read one back as whoever needs it will, and drop what it says.

        Raises:
            SnapshotBroken: It cannot be read.
            nats.errors.Error: The store cannot be reached.
        """
        name = _name(self._shard, snapshot)
        with _broken(name):
            await self._verified(name, await self._info(name), keep=False)

    async def _verified(self, name: str, info: ObjectInfo, *, keep: bool) -> list[bytes]:
        """Read all chunks, hashed beside the event loop; return them if they are to be kept."""
        hashed, size, kept, decoder = hashlib.sha256(), 0, [], SnapshotDecoder()
        async with aclosing(self._chunks(info)) as chunks:
            async for chunk in chunks:
                await asyncio.to_thread(hashed.update, chunk)
                size += len(chunk)
                decoder.feed(chunk)
                if keep:
                    kept.append(chunk)
        digest = "SHA-256=" + base64.urlsafe_b64encode(hashed.digest()).decode()
        if digest != info.digest or size != info.size:
            raise SnapshotBroken(f"{name} is damaged: its digest is another")
        decoder.end()
        return kept

    async def write(self, snapshot: Snapshot) -> int:
        """Store one, unless it is there, and read it back; return its size in bytes.

        Raises:
            SnapshotBroken: It is larger than what is read, or cannot be read back: then it is not there any more.
            nats.errors.Error: It cannot be stored.
        """
        name = _name(self._shard, snapshot.id)
        if (size := size_bytes(snapshot)) > MAX_SNAPSHOT_BYTES:
            raise SnapshotBroken(
                f"{name} would have {size} bytes, {MAX_SNAPSHOT_BYTES} can be read: divide the workers with --shard"
            )
        size = await self._put(name, snapshot)
        try:
            await self.verify(snapshot.id)
        except SnapshotBroken:
            # Events must not be purged because of it.
            await self.drop(self._shard, [snapshot.id])
            raise
        return size

    async def _put(self, name: str, snapshot: Snapshot) -> int:
        store = await self._store()
        try:
            return (await store.get_info(name)).size or 0
        except NotFoundError:
            pass
        options = ObjectMetaOptions(max_chunk_size=CHUNK_BYTES)
        content = _Chunks(encode(snapshot))
        info = await store.put(name, content, meta=ObjectMeta(name=name, options=options))
        return info.size or 0

    async def drop(self, shard: Shard, snapshots: Iterable[SnapshotId]) -> None:
        """Remove snapshots of a shard and every trace of them.

        Raises:
            nats.errors.Error: It cannot be done.
        """
        store = await self._js.object_store(self._bucket)
        for snapshot in snapshots:
            name = _name(shard, snapshot)
            try:
                info = await store.get_info(name)
            except NotFoundError:
                continue
            # The entry first: nobody begins to read what is going.
            await self._js.purge_stream(self._stream, subject=f"$O.{self._bucket}.M.{_encoded(name)}")
            await self._js.purge_stream(self._stream, subject=f"$O.{self._bucket}.C.{info.nuid}")

    async def sweep(self, now: float) -> int:
        """Remove the remains of uploads that were broken off; return their number.

        Args:
            now: Seconds since the Unix epoch.

        Raises:
            nats.errors.Error: It cannot be done.
        """
        store = await self._js.object_store(self._bucket)
        prefix = f"$O.{self._bucket}.M."
        entries = [_decoded(subject.removeprefix(prefix)) for subject in await self._subjects(prefix)]
        known = {(await store.get_info(name, show_deleted=True)).nuid for name in entries}
        swept = 0
        for subject in await self._subjects(f"$O.{self._bucket}.C."):
            if subject.rpartition(".")[2] in known:
                continue
            last = await self._js.get_last_msg(self._stream, subject)
            if last.time is not None and now - last.time.timestamp() > SWEEP_AFTER_SECONDS:
                await self._js.purge_stream(self._stream, subject=subject)
                swept += 1
        return swept

    async def clear(self) -> None:
        """Remove every snapshot of every shard.

        Raises:
            nats.errors.Error: It cannot be done.
        """
        try:
            await self._js.delete_object_store(self._bucket)
        except NotFoundError:
            pass

    async def _store(self) -> ObjectStore:
        try:
            return await self._js.object_store(self._bucket)
        except BucketNotFoundError:
            config = ObjectStoreConfig(description="snapshots of KV indexes", replicas=self._replicas)
            return await self._js.create_object_store(self._bucket, config=config)

    async def _subjects(self, prefix: str) -> list[str]:
        try:
            info = await self._js.stream_info(self._stream, subjects_filter=prefix + ">")
        except NotFoundError:
            return []
        return list(info.state.subjects or ())

    async def _info(self, name: str) -> ObjectInfo:
        info = await (await self._js.object_store(self._bucket)).get_info(name)
        if (info.size or 0) > MAX_SNAPSHOT_BYTES:
            raise SnapshotBroken(f"{name} has {info.size} bytes, {MAX_SNAPSHOT_BYTES} can be read")
        return info

    async def _chunks(self, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of an object, one request each: a store that lost some answers, and does not hang."""
        subject, sequence = f"$O.{self._bucket}.C.{info.nuid}", 1
        for _ in range(info.chunks or 0):
            chunk = await self._js.get_msg(self._stream, seq=sequence, subject=subject, direct=True, next=True)
            sequence = (chunk.seq or 0) + 1
            yield chunk.data or b""


async def _each(chunks: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    for chunk in chunks:
        yield chunk


@contextmanager
def _broken(name: str) -> Iterator[None]:
    """Raise `SnapshotBroken` for what shows that a snapshot cannot be read."""
    try:
        yield
    except NotFoundError as error:
        raise SnapshotBroken(f"{name} is not complete: {error}") from error
    except KvscoutError as error:
        raise SnapshotBroken(f"{name} cannot be read: {error}") from error


class _Chunks(io.BufferedIOBase):
    """A file of chunks of bytes, read once from beginning to end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # the stub's Buffer is 3.12's
        """Fill the buffer, but for the end of the file."""
        filled = 0
        while filled < len(buffer):
            if not self._left:
                self._left = memoryview(next(self._chunks, b""))
                if not self._left:
                    break
            taken = min(len(self._left), len(buffer) - filled)
            buffer[filled : filled + taken] = self._left[:taken]
            self._left = self._left[taken:]
            filled += taken
        return filled


def _name(shard: Shard, snapshot: SnapshotId) -> str:
    return f"snap-{snapshot.sequence}-{snapshot.incarnation}-{shard.index}of{shard.count}"


def _encoded(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _decoded(name: str) -> str:
    try:
        return base64.urlsafe_b64decode(name).decode()
    except ValueError:
        return ""
