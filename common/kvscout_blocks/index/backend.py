"""The choice of the block index's backend: the extension where it is built and not switched off, else the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.bytes.messages import parse_batch, source_of
from kvscout_blocks.index.block_index import BlockIndex, Loading
from kvscout_blocks.index.native import NativeIndex, NativeQueries
from kvscout_blocks.index.native import encode_batch as encode_native
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

if TYPE_CHECKING or not native_available():
    from kvscout_blocks.index.reference import ReferenceIndex
    from kvscout_blocks.index.reference import encode_batch as encode_reference


make_index: type[BlockIndex] = NativeIndex if native_available() else ReferenceIndex
"""Makes an empty index of this process's backend; see `BlockIndex` for the arguments."""


def make_queries() -> NativeQueries | None:
    """Make the native query path; None where there is no extension."""
    return NativeQueries() if native_available() else None


def encode_batch(
    worker: WorkerRank,
    pool: PoolKey,
    adapters: Mapping[int, str],
    batch: DecodedBatch,
    *,
    epoch: int,
    event_id: int | None,
) -> bytes:
    """Encode a batch as a serialised `KvEventBatch`, with local hashes in place of tokens.

    A reader's index does with it what it would have done with the engine's own bytes: what cannot be indexed is sent
    without its hashes, as it still teaches the kind of its group; full blocks of another size are told by that size.

    Args:
        worker: The source.
        pool: The index it belongs to.
        adapters: LoRA number → adapter name, as registered.
        batch: What an index of this process decoded, or an `EventBatch`; what could not be read is left out.
        epoch: Incarnation of the engine.
        event_id: The engine's number of the batch.
    """
    encode = encode_native if native_available() else encode_reference
    return encode(worker, pool, adapters, batch, epoch=epoch, event_id=event_id)


def loading_state(index: BlockIndex, worker: WorkerRank, pool: PoolKey, messages: Sequence[bytes]) -> Loading:
    """Begin to replace what events said of a worker rank by a dump, from its serialised messages.

    Raises:
        InvalidArgument: They are another rank's or pool's.
    """
    first = parse_batch(messages[0]) if messages else None
    if first is None or source_of(first) != (worker, pool):
        raise InvalidArgument(f"is no state of worker {worker.worker_id}/{worker.dp_rank}", field="events")
    return index.loading_messages(messages)
