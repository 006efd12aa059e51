"""The choice of the block index's backend: the extension where it is built and not switched off, else the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvscout_blocks.bytes.messages import parse_batch, source_of
from kvscout_blocks.index.block_index import BlockIndex, Loading
from kvscout_blocks.index.native import NativeIndex, NativeQueries
from kvscout_common.errors import InvalidArgument
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank

if TYPE_CHECKING or not native_available():
    from kvscout_blocks.index.reference import ReferenceIndex


make_index: type[BlockIndex] = NativeIndex if native_available() else ReferenceIndex
"""Makes an empty index of this process's backend; see `BlockIndex` for the arguments."""

encode_batch = make_index.encode_batch
"""Encodes a batch as a serialised `KvEventBatch`; see `BlockIndex`."""


def make_queries() -> NativeQueries | None:
    """Make the native query path; None where there is no extension."""
    return NativeQueries() if native_available() else None


def loading_state(index: BlockIndex, worker: WorkerRank, pool: PoolKey, messages: Sequence[bytes]) -> Loading:
    """Begin to replace what events said of a worker rank by a dump, from its serialised messages.

    Raises:
        InvalidArgument: They are another rank's or pool's.
    """
    first = parse_batch(messages[0]) if messages else None
    if first is None or source_of(first) != (worker, pool):
        raise InvalidArgument(f"is not a state of worker {worker.worker_id}/{worker.dp_rank}", field="events")
    return index.loading_messages(messages)
