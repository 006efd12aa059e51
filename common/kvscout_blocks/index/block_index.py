"""The block index: which worker rank holds which leading blocks of a prompt.

::

                      root
                     /    \\                 Every node is a prefix, named by the local hashes on its path.
                   17      40               A worker *binds* engine hashes to nodes and counts copies of
                  /  \\      |               them, for each (group, tier).
                 8    3     9
                 |          |               w1 holds 17 and 17·8·5, but not 17·8: 5 is *hidden* below the
                 5          6               hole 8, and a query [17 8 5] gives w1 one block.

    engine bytes ──apply_payload──▶ index ◀──find_matches── local hashes of a request
                                    │  ▲
                                  dump load

Terms: a block is *held* on a tier by a worker when, for every full-attention group that the worker is
known to have, a copy is on that tier or a faster one. It is *rooted* when all its ancestors are held too,
otherwise *hidden*. An *orphan* was stored under a parent that this worker does not have. A *ghost* went
recently and can come back by its engine hash alone, with a tier change: below its parent, or as an orphan until
that comes. It is remembered if what was above it had a name when it went, be it that the same event took that, too.

Invariants, checked by `check_invariants`:

1. A known engine hash of a worker is exactly one of these: bound to one node, an orphan, a ghost, or
   demoted (known as a parent only, see `demote`).
2. Every bound hash has at least one copy; copies are only in full-attention groups.
3. `find_matches` gives a worker k device blocks if and only if blocks 0..k-1 are all held by it on the
   device and block k is not (or does not exist). The same for the other tiers, cumulatively, and for
   `predicted`, where a block counts when it is held on the device or predicted for this worker.
4. No orphan's parent is bound: orphans are bound as soon as their parent is.
5. Ghosts of a worker number at most `ghost_limit`, orphans `ORPHAN_LIMIT`.
6. A node exists only while a worker's bound hash, demoted hash or prediction needs it or a descendant.
7. With `max_blocks` > 0, bound hashes and orphans of all workers together are at most `max_blocks` when a
   call returns, and so are ghosts. Of ghosts the oldest go. Of blocks what was above the bound goes, and a 64th of
   it, at most a slice. First what no query can match, of whatever worker:
   orphans, and blocks that are not rooted. So what an engine stores below blocks that went takes no place
   of rooted ones. Then rooted blocks of the largest worker: those that neither a query nor a Stored used for
   the longest time, natively in 64ths of the bound, the deepest before their parents. So whole prefixes stay, and
   nothing that was rooted becomes hidden. What was bound becomes a ghost that the engine still has: when a
   Stored names it, by itself or as a parent, it and its like above it get a copy again in each place in which all
   full-attention groups had one, unless a Removed since said otherwise.

Events of one worker must come in order, from one caller at a time. The reference (`reference`) serves one thread,
such as an event loop, and does everything in one step. The native backend serves any number of readers during writes: a
reader may see a mixture of before and after a write, but of no worker more than it held at one of these times, and a
reader that comes after the write sees all of it. No call waits for anything but the work it names, and one slice at
most of work on a whole rank (`demotion`, `cut`, `loading`).
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import DecodedBatch, Tier
from kvscout_blocks.bytes.messages import Published
from kvscout_common.errors import FailedPrecondition, InvalidArgument
from kvscout_common.worker import (
    SHARED_CACHE,
    SHARED_CACHE_BLOCKS,
    SHARED_CACHE_TIER,
    CopyMode,
    PoolKey,
    WorkerRank,
    WorkerSpec,
)

GHOST_LIMIT = 65_536
"""Most blocks that went last and are remembered, for a worker rank; one that comes back leaves its place empty."""

FEW_GHOSTS = 1_024
"""The same for a rank of which nobody asks for them: it never moved a block between tiers, and there is no bound."""

ORPHAN_LIMIT = 65_536
"""Orphans kept for each worker rank; further ones are dropped and counted."""

TWIN_LIMIT = 16
"""Engine hashes by which a worker knows one block. For a further one the one known longest that has no copies goes;
where all have copies it is dropped and counted."""

BATCH_LIMIT = 1 << 20
"""Blocks of one batch: it is applied as one step, which all that writes waits for, half a second at most."""

SLICE = 512
"""Blocks that are stored, or as much other work, in one slice of work on a whole rank."""

SHARED_LIMIT = 1 << 22
"""Blocks of a shared cache of which nobody says how many it has room for; those that came first go."""

WINDOW_LIMIT = 1 << 22
"""Blocks in groups with a sliding window, of each worker rank, where `max_blocks` says nothing."""

GROUP_LIMIT = 64
"""Cache groups known for each worker rank; events of further ones are skipped and counted."""

MAX_COPIES = 2**32 - 1
"""A count of copies stays here, whatever is stored."""

DEFAULT_MAX_PREDICTED_BLOCKS = 1_048_576
"""(block, worker) predictions kept in an index, as --router-max-tree-size."""

DEFAULT_PRUNE_RATIO = 0.8
"""Predictions above the maximum are pruned to this share of it, as --router-prune-target-ratio."""


class SharedOptions(NamedTuple):
    """What a worker was registered with of the cache that it shares with others; see `reference_shared`."""

    name: str = ""
    """"" = it shares none."""
    tier: Tier | None = None
    """The tier on which its engine announces shared blocks, besides the external one."""
    blocks: int = 0
    """Blocks that the cache has room for; 0 = unknown."""

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> SharedOptions:
        """Return what the labels of a registration say, which were checked."""
        if not labels.get(SHARED_CACHE):
            return NOTHING_SHARED
        tier = {"host": Tier.HOST, "disk": Tier.DISK}.get(labels.get(SHARED_CACHE_TIER, ""))
        return cls(labels[SHARED_CACHE], tier, int(labels.get(SHARED_CACHE_BLOCKS, "0")))


NOTHING_SHARED = SharedOptions()


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Registered facts of a worker rank that the index needs besides its events."""

    copies: CopyMode = CopyMode.COUNT
    adapters: Mapping[int, str] = field(default_factory=dict)
    """LoRA number → adapter name, for engines whose events carry the number only."""
    total_kv_blocks: int = 0
    """Blocks of the rank's device cache; more device copies than this prove lost removals. 0: unknown."""
    shared: SharedOptions = NOTHING_SHARED

    @classmethod
    def of(cls, spec: WorkerSpec) -> WorkerOptions:
        """Return the options of each rank of a registration."""
        return cls(
            copies=spec.copies,
            adapters={adapter.lora_id: adapter.name for adapter in spec.adapters if adapter.lora_id},
            total_kv_blocks=spec.total_kv_blocks,
            shared=SharedOptions.of(spec.labels),
        )


