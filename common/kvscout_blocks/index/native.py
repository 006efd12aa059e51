"""The native backend of the block index: translates between Python values and the extension's columns.

`block_index.BlockIndex` documents the methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.dump import Copies, DumpedBlock, DumpedOrphan, DumpedWindowBlock, WindowGroup, WorkerDump
from kvscout_blocks.bytes.events import DecodedBatch, EventBatch, Tier
from kvscout_blocks.bytes.messages import MAX_CHUNK_BYTES, Published
from kvscout_blocks.index.block_index import (
    Applied,
    BlockIndex,
    Cut,
    Demotion,
    IndexStats,
    Loading,
    Overlaps,
    SharedCacheStats,
    WorkerOptions,
    WorkerStats,
)
from kvscout_common.hashing import native_available
from kvscout_common.rank_sets import RankSet
from kvscout_common.worker import DEFAULT_TENANT, CopyMode, PoolKey, WorkerRank

if TYPE_CHECKING or native_available():
    import kvscout_native


class NativeIndex(BlockIndex):
    """The block index in Rust."""

    def _begin(self) -> None:
        self.core = kvscout_native.BlockIndex(
            self.block_size, self.eagle, self.max_blocks, self.max_predicted_blocks, self.prune_ratio
        )
        """The extension's own object."""

    def add_worker(self, worker: WorkerRank, options: WorkerOptions) -> None:
        self.core.add_worker(
            worker, options.copies is CopyMode.SET, dict(options.adapters), options.total_kv_blocks, options.shared
        )

    def remove_rank(self, worker: WorkerRank) -> bool:
        return self.core.remove_rank(worker)

    def reset(self, worker: WorkerRank) -> None:
        self.core.reset(worker)

    def workers(self) -> tuple[WorkerRank, ...]:
        return tuple(WorkerRank(*worker) for worker in self.core.workers())

    def cursor(self, worker: WorkerRank) -> tuple[int, int | None] | None:
        return self.core.cursor(worker)

    def decode(self, payload: bytes) -> kvscout_native.Batch:
        return kvscout_native.Batch(payload)

    def decode_message(self, message: bytes) -> Published:
        worker, identity, epoch, event_id, reset, batch = kvscout_native.decode_events(message)
        tenant, model, block_size, eagle = identity
        pool = PoolKey(model, tenant or DEFAULT_TENANT, block_size, eagle)
        return Published(WorkerRank(*worker), pool, epoch, event_id, reset, batch)

    def apply(self, worker: WorkerRank, batch: DecodedBatch, *, epoch: int = 0, event_id: int | None = None) -> Applied:
        return Applied(*kvscout_native.apply_batch(self.core, worker, _native(batch), epoch, event_id))

    def apply_payload(
        self, worker: WorkerRank, payload: bytes, *, epoch: int = 0, event_id: int | None = None
    ) -> Applied:
        return Applied(*self.core.apply_payload(worker, payload, epoch, event_id))

    @staticmethod
    def encode_batch(
        worker: WorkerRank,
        pool: PoolKey,
        adapters: Mapping[int, str],
        batch: DecodedBatch,
        *,
        epoch: int,
        event_id: int | None,
    ) -> bytes:
        items = list(adapters.items())
        return kvscout_native.encode_events(_native(batch), worker, _identity(pool), items, epoch, event_id)

    def demotion(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> NativeDemotion:
        return NativeDemotion(self.core, worker, ttl_seconds, now)

    def find_matches(
        self, block_hashes: Sequence[int] | bytes, *, now: float, early_exit: bool = False, usable: int | None = None
    ) -> Overlaps:
        return Overlaps._make(self.core.find_matches(block_hashes, now, early_exit, usable))

    def repeated(self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, first: int) -> int:
        return self.core.repeated(worker, block_hashes, first)

    def incomplete(self) -> frozenset[WorkerRank]:
        return frozenset(WorkerRank(*worker) for worker in self.core.incomplete())

    def predict(
        self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, ttl_seconds: float, now: float
    ) -> int:
        return self.core.predict(worker, block_hashes, ttl_seconds, now)

    def maintain(self, *, now: float, budget: int = 4096) -> bool:
        return self.core.maintain(now, budget)

    def cut(self, worker: WorkerRank) -> NativeCut | None:
        cut = kvscout_native.Cut.begin(self.core, worker)
        return NativeCut(worker, cut) if cut is not None else None

    def loading(self, dump: WorkerDump) -> Loading:
        return Loading(lambda: kvscout_native.Loading.of_dump(self.core, dump))

    def loading_messages(self, messages: Sequence[bytes]) -> Loading:
        return Loading(lambda: kvscout_native.Loading.of_messages(self.core, messages))

    def worker_stats(self, worker: WorkerRank) -> WorkerStats | None:
        stats = self.core.worker_stats(worker)
        if stats is None:
            return None
        ignored = {reason: count for reason, count in zip(Ignored, stats.pop("ignored"), strict=True) if count}
        return WorkerStats(**stats, ignored=ignored)

    def shared_caches(self) -> tuple[SharedCacheStats, ...]:
        return tuple(SharedCacheStats(**stats) for stats in self.core.shared_caches())

    def stats(self) -> IndexStats:
        return IndexStats(**self.core.stats())

    def check_invariants(self) -> None:
        self.core.check_invariants()


class NativeDemotion(Demotion):
    """See `Demotion`."""

    def __init__(self, index: kvscout_native.BlockIndex, worker: WorkerRank, ttl_seconds: float, now: float) -> None:
        self._index = index
        self._worker = worker
        index.begin_demotion(worker, ttl_seconds, now)

    def step(self) -> bool:
        added = self._index.go_on_demoting(self._worker)
        self.added += added or 0
        return added is not None


class NativeCut(Cut):
    """See `Cut`."""

    def __init__(self, worker: WorkerRank, cut: kvscout_native.Cut) -> None:
        self._worker = worker
        self._cut = cut

    def step(self) -> bool:
        return self._cut.step()

    def dump(self) -> WorkerDump | None:
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
        if not self._cut.encode(_identity(pool), history_incomplete, MAX_CHUNK_BYTES, epoch):
            return None
        # One by one: copying all of them at once would hold the interpreter for long.
        return list(iter(self._cut.next_message, None))


class NativeQueries:
    """`FindMatches` and `StreamFindMatches` from bytes to bytes; None leaves a request to the plain path."""

    def __init__(self) -> None:
        self._queries = kvscout_native.Queries()

    def set_pool(self, pool: PoolKey, index: BlockIndex) -> None:
        """Make a native index reachable; queries to others return None."""
        if isinstance(index, NativeIndex):
            self._queries.set_pool(_identity(pool), index.core)

    def remove_pool(self, pool: PoolKey) -> None:
        """Make an index unreachable."""
        self._queries.remove_pool(_identity(pool))

    def set_incomplete(self, pool: PoolKey, rank: WorkerRank, incomplete: bool) -> None:
        """Set whether the history of a rank is incomplete."""
        self._queries.set_incomplete(_identity(pool), rank, incomplete)

    @property
    def answers(self) -> kvscout_native.Answers:
        """Return `answer` as a method that a native server calls without Python."""
        return self._queries.answers()

    @property
    def stream_answers(self) -> kvscout_native.Answers:
        """Return `answer_stream` as a method that a native server calls without Python."""
        return self._queries.stream_answers()

    def find(
        self, pool: PoolKey, hashes: bytes, prompt_tokens: int, *, top_k: int = 0, now: float
    ) -> tuple[kvscout_native.Overlaps, bool, list[int], RankSet] | None:
        """Return overlaps, whether workers may have more, the rows whose history is incomplete, and the ranks of
        the pool; None: the plain servicer has to.

        Args:
            pool: The pool.
            hashes: Local hashes of the prompt, packed.
            prompt_tokens: Its length; 0 = unknown.
            top_k: Most rows, with what the others have (`top_k`); 0 = all.
            now: The index's clock.
        """
        found = self._queries.find(_identity(pool), hashes, prompt_tokens, top_k, now)
        if found is None:
            return None
        overlaps, lower_bound, incomplete_rows, ranks = found
        return overlaps, lower_bound, incomplete_rows, RankSet(*ranks)

    def answer(self, request: bytes, *, now: float, caller_tenant: str) -> bytes | None:
        """Answer a serialised `FindMatchesRequest`; None: the plain servicer has to.

        Args:
            request: The message.
            now: The index's clock.
            caller_tenant: Tenant that the caller is bound to; "*" = all.
        """
        return self._queries.answer(request, now, caller_tenant)

    def answer_stream(self, message: bytes, *, now: float, caller_tenant: str) -> bytes | None:
        """Answer a serialised `StreamFindMatchesRequest`, like `answer`."""
        return self._queries.answer_stream(message, now, caller_tenant)


def make_bypass(index: BlockIndex, worker: WorkerRank, digests_kept: int) -> kvscout_native.Bypass | None:
    """Return what applies a rank's usual batches to a native index off the event loop; None: the index is another.

    Args:
        index: The index.
        worker: The rank.
        digests_kept: Digests of batches in its position, at most.
    """
    return kvscout_native.Bypass(index.core, worker, digests_kept) if isinstance(index, NativeIndex) else None


def make_intake_threads(threads: int) -> kvscout_native.Intake | None:
    """Start threads that read engines' sockets; None where the extension is not built, or switched off."""
    return kvscout_native.Intake(threads) if native_available() else None


def _native(batch: DecodedBatch) -> kvscout_native.Batch:
    if isinstance(batch, kvscout_native.Batch):
        return batch
    assert isinstance(batch, EventBatch)
    return kvscout_native.Batch.of_events(batch.events, len(batch.faults), batch.timestamp, batch.dp_rank)


def _identity(pool: PoolKey) -> tuple[str, str, int, bool]:
    return pool.tenant, pool.model, pool.block_size, pool.eagle


def _copies(copies: Sequence[tuple[int, int, int]]) -> tuple[Copies, ...]:
    return tuple(Copies(group, Tier(tier), number) for group, tier, number in copies)
