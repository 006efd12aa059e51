"""The messages of one publisher, in the form in which a source takes them."""

from __future__ import annotations

from kvscout.v1 import events_pb2
from kvscout_blocks.codec import check_version, parse_batch, source_of
from kvscout_blocks.events import DecodedBatch, EventBatch
from kvscout_blocks.feed import SourceState
from kvscout_blocks.index import BlockIndex
from kvscout_blocks.native_index import decode_message
from kvscout_blocks.sequence import SequencedBatch, digest
from kvscout_common.errors import InvalidArgument
from kvscout_common.worker import PoolKey, WorkerRank

MAX_STATE_BYTES = 1024 * 1024 * 1024
"""Of one state, all chunks: ten million blocks of one rank are 210 MB."""


class PublishedReader:
    """Turns serialised `KvEventBatch`es of one worker rank into batches, and chunks into states.

    Args:
        index: Decides the form in which batches are decoded.
        rank: The source; messages of others are refused.
        pool: Its index's key.
    """

    def __init__(self, index: BlockIndex, rank: WorkerRank, pool: PoolKey) -> None:
        self._index = index
        self._source = (rank, pool)
        self._chunks: list[bytes] = []
        self._chunk_bytes = 0
        self._cut: tuple[int, int | None] | None = None
        """Epoch and last event of the state that is being read."""

    def read(self, message: bytes) -> SequencedBatch[DecodedBatch] | SourceState | None:
        """Takes the next message.

        Returns:
            A batch; the state, with its last chunk; None after a chunk that is not the last.

        Raises:
            FailedPrecondition: A version that this release cannot read.
            InvalidArgument: It is no message, another source's, or has no place in a sequence.
        """
        parsed = parse_batch(message)
        check_version(parsed)
        if source_of(parsed) != self._source:
            (worker, pool), (ours, our_pool) = source_of(parsed), self._source
            raise InvalidArgument(f"is of {worker} in {pool}, not of {ours} in {our_pool}", field="worker_id")
        if len(parsed.events) == 1 and parsed.events[0].HasField("state"):
            return self._read_chunk(message, parsed)
        if not parsed.HasField("event_id"):
            raise InvalidArgument("must be set: events have a sequence", field="event_id")
        try:
            published = decode_message(self._index, message)
        except InvalidArgument:
            return SequencedBatch(
                parsed.event_id, digest(message), EventBatch(()), len(message), epoch=parsed.epoch, malformed=True
            )
        return SequencedBatch(
            parsed.event_id,
            digest(message),
            published.batch,
            len(message),
            epoch=parsed.epoch,
            dp_rank=parsed.dp_rank,
            cleared=published.batch.cleared or published.reset,
            reset=published.reset,
        )

    def _read_chunk(self, message: bytes, parsed: events_pb2.KvEventBatch) -> SourceState | None:
        chunk = parsed.events[0].state
        cut = (parsed.epoch, parsed.event_id if parsed.HasField("event_id") else None)
        if chunk.index == 0:
            self._chunks, self._chunk_bytes, self._cut = [], 0, cut
        elif chunk.index != len(self._chunks) or cut != self._cut:
            self._cut = None
            raise InvalidArgument(f"chunk {chunk.index} where {len(self._chunks)} comes next", field="state.index")
        self._chunks.append(message)
        self._chunk_bytes += len(message)
        if self._chunk_bytes > MAX_STATE_BYTES:
            self._chunks, self._cut = [], None
            raise InvalidArgument(f"over {MAX_STATE_BYTES} bytes", field="state")
        if not chunk.last:
            return None
        chunks, self._chunks, self._cut = self._chunks, [], None
        return SourceState(*cut, chunks, chunk.history_incomplete)