def ghost_limit(total_kv_blocks: int, *, asked: bool) -> int:
    """Return how many ghosts a worker rank has at most: as many as its cache has blocks, rounded up to a power of two.

    Args:
        total_kv_blocks: 0 = unknown.
        asked: They may be asked for: the rank named a tier other than the device, or a block without its content; or
            the index has a bound, which drops blocks that the engine still has.
    """
    blocks = min(total_kv_blocks or GHOST_LIMIT, GHOST_LIMIT) if asked else 0
    return max(FEW_GHOSTS, 1 << (blocks - 1).bit_length())


class Applied(NamedTuple):
    """Result of applying one batch."""

    events: int
    """Events read, whether they changed anything or not."""
    faults: int
    """Events that could not be read."""
    over_capacity: bool
    """The worker now has more device copies than `total_kv_blocks`: removals were lost."""
    incompatible: str
    """Reason for which the worker cannot be indexed; "" if it can."""


class Overlap(NamedTuple):
    """Leading blocks of a prompt that one worker rank has; tiers are cumulative."""

    device: int
    host: int
    disk: int
    external: int
    predicted: int


class Overlaps(NamedTuple):
    """Answer of `find_matches`, in columns of equal length; rows are in no order.

    Tiers are cumulative: `host` counts leading blocks on the host *or* the device, and so on. `predicted`
    counts leading blocks that are held or predicted on the device. Rows that are 0 everywhere are left
    out.
    """

    workers: tuple[WorkerRank, ...] = ()
    device: tuple[int, ...] = ()
    host: tuple[int, ...] = ()
    disk: tuple[int, ...] = ()
    external: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()

    def by_worker(self) -> dict[WorkerRank, Overlap]:
        """Return the rows by worker rank."""
        columns = zip(self.device, self.host, self.disk, self.external, self.predicted, strict=True)
        return {worker: Overlap(*row) for worker, row in zip(self.workers, columns, strict=True)}


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """State of one worker rank."""

    blocks: int
    """Blocks (prefixes) held on any tier."""
    hidden: int
    """Blocks among these that are held below a hole."""
    orphans: int
    ghosts: int
    """Blocks that went last and have a place, those that were stored again since included."""
    predictions: int
    device_copies: int
    """Σ device counts over blocks and groups, orphans included."""
    window_blocks: int
    """Blocks in groups with a sliding window or states."""
    unjudged_groups: Sequence[int]
    """Groups that are neither full attention nor states, nor known to have a sliding window: overlaps may be too long
    by what these lack."""
    over_capacity: bool
    incomplete: bool
    """A limit kept something out since the worker was empty; see `BlockIndex.incomplete`."""
    incompatible: str
    """Reason for which the worker is not indexed; "" if it is."""
    ignored: Mapping[Ignored, int]
    """Since the worker was added; reasons that never happened are left out."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    """State of the whole index."""

    blocks: int
    """Distinct prefixes held by any worker; those of dropped workers count until `maintain` freed them."""
    memberships: int
    """(prefix, worker) pairs held on any tier."""
    workers: int
    """Worker ranks that hold any block."""
    orphans: int
    hidden: int
    ghosts: int
    predictions: int
    bytes: int
    """Memory: counted in the native index, as each part changes; estimated in the reference."""
    evicted: int
    """Blocks dropped by the `max_blocks` bound, since start."""
    queries: int
    """Calls of `find_matches`, since start."""
    unknown_worker: int
    """Batches for workers that were not added, since start."""


class SharedCacheStats(NamedTuple):
    """State of one shared cache."""

    name: str
    blocks: int
    members: int
    """Worker ranks."""
    disagreeing: int
    """Members that name blocks otherwise than the others, so that they read none of theirs."""
    evicted: int
    """Blocks dropped at the limit, since it has members."""


class Work:
    """Work on a whole rank: the native index does it in slices, the reference in one step."""

    def step(self) -> bool:
        """Do a slice, in any thread; return True while more is left."""
        return False

    def finish(self) -> None:
        """Do all that is left."""
        while self.step():
            pass

    async def run(self) -> None:
        """Do all that is left in another thread; if cancelled, not all of it."""
        stopped = threading.Event()

        def steps() -> None:
            while not stopped.is_set() and self.step():
                pass

        try:
            await asyncio.to_thread(steps)
        finally:
            stopped.set()


class Demotion(Work):
    """A demotion under way: every slice counts when it is done, and the next write to the rank does the rest."""

    added = 0
    """Blocks that are predicted and were not before."""


class Cut(Work, ABC):
    """A copy of a rank's state as of when it was begun; the next write to the rank has the rest copied first."""

    @abstractmethod
    def dump(self) -> WorkerDump | None:
        """Return the state, once, copying what is left; None: the worker was reset meanwhile."""

    @abstractmethod
    def messages(self, pool: PoolKey, *, history_incomplete: bool, epoch: int | None = None) -> list[bytes] | None:
        """Return `dump` as serialised messages, in any thread.

        Args:
            pool: The index it is from.
            history_incomplete: Events before the cut may be missing.
            epoch: Written in place of the index's own; None: that.
        """

    async def encode(self, pool: PoolKey, *, history_incomplete: bool, epoch: int | None = None) -> list[bytes] | None:
        """Return `messages` without holding the event loop up."""
        await self.run()
        return await asyncio.to_thread(self.messages, pool, history_incomplete=history_incomplete, epoch=epoch)


