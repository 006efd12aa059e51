"""One snapshot: what it contains, and its bytes; pure.

::

    u32 length, SnapshotHeader │ u32 length, KvEventBatch │ u32 length, KvEventBatch │ ...
                                 └───── messages of source 0 ─────┘ └─ of source 1 ...

Its sources may be cut one after another while events go on. That is correct, because the messages of one source
say nothing of another: each source has the stream sequence P that its own state reaches, S is the lowest of these, and
a reader goes on at S + 1 but leaves out what is of a source at or below its P. So each message is applied exactly once,
as if all sources had been cut at the same moment. Event ids at or below a state's cursor are dropped beyond that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvscout.v1 import snapshots_pb2
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.worker import WorkerRank
from kvscout_indexer.streams.position import SnapshotId

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Of one message, or of the header: a million sources."""
VERSION: Final = 1
"""Version of the header; readers take this one and the one before."""
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class SourceCut:
    """One source's part of a snapshot."""

    worker: WorkerRank
    position: int
    """P: stream sequence up to which its messages are contained."""
    messages: Sequence[bytes]
    """Serialised `KvEventBatch`es of its state chunks."""
    unverified: bool = False
    """Events were missed and were not requested from the publisher yet."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of every source of a stream."""

    id: SnapshotId
    cut_at: float
    """Seconds since the Unix epoch."""
    sources: Sequence[SourceCut]


def encode(snapshot: Snapshot) -> Iterator[bytes]:
    """Return the snapshot's bytes, chunk by chunk."""
    header = snapshots_pb2.SnapshotHeader(
        version=VERSION,
        stream_sequence=snapshot.id.sequence,
        stream_incarnation=snapshot.id.incarnation,
        cut_at=snapshot.cut_at,
        sources=[
            snapshots_pb2.SnapshotSource(
                worker_id=cut.worker.worker_id,
                dp_rank=cut.worker.dp_rank,
                stream_sequence=cut.position,
                messages=len(cut.messages),
                unverified=cut.unverified,
            )
            for cut in snapshot.sources
        ],
    )
    for message in (header.SerializeToString(), *(m for cut in snapshot.sources for m in cut.messages)):
        yield _LENGTH.pack(len(message))
        yield message


def size_bytes(snapshot: Snapshot) -> int:
    """Return the size of the snapshot's messages, which is nearly that of the whole."""
    return sum(_LENGTH.size + len(message) for cut in snapshot.sources for message in cut.messages)


class SnapshotDecoder:
    """Reads a snapshot in chunks of any size, and keeps no more of it than the source that is not complete."""

    def __init__(self) -> None:
        self._left = bytearray()
        self._header: snapshots_pb2.SnapshotHeader | None = None
        self._sources = 0
        """Sources that are complete."""
        self._messages: list[bytes] = []
        """Of the source that is not."""

    def feed(self, data: bytes) -> list[SourceCut]:
        """Take the next bytes; return the sources that they complete.

        Raises:
            FailedPrecondition: A version that this release cannot read.
            InvalidArgument: The bytes are none.
        """
        self._left += data
        complete: list[SourceCut] = []
        at = 0
        while len(self._left) >= at + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._left, at)
            if length > MAX_MESSAGE_BYTES:
                raise InvalidArgument(f"has a message of {length} bytes, {MAX_MESSAGE_BYTES} at most", field="snapshot")
            end = at + _LENGTH.size + length
            if len(self._left) < end:
                break
            self._take(bytes(self._left[at + _LENGTH.size : end]))
            complete += self._completed()
            at = end
        del self._left[:at]
        return complete

    def end(self) -> None:
        """Note that these were all bytes.

        Raises:
            InvalidArgument: More were announced.
        """
        if self._header is None or self._left or self._sources < len(self._header.sources):
            raise InvalidArgument("ends before all its sources came", field="snapshot")

    def _take(self, message: bytes) -> None:
        if self._header is None:
            self._header = _header(message)
        elif self._sources == len(self._header.sources):
            raise InvalidArgument("has more messages than its sources", field="snapshot")
        else:
            self._messages.append(message)

    def _completed(self) -> Iterator[SourceCut]:
        assert self._header is not None
        while self._sources < len(self._header.sources):
            source = self._header.sources[self._sources]
            if len(self._messages) < source.messages:
                return
            worker = WorkerRank(source.worker_id, source.dp_rank)
            yield SourceCut(worker, source.stream_sequence, tuple(self._messages), source.unverified)
            self._sources += 1
            self._messages = []


def header_bytes(data: bytes) -> int:
    """Return the length of a snapshot's header in bytes, from the first bytes of the snapshot."""
    return _LENGTH.size + _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else _LENGTH.size


def decode_positions(data: bytes) -> dict[WorkerRank, int]:
    """Return the sources of a snapshot, from its header: the stream sequence that each one's state reaches.

    Raises:
        FailedPrecondition: A version that this release cannot read.
        InvalidArgument: The bytes are none.
    """
    sources = _header(next(_messages(data), b"")).sources
    return {WorkerRank(source.worker_id, source.dp_rank): source.stream_sequence for source in sources}


def _header(message: bytes) -> snapshots_pb2.SnapshotHeader:
    try:
        header = snapshots_pb2.SnapshotHeader.FromString(message)
    except DecodeError as error:
        raise InvalidArgument("has no header", field="snapshot") from error
    if not max(1, VERSION - 1) <= header.version <= VERSION:
        raise FailedPrecondition(f"version {header.version} of a snapshot, this release reads {VERSION}")
    return header


def _messages(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise InvalidArgument("ends within a length", field="snapshot")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise InvalidArgument("ends within a message", field="snapshot")
        yield data[at : at + length]
        at += length
