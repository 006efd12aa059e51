"""The messages of one publisher, in the form in which a source takes them."""

from __future__ import annotations

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.events import DecodedBatch, EventBatch
from kvscout_blocks.bytes.messages import check_version, parse_batch, source_of
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.decisions import SequencedBatch, digest
from kvscout_blocks.source.feed import SourceState
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.worker import PoolKey, WorkerRank

MAX_STATE_BYTES = 1024 * 1024 * 1024
"""Size of one state, all chunks: ten million blocks of one rank are 210 MB."""


class PublishedReader:
    """Turns serialised `KvEventBatch`es of one worker rank into batches, and chunks into states.

    Batches may come between the chunks of a state; a state whose chunks are not all there, in order, is none.

    Args:
        index: Decides the form in which batches are decoded.
        rank: The source; messages of others are refused.
        pool: Its index's key.
    """

    def __init__(self, index: BlockIndex, rank: WorkerRank, pool: PoolKey) -> None:
        self._index = index
        self._rank = rank
        self._pool = pool
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._cut: tuple[int, int | None] | None = None
        """Epoch and last event of the state that is being read."""

    @property
    def amid_state(self) -> bool:
        """Return whether chunks wait for the rest of their state."""
        return self._cut is not None

    def read(self, message: bytes) -> SequencedBatch[DecodedBatch] | SourceState | None:
        """Take the next message.

        Returns:
            A batch; the state, with its last chunk; None after a chunk that is not the last.

        Raises:
            FailedPrecondition: A version that this release cannot read, or another model, block size or EAGLE than
                registered: nothing of this publisher can be read until one of the two changes.
            InvalidArgument: It is no message, another worker's, or has no place in a sequence.
        """
        try:
            published = self._index.decode_message(message)
        except InvalidArgument:
            return self._read_other(message)
        self._check(published.worker, published.pool)
        if published.event_id is None:
            raise InvalidArgument("must be set: events have a sequence", field="event_id")
        return SequencedBatch(
            published.event_id,
            digest(message),
            published.batch,
            len(message),
            epoch=published.epoch,
            dp_rank=published.worker.dp_rank,
            cleared=published.batch.cleared or published.reset,
            reset=published.reset,
        )

    def _read_other(self, message: bytes) -> SequencedBatch[DecodedBatch] | SourceState | None:
        """Read a message that has no events: a state chunk, or one that cannot be read but may have a number."""
        parsed = parse_batch(message)
        check_version(parsed)
        self._check(*source_of(parsed))
        if len(parsed.events) == 1 and parsed.events[0].HasField("state"):
            return self._read_chunk(message, parsed)
        if not parsed.HasField("event_id"):
            raise InvalidArgument("must be set: events have a sequence", field="event_id")
        return SequencedBatch(
            parsed.event_id, digest(message), EventBatch(()), len(message), epoch=parsed.epoch, malformed=True
        )

    def _check(self, rank: WorkerRank, pool: PoolKey) -> None:
        if rank != self._rank or pool.tenant != self._pool.tenant:
            ours = f"{self._rank.worker_id}/{self._rank.dp_rank} of {self._pool.tenant}"
            raise InvalidArgument(
                f"is of {rank.worker_id}/{rank.dp_rank} of {pool.tenant}, not of {ours}", field="worker_id"
            )
        if pool != self._pool:
            raise FailedPrecondition(f"its publisher has {_blocks(pool)}, the registration {_blocks(self._pool)}")

    def _read_chunk(self, message: bytes, parsed: events_pb2.KvEventBatch) -> SourceState | None:
        chunk = parsed.events[0].state
        cut = (parsed.epoch, parsed.event_id if parsed.HasField("event_id") else None)
        if chunk.index == 0:
            self._chunks, self._chunk_bytes, self._cut = [], 0, cut
        elif chunk.index != len(self._chunks) or cut != self._cut:
            expected = len(self._chunks)
            self._drop_chunks()
            raise InvalidArgument(f"chunk {chunk.index} of {cut} where {expected} comes next", field="state.index")
        self._chunks.append(message)
        self._chunk_bytes += len(message)
        if self._chunk_bytes > MAX_STATE_BYTES:
            self._drop_chunks()
            raise InvalidArgument(f"over {MAX_STATE_BYTES} bytes", field="state")
        if not chunk.last:
            return None
        chunks = self._chunks
        self._drop_chunks()
        last_digest = parsed.last_digest if parsed.HasField("last_digest") else None
        return SourceState(*cut, chunks, chunk.history_incomplete, last_digest)

    def _drop_chunks(self) -> None:
        self._chunks, self._chunk_bytes, self._cut = [], 0, None


def with_last_digest(message: bytes, last_digest: int) -> bytes:
    """Return a serialised state chunk that also has the digest of the last batch contained."""
    return message + events_pb2.KvEventBatch(last_digest=last_digest).SerializeToString()


def _blocks(pool: PoolKey) -> str:
    return f"blocks of {pool.block_size} tokens of {pool.model!r}{' (eagle)' if pool.eagle else ''}"
