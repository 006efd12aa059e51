"""What works with either twin of the index: which one is made, and in which form each takes batches and states."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvscout_blocks.bytes.codec import (
    DumpReader,
    Published,
    decode_events,
    encode_dump,
    encode_events,
    parse_batch,
    source_of,
)
from kvscout_blocks.bytes.events import DecodedBatch, EventBatch
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.block_index import (
    DEFAULT_MAX_PREDICTED_BLOCKS,
    DEFAULT_PRUNE_RATIO,
    Applied,
    BlockIndex,
    Cut,
    Loading,
)
from kvscout_blocks.index.native import NativeCut, NativeIndex, NativeQueries, encode_decoded
from kvscout_blocks.index.reference import ReferenceIndex
from kvscout_blocks.index.slices import at_once, in_slices
from kvscout_common.errors import FailedPrecondition, InvalidArgument, NotFound
from kvscout_common.hashing import native_available
from kvscout_common.worker import PoolKey, WorkerRank


def decode_for(index: BlockIndex, payload: bytes) -> DecodedBatch:
    """Decodes an engine's payload into the form that suits an index; `apply_decoded` takes it.

    Raises:
        MalformedBatch: As `wire.decode_batch`.
    """
    return index.decode(payload) if isinstance(index, NativeIndex) else decode_batch(payload)


def decode_message(index: BlockIndex, message: bytes) -> Published:
    """Reads a serialised `KvEventBatch` of events into the form that suits an index; `apply_decoded` takes its batch.

    Raises:
        FailedPrecondition: If its version cannot be read.
        InvalidArgument: If it is no such message; see `codec.decode_events`.
    """
    return index.decode_message(message) if isinstance(index, NativeIndex) else decode_events(parse_batch(message))


def apply_decoded(
    index: BlockIndex, worker: WorkerRank, batch: DecodedBatch, *, epoch: int, event_id: int | None
) -> Applied:
    """`BlockIndex.apply` for what `decode_for` returned for the same index."""
    if isinstance(batch, EventBatch):
        return index.apply(worker, batch, epoch=epoch, event_id=event_id)
    assert isinstance(index, NativeIndex)
    return index.apply_decoded(worker, batch, epoch=epoch, event_id=event_id)


def encode_batch(
    worker: WorkerRank,
    pool: PoolKey,
    adapters: Mapping[int, str],
    batch: DecodedBatch,
    *,
    epoch: int,
    event_id: int | None,
) -> bytes:
    """The serialised message of `codec.encode_events`, of what `decode_for` or `decode_message` returned."""
    if isinstance(batch, EventBatch):
        return encode_events(pool, adapters, worker, batch, epoch=epoch, event_id=event_id).SerializeToString()
    return encode_decoded(worker, pool, adapters, batch, epoch=epoch, event_id=event_id)


def state_messages(
    index: BlockIndex, worker: WorkerRank, pool: PoolKey, *, history_incomplete: bool, epoch: int
) -> list[bytes]:
    """One consistent cut of a worker rank as serialised messages, under a publisher's epoch.

    Raises:
        NotFound: The worker is not known.
    """
    if isinstance(index, NativeIndex):
        messages = index.dump_messages(worker, pool, history_incomplete=history_incomplete, epoch=epoch)
    else:
        dump = index.dump(worker)
        messages = None
        if dump is not None:
            dump = replace(dump, epoch=epoch)
            encoded = encode_dump(pool, dump, history_incomplete=history_incomplete)
            messages = [message.SerializeToString() for message in encoded]
    if messages is None:
        raise NotFound(f"worker {worker.worker_id} rank {worker.dp_rank} is not known")
    return messages


async def cut_messages(cut: Cut, pool: PoolKey, *, history_incomplete: bool, epoch: int | None) -> list[bytes] | None:
    """A cut as serialised messages, without holding the event loop up; None: its worker was reset meanwhile.

    Args:
        cut: Complete or not.
        pool: The index it is from.
        history_incomplete: Whether events before the cut may be missing.
        epoch: Written in place of the index's own; None = that.
    """
    await in_slices(cut)
    if isinstance(cut, NativeCut):
        return await asyncio.to_thread(cut.messages, pool, history_incomplete=history_incomplete, epoch=epoch)
    dump = cut.dump()
    if dump is None:
        return None
    if epoch is not None:
        dump = replace(dump, epoch=epoch)
    messages = []
    for message in encode_dump(pool, dump, history_incomplete=history_incomplete):
        messages.append(message.SerializeToString())
        await asyncio.sleep(0)
    return messages


def loading_state(index: BlockIndex, worker: WorkerRank, pool: PoolKey, messages: Sequence[bytes]) -> Loading:
    """Replaces what events said of a worker rank by a dump, from its serialised messages, in slices.

    Raises:
        InvalidArgument: They are another rank's or pool's.
    """
    first = parse_batch(messages[0]) if messages else None
    if first is None or source_of(first) != (worker, pool):
        raise InvalidArgument(f"is no state of worker {worker.worker_id}/{worker.dp_rank}", field="events")
    if isinstance(index, NativeIndex):
        return index.loading_messages(messages)
    return LoadingMessages(index, messages)


def load_state(index: BlockIndex, worker: WorkerRank, pool: PoolKey, messages: Sequence[bytes]) -> None:
    """`loading_state` at once.

    Raises:
        FailedPrecondition: A version that this release cannot read.
        InvalidArgument: They are another rank's or pool's, no dump, or contradict themselves; nothing changed.
        NotFound: The worker is not known.
    """
    loading = loading_state(index, worker, pool, messages)
    at_once(loading)
    if not loading.commit():
        raise FailedPrecondition("the worker was reset or removed meanwhile")


class LoadingMessages:
    """`index.Loading` of the messages of a dump, a message a slice."""

    detached = False

    def __init__(self, index: BlockIndex, messages: Sequence[bytes]) -> None:
        self._index = index
        self._reader = DumpReader()
        self._messages = list(reversed(messages))
        self._loading: Loading | None = None

    def step(self) -> bool:
        """See `Work.step`."""
        if self._loading is not None:
            return self._loading.step()
        dumped = self._reader.feed(parse_batch(self._messages.pop()))
        if dumped is not None and not self._messages:
            self._loading = self._index.loading(dumped.dump)
        elif not self._messages:
            raise InvalidArgument("the last chunk is missing", field="state")
        return True

    def commit(self) -> bool:
        """See `Loading.commit`."""
        return self._loading is not None and self._loading.commit()

    def abandon(self) -> None:
        """See `Loading.abandon`."""
        if self._loading is not None:
            self._loading.abandon()


def make_queries() -> NativeQueries | None:
    """The native query path, where the extension is built and not switched off."""
    return NativeQueries() if native_available() else None


def make_index(
    block_size: int,
    eagle: bool = False,
    *,
    max_blocks: int = 0,
    max_predicted_blocks: int = DEFAULT_MAX_PREDICTED_BLOCKS,
    prune_ratio: float = DEFAULT_PRUNE_RATIO,
) -> BlockIndex:
    """An empty index: native where the extension is built and not switched off, else the reference."""
    kind = NativeIndex if native_available() else ReferenceIndex
    return kind(
        block_size,
        eagle,
        max_blocks=max_blocks,
        max_predicted_blocks=max_predicted_blocks,
        prune_ratio=prune_ratio,
    )