class Load(Protocol):
    """Steps of a `Loading`, once its dump is read."""

    def step(self) -> bool:
        """See `Work.step`."""

    def commit(self) -> bool:
        """See `Loading.commit`."""


class Loading(Work):
    """A load under way, whose steps raise what `BlockIndex.load` does; nothing changes before its `commit`.

    Events between its begin and its `commit` are replaced, too.

    Args:
        begin: Reads the dump and begins; called by the first step.
    """

    def __init__(self, begin: Callable[[], Load]) -> None:
        self._begin = begin
        self._load: Load | None = None
        self._abandoned = False

    def step(self) -> bool:
        if self._abandoned:
            return False
        if self._load is None:
            self._load = self._begin()
        return self._load.step()

    def commit(self) -> bool:
        """Put what was loaded in place; False: not all is, or the worker was reset or removed meanwhile."""
        return self._load is not None and self._load.commit()

    def abandon(self) -> None:
        """Drop what was loaded, unless it was put in place."""
        self._abandoned, self._load = True, None


class BlockIndex(ABC):
    """The blocks of all worker ranks of one pool; see the module's picture and invariants.

    `now` is the caller's monotonic clock, in seconds; it must not go back.

    Args:
        block_size: Tokens of a block.
        eagle: Blocks are EAGLE windows.
        max_blocks: Bound hashes and orphans of all workers; 0: no bound.
        max_predicted_blocks: Predictions of all workers.
        prune_ratio: Share of `max_predicted_blocks` that pruning leaves.

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
        if block_size < 1:
            raise InvalidArgument("must be at least 1 token", field="block_size")
        if max_blocks < 0:
            raise InvalidArgument("must not be negative", field="max_blocks")
        if max_predicted_blocks < 1:
            raise InvalidArgument("must be at least 1", field="max_predicted_blocks")
        if not 0 < prune_ratio <= 1:
            raise InvalidArgument("must be above 0 and at most 1", field="prune_ratio")
        self.block_size = block_size
        self.eagle = eagle
        self.max_blocks = max_blocks
        self.max_predicted_blocks = max_predicted_blocks
        self.prune_ratio = prune_ratio
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Make it empty."""

    # Workers

    @abstractmethod
    def add_worker(self, worker: WorkerRank, options: WorkerOptions) -> None:
        """Add a worker rank, empty; of a known one replace the options and keep the blocks.

        A changed `copies` mode applies to events from then on.
        """

    def remove_worker(self, worker_id: str) -> int:
        """Drop all ranks of a worker and return their number; their memory may be freed by later calls."""
        return sum(self.remove_rank(worker) for worker in self.workers() if worker.worker_id == worker_id)

    @abstractmethod
    def remove_rank(self, worker: WorkerRank) -> bool:
        """Drop one rank, like `remove_worker`; False if it was not known."""

    @abstractmethod
    def reset(self, worker: WorkerRank) -> None:
        """Forget all that events said of a rank, cursor, groups and incompatibility included; counters stay."""

    @abstractmethod
    def workers(self) -> tuple[WorkerRank, ...]:
        """Return the known worker ranks, sorted."""

    @abstractmethod
    def cursor(self, worker: WorkerRank) -> tuple[int, int | None] | None:
        """Return (epoch, last event id) of a worker rank; None if it is not known."""

    # Events

    @abstractmethod
    def decode(self, payload: bytes) -> DecodedBatch:
        """Decode an engine's msgpack payload into the form that this index applies.

        Raises:
            MalformedBatch: The payload is no batch.
        """

    @abstractmethod
    def decode_message(self, message: bytes) -> Published:
        """Decode a serialised `KvEventBatch` of events; one event that cannot be read costs itself.

        Raises:
            FailedPrecondition: Its version cannot be read.
            InvalidArgument: It is no message, has a state chunk, or a reset that does not come first.
        """

    @abstractmethod
    def apply(self, worker: WorkerRank, batch: DecodedBatch, *, epoch: int = 0, event_id: int | None = None) -> Applied:
        """Apply one batch and move the worker's cursor, as one step.

        Stored events are judged in the order of `Ignored`. Within a chain whose parent is known, each
        block's prefix follows from the one before it, also where that one was dropped. In a chain
        whose parent is unknown, a bound engine hash is a conflict that drops the rest of the event.

        Args:
            worker: The source.
            batch: What `decode` or `decode_message` of this backend returned, or an `EventBatch`.
            epoch: Incarnation of the engine; 0: none.
            event_id: The batch's sequence number; None leaves the cursor where it is.
        """

    @abstractmethod
    def apply_payload(
        self, worker: WorkerRank, payload: bytes, *, epoch: int = 0, event_id: int | None = None
    ) -> Applied:
        """Apply an engine's payload: `apply(worker, decode(payload), ...)`.

        Raises:
            MalformedBatch: The payload is no batch; nothing was applied, the cursor moved all the same.
        """

    @staticmethod
    @abstractmethod
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

        A reader's index does with it what it would have done with the engine's own bytes: what cannot be indexed is
        sent without its hashes, as it still teaches the kind of its group; full blocks of another size are reported by
        that size.

        Args:
            worker: The source.
            pool: The index it belongs to.
            adapters: LoRA number → adapter name, as registered.
            batch: What an index of this process decoded, or an `EventBatch`; what could not be read is left out.
            epoch: Incarnation of the engine.
            event_id: The engine's number of the batch.
        """

    def demote(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> int:
        """Turn a worker's blocks into predictions, since its history can no longer be verified.

        Blocks held on the device are predicted for `ttl_seconds`. All its bound hashes stay valid as
        parents until then, and a Removed of one ends its prediction. Orphans are dropped, ghosts and
        groups stay.

        Returns:
            Blocks that are predicted and were not before.
        """
        demotion = self.demotion(worker, ttl_seconds=ttl_seconds, now=now)
        demotion.finish()
        return demotion.added

    @abstractmethod
    def demotion(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> Demotion:
        """Begin to `demote`; `maintain` goes on with it."""

    # Queries

    @abstractmethod
    def find_matches(
        self, block_hashes: Sequence[int] | bytes, *, now: float, early_exit: bool = False, usable: int | None = None
    ) -> Overlaps:
        """Return the overlap of each worker rank with a prompt; exact.

        Args:
            block_hashes: Local hashes from block 0, as integers or as little-endian u64s.
            now: Decides which predictions count; of many that end at once, some count until `maintain` ended them.
            early_exit: Stop once at most one worker can have more; its numbers are then lower bounds.
            usable: Blocks that an engine takes from its cache at most, as it always computes the last token: all but
                the last one where the prompt ends with it. min(overlap, usable) is then what an engine with sliding
                windows takes, too. None: all.
        """

    @abstractmethod
    def repeated(self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, first: int) -> int:
        """Return how many of a prompt's blocks events stored on the device again, by the same name, before a removal.

        An engine caches a block that it has not more often than it must. Where it computed a whole prompt again that
        events announced, it had lost the blocks without an event.

        Args:
            worker: Whose; of one that is not known, or whose copies are not counted, the answer is 0.
            block_hashes: Local hashes from block 0, as integers or as little-endian u64s.
            first: The first block that counts.
        """

    @abstractmethod
    def incomplete(self) -> frozenset[WorkerRank]:
        """Return the ranks of which a limit kept blocks out (`Ignored.is_limit`): they may have more than is found.

        Until their blocks are dropped (Cleared, reset, removal) or replaced by a dump. Blocks that the `max_blocks`
        bound dropped are no part of this: those come back.
        """

    @abstractmethod
    def predict(
        self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, ttl_seconds: float, now: float
    ) -> int:
        """Predict that a worker will hold a prompt's blocks, until `now + ttl_seconds`.

        Blocks that it holds on the device are left alone; predicted ones are refreshed, never shortened. Any
        Stored or Removed that names a prediction's block on this worker ends it. Above the maximum,
        predictions are pruned, soonest to expire first, deeper ones before their parents. Unknown workers are ignored.

        Returns:
            Blocks that are predicted and were not before.
        """

    @abstractmethod
    def maintain(self, *, now: float, budget: int = 4096) -> bool:
        """Go on with demotions, end predictions and free memory, for about `budget` blocks; True while more is left."""

    # State

    def dump(self, worker: WorkerRank) -> WorkerDump | None:
        """Return one consistent cut of a worker rank; None if it is not known."""
        cut = self.cut(worker)
        return cut.dump() if cut is not None else None

    @abstractmethod
    def cut(self, worker: WorkerRank) -> Cut | None:
        """Begin to `dump` what the worker holds now."""

    def load(self, dump: WorkerDump) -> None:
        """Replace all that events said of a worker rank by a dump, cursor included, as one step.

        Raises:
            NotFound: The worker is not known.
            InvalidArgument: The dump contradicts itself; nothing changed.
            FailedPrecondition: There is no room for it; nothing changed.
        """
        _load(self.loading(dump))

    def load_messages(self, messages: Sequence[bytes]) -> None:
        """Load a dump from its messages.

        Raises:
            FailedPrecondition: A version that this release cannot read, or no room; nothing changed.
            InvalidArgument: The messages are no dump, or contradict themselves; nothing changed.
            NotFound: The worker is not known.
        """
        _load(self.loading_messages(messages))

    @abstractmethod
    def loading(self, dump: WorkerDump) -> Loading:
        """Begin to `load`."""

    @abstractmethod
    def loading_messages(self, messages: Sequence[bytes]) -> Loading:
        """Begin to `load_messages`."""

    @abstractmethod
    def worker_stats(self, worker: WorkerRank) -> WorkerStats | None:
        """Return the state of a worker rank; None if it is not known."""

    @abstractmethod
    def shared_caches(self) -> tuple[SharedCacheStats, ...]:
        """Return the state of the caches that workers share, by name."""

    @abstractmethod
    def stats(self) -> IndexStats:
        """Return the state of the index."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Verify the module's invariants the slow way; for tests.

        Raises:
            AssertionError: Naming the first violation.
        """


def _load(loading: Loading) -> None:
    loading.finish()
    if not loading.commit():
        raise FailedPrecondition("the worker was reset or removed meanwhile")
