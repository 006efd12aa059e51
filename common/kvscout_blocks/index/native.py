"""The native twin of `reference`: translates between Python values and the extension's columns.

`twins.make_index` takes it where the extension is built, else the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.codec import MAX_CHUNK_BYTES, Published
from kvscout_blocks.bytes.dump import Copies, DumpedBlock, DumpedOrphan, DumpedWindowBlock, WindowGroup, WorkerDump
from kvscout_blocks.bytes.events import DecodedBatch, EventBatch, Tier
from kvscout_blocks.index.block_index import (
    DEFAULT_MAX_PREDICTED_BLOCKS,
    DEFAULT_PRUNE_RATIO,
    Applied,
    BlockIndex,
    IndexStats,
    Overlaps,
    WorkerOptions,
    WorkerStats,
    require_limits,
)
from kvscout_blocks.index.slices import at_once
from kvscout_common.errors import FailedPrecondition
from kvscout_common.hashing import native_available
from kvscout_common.worker import DEFAULT_TENANT, CopyMode, PoolKey, WorkerRank

if TYPE_CHECKING or native_available():
    import kvscout_native


class NativeIndex:
    """`index.BlockIndex` in Rust; see there for what each method does, and for the arguments.

    Raises:
        InvalidArgument: A value is out of range.
    """

    def __init__(
        self,
        block_size: int,
        eagle: bool = False,
        *,
        max_blocks: int = 0,
        max_predicted_blocks: int = DEFAULT_MAX_PREDICTED_BLOCKS,
        prune_ratio: float = DEFAULT_PRUNE_RATIO,
    ) -> None:
        require_limits(block_size, max_blocks, max_predicted_blocks, prune_ratio)
        self._index = kvscout_native.BlockIndex(block_size, eagle, max_blocks, max_predicted_blocks, prune_ratio)

    @property
    def core(self) -> kvscout_native.BlockIndex:
        """The extension's own object."""
        return self._index

    def add_worker(self, worker: WorkerRank, options: WorkerOptions) -> None:
        """See `BlockIndex.add_worker`."""
        self._index.add_worker(worker, options.copies is CopyMode.SET, dict(options.adapters), options.total_kv_blocks)

    def remove_worker(self, worker_id: str) -> int:
        """See `BlockIndex.remove_worker`."""
        ranks = [worker for worker in self.workers() if worker.worker_id == worker_id]
        return sum(self.remove_rank(worker) for worker in ranks)

    def remove_rank(self, worker: WorkerRank) -> bool:
        """See `BlockIndex.remove_rank`."""
        return self._index.remove_rank(worker)

    def reset(self, worker: WorkerRank) -> None:
        """See `BlockIndex.reset`."""
        self._index.reset(worker)

    def demote(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> int:
        """See `BlockIndex.demote`."""
        demotion = NativeDemotion(self._index, worker, ttl_seconds, now)
        at_once(demotion)
        return demotion.added

    def demotion(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> NativeDemotion:
        """See `BlockIndex.demotion`."""
        return NativeDemotion(self._index, worker, ttl_seconds, now)

    def apply(self, worker: WorkerRank, batch: EventBatch, *, epoch: int = 0, event_id: int | None = None) -> Applied:
        """See `BlockIndex.apply`."""
        return Applied(*self._index.apply(worker, batch.events, len(batch.faults), epoch, event_id))

    def apply_payload(
        self, worker: WorkerRank, payload: bytes, *, epoch: int = 0, event_id: int | None = None
    ) -> Applied:
        """See `BlockIndex.apply_payload`."""
        return Applied(*self._index.apply_payload(worker, payload, epoch, event_id))

    def decode(self, payload: bytes) -> kvscout_native.Batch:
        """See `twins.decode_for`."""
        return kvscout_native.Batch(payload)

    def decode_message(self, message: bytes) -> Published:
        """See `twins.decode_message`."""
        worker, identity, epoch, event_id, reset, batch = kvscout_native.decode_events(message)
        tenant, model, block_size, eagle = identity
        pool = PoolKey(model, tenant or DEFAULT_TENANT, block_size, eagle)
        return Published(WorkerRank(*worker), pool, epoch, event_id, reset, batch)

    def apply_decoded(self, worker: WorkerRank, batch: DecodedBatch, *, epoch: int, event_id: int | None) -> Applied:
        """See `twins.apply_decoded`."""
        assert isinstance(batch, kvscout_native.Batch)
        return Applied(*kvscout_native.apply_batch(self._index, worker, batch, epoch, event_id))

    def predict(
        self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, ttl_seconds: float, now: float
    ) -> int:
        """See `BlockIndex.predict`."""
        return self._index.predict(worker, block_hashes, ttl_seconds, now)

    def find_matches(
        self, block_hashes: Sequence[int] | bytes, *, now: float, early_exit: bool = False, usable: int | None = None
    ) -> Overlaps:
        """See `BlockIndex.find_matches`."""
        return Overlaps._make(self._index.find_matches(block_hashes, now, early_exit, usable))

    def incomplete(self) -> frozenset[WorkerRank]:
        """See `BlockIndex.incomplete`."""
        return frozenset(WorkerRank(*worker) for worker in self._index.incomplete())

    def maintain(self, *, now: float, budget: int = 4096) -> bool:
        """See `BlockIndex.maintain`."""
        return self._index.maintain(now, budget)

    def dump(self, worker: WorkerRank) -> WorkerDump | None:
        """See `BlockIndex.dump`."""
        cut = self.cut(worker)
        return cut.dump() if cut is not None else None

    def cut(self, worker: WorkerRank) -> NativeCut | None:
        """See `BlockIndex.cut`."""
        cut = kvscout_native.Cut.begin(self._index, worker)
        return NativeCut(worker, cut) if cut is not None else None

    def load(self, dump: WorkerDump) -> None:
        """See `BlockIndex.load`."""
        self.loading(dump).finish()

    def loading(self, dump: WorkerDump) -> NativeLoading:
        """See `BlockIndex.loading`."""
        return NativeLoading(
            lambda: kvscout_native.Loading.of_dump(
                self._index,
                dump.worker,
                dump.epoch,
                dump.last_event_id,
                dump.groups,
                dump.blocks,
                dump.orphans,
                dump.incompatible,
                dump.windows,
                dump.window_blocks,
                dump.incomplete,
            )
        )

    def dump_messages(
        self, worker: WorkerRank, pool: PoolKey, *, history_incomplete: bool, epoch: int | None = None
    ) -> list[bytes] | None:
        """The serialised messages of `codec.encode_dump`, without a Python object a block; None if it is not known.

        `epoch` is written in place of the index's own.
        """
        cut = self.cut(worker)
        return cut.messages(pool, history_incomplete=history_incomplete, epoch=epoch) if cut is not None else None

    def load_messages(self, messages: Sequence[bytes]) -> tuple[WorkerRank, PoolKey, bool]:
        """Reads and loads the messages of a dump, as `codec.DumpReader` and `load` do.

        Returns:
            Whose state it is, of which pool, and whether its history is incomplete.

        Raises:
            FailedPrecondition: A version that this release cannot read.
            NotFound: The worker is not known.
            InvalidArgument: The messages are no dump, or contradict themselves; nothing changed.
        """
        loaded = self.loading_messages(messages).finish()
        tenant, model, block_size, eagle = loaded.pool or ("", "", 0, False)
        return WorkerRank(*loaded.worker), PoolKey(model, tenant, block_size, eagle), loaded.history_incomplete

    def loading_messages(self, messages: Sequence[bytes]) -> NativeLoading:
        """`load_messages` in slices; see `BlockIndex.loading`."""
        return NativeLoading(lambda: kvscout_native.Loading.of_messages(self._index, messages))

    def workers(self) -> tuple[WorkerRank, ...]:
        """See `BlockIndex.workers`."""
        return tuple(WorkerRank(*worker) for worker in self._index.workers())

    def cursor(self, worker: WorkerRank) -> tuple[int, int | None] | None:
        """See `BlockIndex.cursor`."""
        return self._index.cursor(worker)

    def worker_stats(self, worker: WorkerRank) -> WorkerStats | None:
        """See `BlockIndex.worker_stats`."""
        stats = self._index.worker_stats(worker)
        if stats is None:
            return None
        ignored = {reason: count for reason, count in zip(Ignored, stats[-1], strict=True) if count}
        return WorkerStats(*stats[:-1], ignored)

    def stats(self) -> IndexStats:
        """See `BlockIndex.stats`."""
        return IndexStats(*self._index.stats())

    def check_invariants(self) -> None:
        """See `BlockIndex.check_invariants`."""
        self._index.check_invariants()


class NativeDemotion:
    """A `slices.Work`: `BlockIndex.demotion`."""

    detached = True

    def __init__(self, index: kvscout_native.BlockIndex, worker: WorkerRank, ttl_seconds: float, now: float) -> None:
        self.added = 0
        """Blocks that are predicted and were not before."""
        self._index = index
        self._worker = worker
        index.begin_demotion(worker, ttl_seconds, now)

    def step(self) -> bool:
        """See `Work.step`."""
        added = self._index.go_on_demoting(self._worker)
        self.added += added or 0
        return added is not None


class NativeCut:
    """See `index.Cut`."""

    detached = True

    def __init__(self, worker: WorkerRank, cut: kvscout_native.Cut) -> None:
        self._worker = worker
        self._cut = cut

    def step(self) -> bool:
        """See `Work.step`."""
        return self._cut.step()

    def dump(self) -> WorkerDump | None:
        """See `Cut.dump`."""
        dump = self._cut.dump()
        if dump is None:
            return None
        epoch, last_event_id, groups, blocks, orphans, incompatible, windows, window_blocks, incomplete = dump
        return WorkerDump(
            self._worker,
            epoch,
            last_event_id,
            tuple(groups),
            tuple(DumpedBlock(engine, parent, local, _copies(copies)) for engine, parent, local, copies in blocks),
            tuple(DumpedOrphan(engine, parent, local, _copies(copies)) for engine, parent, local, copies in orphans),
            incompatible,
            tuple(WindowGroup(*group) for group in windows),
            tuple(
                DumpedWindowBlock(engine, sequence_hash, _copies(copies))
                for engine, sequence_hash, copies in window_blocks
            ),
            incomplete,
        )

    def messages(self, pool: PoolKey, *, history_incomplete: bool, epoch: int | None = None) -> list[bytes] | None:
        """What `dump` says as serialised messages; see `NativeIndex.dump_messages`."""
        identity = (pool.tenant, pool.model, pool.block_size, pool.eagle)
        if not self._cut.encode(identity, history_incomplete, MAX_CHUNK_BYTES, epoch):
            return None
        # One by one: copying all of them at once would hold the interpreter for long.
        return list(iter(self._cut.next_message, None))


class NativeLoading:
    """See `index.Loading`.

    Args:
        begin: Reads the dump and begins; called by the first slice.
    """

    detached = True

    def __init__(self, begin: Callable[[], kvscout_native.Loading]) -> None:
        self._begin = begin
        self._loading: kvscout_native.Loading | None = None
        self._abandoned = False

    def step(self) -> bool:
        """See `Work.step`."""
        if self._abandoned:
            return False
        if self._loading is None:
            self._loading = self._begin()
        return self._loading.step()

    def commit(self) -> bool:
        """See `Loading.commit`."""
        return self._loading is not None and self._loading.commit()

    def abandon(self) -> None:
        """See `Loading.abandon`."""
        self._abandoned = True
        self._loading = None

    def finish(self) -> kvscout_native.Loading:
        """Does all of it at once; what was loaded.

        Raises:
            FailedPrecondition: The worker was reset or removed meanwhile, or there is no room.
        """
        at_once(self)
        assert self._loading is not None
        if not self._loading.commit():
            raise FailedPrecondition("the worker was reset or removed meanwhile")
        return self._loading


class NativeQueries:
    """`FindMatches` and `StreamFindMatches` from bytes to bytes; None leaves a request to the plain path."""

    def __init__(self) -> None:
        self._queries = kvscout_native.Queries()

    def set_pool(self, pool: PoolKey, index: BlockIndex) -> None:
        """Makes a native index reachable; others are left to the plain path."""
        if isinstance(index, NativeIndex):
            self._queries.set_pool(pool.tenant, pool.model, pool.block_size, pool.eagle, index.core)

    def remove_pool(self, pool: PoolKey) -> None:
        """Makes an index unreachable."""
        self._queries.remove_pool(pool.tenant, pool.model, pool.block_size, pool.eagle)

    def set_incomplete(self, pool: PoolKey, ranks: Sequence[WorkerRank]) -> None:
        """Says which ranks of a pool have an incomplete history."""
        self._queries.set_incomplete(pool.tenant, pool.model, pool.block_size, pool.eagle, ranks)

    @property
    def answers(self) -> kvscout_native.Answers:
        """`answer` for whoever asks without Python."""
        return self._queries.answers()

    @property
    def stream_answers(self) -> kvscout_native.Answers:
        """`answer_stream` for whoever asks without Python."""
        return self._queries.stream_answers()

    def answer(self, request: bytes, *, now: float, caller_tenant: str) -> bytes | None:
        """Answers a `FindMatchesRequest`.

        Args:
            request: As it came.
            now: The index's clock.
            caller_tenant: Tenant that the caller is bound to; "*" = all.
        """
        return self._queries.answer(request, now, caller_tenant)

    def answer_stream(self, message: bytes, *, now: float, caller_tenant: str) -> bytes | None:
        """Answers a `StreamFindMatchesRequest`; arguments as of `answer`."""
        return self._queries.answer_stream(message, now, caller_tenant)


def encode_decoded(
    worker: WorkerRank,
    pool: PoolKey,
    adapters: Mapping[int, str],
    batch: DecodedBatch,
    *,
    epoch: int,
    event_id: int | None,
) -> bytes:
    """See `twins.encode_batch`."""
    assert isinstance(batch, kvscout_native.Batch)
    identity = (pool.tenant, pool.model, pool.block_size, pool.eagle)
    return kvscout_native.encode_events(batch, worker, identity, list(adapters.items()), epoch, event_id)


def make_bypass(index: BlockIndex, worker: WorkerRank) -> kvscout_native.Bypass | None:
    """What applies a rank's usual batches to a native index; None: the index is another."""
    return kvscout_native.Bypass(index.core, worker) if isinstance(index, NativeIndex) else None


def make_intake_thread() -> kvscout_native.Intake | None:
    """A thread that reads engines' sockets; None where the extension is not built, or switched off."""
    return kvscout_native.Intake() if native_available() else None


def _copies(copies: Sequence[tuple[int, int, int]]) -> tuple[Copies, ...]:
    return tuple(Copies(group, Tier(tier), number) for group, tier, number in copies)
