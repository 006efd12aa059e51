"""The block index in plain Python: the reference that the native twin is compared with.

::

    apply ── Ingest: judge each event (the order of `Ignored`) ──▶ Holdings of the worker ──▶ PrefixTree
    find_matches ── walk the tree, one AND a column and block ──▶ slots ──▶ worker ranks

A worker's content sits in one slot of the tree (`slots`), which Cleared, a reset or a load replaces by another.
Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import Cleared, EventBatch, Removed, Stored, Tier
from kvscout_blocks.bytes.wire import MalformedBatch, decode_batch
from kvscout_blocks.index import bound, state_dump
from kvscout_blocks.index.block_index import (
    BATCH_LIMIT,
    DEFAULT_MAX_PREDICTED_BLOCKS,
    DEFAULT_PRUNE_RATIO,
    SLICE,
    WINDOW_LIMIT,
    Applied,
    IndexStats,
    Overlap,
    Overlaps,
    WorkerOptions,
    WorkerStats,
    require_limits,
)
from kvscout_blocks.index.holdings import Holdings
from kvscout_blocks.index.ingest import Ingest, KnownWorker
from kvscout_blocks.index.predictions import Predictions
from kvscout_blocks.index.prefix_tree import PrefixTree, match
from kvscout_blocks.index.reference_work import ReferenceCut, ReferenceDemotion, ReferenceLoading
from kvscout_blocks.index.slices import at_once
from kvscout_blocks.index.slots import Slots
from kvscout_blocks.index.windows import WindowGroups, cut_rows
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.worker import WorkerRank

_DRAINED_BY_APPLY = 512
"""Blocks of dropped content that each `apply` frees beside as many as its batch has. Whatever else fills the
index frees as much as it fills, too: so the memory of dropped content shrinks, whatever the calls are."""

_ENDED_BY_QUERY = 64
"""Predictions that a query ends at most."""

_NODE_BYTES = 420
_BINDING_BYTES = 360
"""Measured with tracemalloc on CPython 3.11, a block held by one worker and by two."""


class ReferenceIndex:
    """`index.BlockIndex` in plain Python; see there for what each method does.

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
        require_limits(block_size, max_blocks, max_predicted_blocks, prune_ratio)
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._tree = PrefixTree()
        self._predictions = Predictions(self._tree, max_blocks=max_predicted_blocks, prune_ratio=prune_ratio)
        self._ingest = Ingest(block_size, eagle, max_blocks or WINDOW_LIMIT, self._tree, self._predictions)
        self._workers: dict[WorkerRank, KnownWorker] = {}
        self._slots = Slots(self._tree, self._predictions)
        self._evicted = 0
        self._added = 0
        """Entries that may have come in this round of the bound's clock."""
        self._queries = 0
        self._unknown_worker = 0

    # Workers

    def add_worker(self, worker: WorkerRank, options: WorkerOptions) -> None:
        """See `BlockIndex.add_worker`."""
        known = self._workers.get(worker)
        if known is not None:
            known.options = options
        else:
            self._workers[worker] = KnownWorker(options, self._slots.take(worker))

    def remove_worker(self, worker_id: str) -> int:
        """See `BlockIndex.remove_worker`."""
        ranks = [worker for worker in self._workers if worker.worker_id == worker_id]
        for worker in ranks:
            self.remove_rank(worker)
        return len(ranks)

    def remove_rank(self, worker: WorkerRank) -> bool:
        """See `BlockIndex.remove_rank`."""
        known = self._workers.pop(worker, None)
        if known is None:
            return False
        self._slots.drop(known.holdings)
        return True

    def reset(self, worker: WorkerRank) -> None:
        """See `BlockIndex.reset`."""
        known = self._workers.get(worker)
        if known is None:
            return
        known.groups.clear()
        known.holdings.windows = None
        known.epoch, known.last_event_id, known.incompatible = 0, None, ""
        known.content = object()
        self._renew(worker, known)

    def demote(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> int:
        """See `BlockIndex.demote`."""
        demotion = self.demotion(worker, ttl_seconds=ttl_seconds, now=now)
        at_once(demotion)
        return demotion.added

    def demotion(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> ReferenceDemotion:
        """See `BlockIndex.demotion`."""
        known = self._workers.get(worker)
        if known is None:
            return ReferenceDemotion(None, self._demote)
        self._complete(known.holdings)
        known.holdings.begin_demotion(now + ttl_seconds)
        return ReferenceDemotion(known.holdings, self._demote)

    def _demote(self, holdings: Holdings, budget: int) -> int:
        """Demotes about so many blocks; how many were not predicted before."""
        until = holdings.demoting_until
        if until is None or not holdings.visible:
            return 0
        added = self._predictions.add(holdings, holdings.demote(budget), until)
        self._slots.drain(added)
        return added

    def _complete(self, holdings: Holdings) -> None:
        """Completes what is under way, since a write is to find it done."""
        for cut in list(holdings.cuts):
            at_once(cut)
        while holdings.demoting_until is not None:
            self._demote(holdings, SLICE)

    def workers(self) -> tuple[WorkerRank, ...]:
        """See `BlockIndex.workers`."""
        return tuple(sorted(self._workers))

    def cursor(self, worker: WorkerRank) -> tuple[int, int | None] | None:
        """See `BlockIndex.cursor`."""
        known = self._workers.get(worker)
        return (known.epoch, known.last_event_id) if known is not None else None

    # Events

    def apply_payload(
        self, worker: WorkerRank, payload: bytes, *, epoch: int = 0, event_id: int | None = None
    ) -> Applied:
        """See `BlockIndex.apply_payload`."""
        try:
            batch = decode_batch(payload)
        except MalformedBatch:
            self._move_cursor(worker, epoch, event_id)
            raise
        return self.apply(worker, batch, epoch=epoch, event_id=event_id)

    def apply(self, worker: WorkerRank, batch: EventBatch, *, epoch: int = 0, event_id: int | None = None) -> Applied:
        """See `BlockIndex.apply`."""
        known = self._workers.get(worker)
        if known is None:
            self._unknown_worker += 1
            return Applied(len(batch.events), len(batch.faults), False, "")
        self._complete(known.holdings)
        filled = 0
        for event in batch.events:
            if isinstance(event, Cleared):
                self._renew(worker, known)
                continue
            blocks = len(event.engine_hashes)
            if filled + blocks > BATCH_LIMIT:
                if isinstance(event, Removed):
                    # What it no longer has cannot be told from what it has.
                    self._renew(worker, known)
                known.ignore(Ignored.BATCH_LIMIT, blocks)
                continue
            filled += blocks
            if known.incompatible:
                known.ignore(Ignored.INCOMPATIBLE)
            elif isinstance(event, Stored):
                if not self._ingest.stored(known, event):
                    self._renew(worker, known)
            else:
                self._ingest.removed(known, event)
            # Event by event, since each Cleared takes a slot.
            self._slots.drain(blocks + 1)
        self._ingest.settle_windows(known, batch)
        self._move_cursor(worker, epoch, event_id)
        self._enforce_bound(filled)
        self._slots.drain(_DRAINED_BY_APPLY)
        return Applied(len(batch.events), len(batch.faults), known.over_capacity, known.incompatible)

    def _renew(self, worker: WorkerRank, known: KnownWorker) -> None:
        """Empties a worker at once; its groups stay known."""
        windows = known.holdings.windows
        self._slots.drop(known.holdings)
        known.holdings = self._slots.take(worker)
        known.holdings.set_full_groups(known.full_groups)
        known.holdings.windows = windows.emptied() if windows is not None else None

    def _move_cursor(self, worker: WorkerRank, epoch: int, event_id: int | None) -> None:
        known = self._workers.get(worker)
        if known is not None and event_id is not None:
            known.epoch, known.last_event_id = epoch, event_id

    # Queries

    def find_matches(
        self, block_hashes: Sequence[int] | bytes, *, now: float, early_exit: bool = False, usable: int | None = None
    ) -> Overlaps:
        """See `BlockIndex.find_matches`."""
        self._queries += 1
        self._predictions.expire(now, _ENDED_BY_QUERY)
        hashes = list(_integers(block_hashes))
        columns, deepest = match(self._tree, hashes, self._slots.live, early_exit)
        self._tree.touch(deepest)
        # A slot with a block in any column has one in `external` or in `predicted`.
        slots = columns[Tier.EXTERNAL].keys() | columns[-1].keys()
        rows = {slot: Overlap(*(column.get(slot, 0) for column in columns)) for slot in slots}
        cut_rows(
            rows,
            {h.slot: (h.windows, not h.full_groups) for h in self._contents() if h.windows is not None},
            hashes,
            len(hashes) if usable is None else usable,
        )
        found = [(slot, row) for slot, row in sorted(rows.items()) if any(row)]
        owners = tuple(owner for owner in (self._slots.owner(slot) for slot, _ in found) if owner is not None)
        return Overlaps(owners, *zip(*(row for _, row in found), strict=True)) if found else Overlaps()

    def incomplete(self) -> frozenset[WorkerRank]:
        """See `BlockIndex.incomplete`."""
        return frozenset(worker for worker, known in self._workers.items() if known.holdings.incomplete)

    def _contents(self) -> Iterator[Holdings]:
        return (known.holdings for known in self._workers.values())

    def predict(
        self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, ttl_seconds: float, now: float
    ) -> int:
        """See `BlockIndex.predict`."""
        known = self._workers.get(worker)
        if known is None:
            return 0
        holdings = known.holdings
        self._complete(holdings)
        hashes = list(_integers(block_hashes))
        self._predictions.expire(now, len(hashes) + SLICE)
        path = []
        node = self._tree.root
        for local in hashes:
            node = self._tree.child(node, local)
            path.append(node)
        added = self._predictions.add(holdings, [n for n in path if not n.masks[0] & holdings.bit], now + ttl_seconds)
        self._tree.prune(node)
        self._slots.drain(added)
        return added

    # State

    def dump(self, worker: WorkerRank) -> WorkerDump | None:
        """See `BlockIndex.dump`."""
        cut = self.cut(worker)
        return cut.dump() if cut is not None else None

    def cut(self, worker: WorkerRank) -> ReferenceCut | None:
        """See `BlockIndex.cut`."""
        known = self._workers.get(worker)
        if known is None:
            return None
        if known.holdings.demoting_until is not None:
            self._complete(known.holdings)
        head = WorkerDump(
            worker,
            known.epoch,
            known.last_event_id,
            tuple(sorted(known.groups.items())),
            incompatible=known.incompatible,
            incomplete=known.holdings.incomplete,
        )
        return ReferenceCut(head, known.holdings)

    def load(self, dump: WorkerDump) -> None:
        """See `BlockIndex.load`."""
        loading = self.loading(dump)
        at_once(loading)
        loading.commit()

    def loading(self, dump: WorkerDump) -> ReferenceLoading:
        """See `BlockIndex.loading`."""
        return ReferenceLoading(self, dump)

    def fill(self, dump: WorkerDump, aside: list[Holdings]) -> state_dump.Slices[object]:
        """Loads a dump into a new slot that no query sees, in slices; for whom.

        Args:
            dump: What is to be loaded.
            aside: Gets the content, which is then the caller's.

        Raises:
            NotFound: The worker is not known.
            InvalidArgument: The dump contradicts itself.
        """
        known = self._workers.get(dump.worker)
        if known is None:
            raise NotFound(f"worker {dump.worker.worker_id} rank {dump.worker.dp_rank} is not known")
        content = known.content
        yield from state_dump.check(dump, self._block_size)
        holdings = self._slots.take(None)
        aside.append(holdings)
        holdings.set_full_groups(tuple(sorted(group for group, full in dump.groups if full)))
        holdings.incomplete = dump.incomplete
        if dump.windows:
            holdings.windows = WindowGroups(self._block_size, dump.windows)
        for _ in state_dump.load_holdings(holdings, dump):
            self._slots.drain(SLICE)
            yield
        return content

    def replace(self, dump: WorkerDump, holdings: Holdings, content: object) -> bool:
        """Puts what was filled in place of a content; False: that is gone."""
        known = self._workers.get(dump.worker)
        if known is None or known.content is not content:
            return False
        self._slots.drop(known.holdings)
        known.holdings = holdings
        known.content = object()
        known.epoch, known.last_event_id = dump.epoch, dump.last_event_id
        known.incompatible = dump.incompatible
        known.groups = dict(dump.groups)
        self._slots.show(holdings, dump.worker)
        self._enforce_bound(len(dump.blocks) + len(dump.orphans))
        return True

    def drop(self, holdings: Holdings) -> None:
        """Drops what was filled and is not put in place."""
        self._slots.drop(holdings)

    def worker_stats(self, worker: WorkerRank) -> WorkerStats | None:
        """See `BlockIndex.worker_stats`."""
        known = self._workers.get(worker)
        if known is None:
            return None
        holdings = known.holdings
        return WorkerStats(
            blocks=holdings.held,
            hidden=holdings.hidden(),
            orphans=len(holdings.orphans),
            ghosts=len(holdings.gone),
            predictions=len(holdings.predictions),
            device_copies=holdings.device_copies,
            window_blocks=len(holdings.windows) if holdings.windows is not None else 0,
            unjudged_groups=[
                group
                for group, full in sorted(known.groups.items())
                if not full and (holdings.windows is None or group not in holdings.windows.groups)
            ],
            over_capacity=known.over_capacity,
            incomplete=holdings.incomplete,
            incompatible=known.incompatible,
            ignored=dict(known.ignored),
        )

    def stats(self) -> IndexStats:
        """See `BlockIndex.stats`."""
        everyone = [known.holdings for known in self._workers.values()]
        bindings = sum(len(h.blocks) + len(h.orphans) + len(h.gone) for h in everyone)
        return IndexStats(
            blocks=self._tree.held,
            memberships=sum(h.held for h in everyone),
            workers=sum(1 for h in everyone if h.held),
            orphans=sum(len(h.orphans) for h in everyone),
            hidden=sum(h.hidden() for h in everyone),
            ghosts=sum(len(h.gone) for h in everyone),
            predictions=len(self._predictions),
            bytes=self._tree.nodes * _NODE_BYTES + bindings * _BINDING_BYTES,
            evicted=self._evicted,
            queries=self._queries,
            unknown_worker=self._unknown_worker,
        )

    def maintain(self, *, now: float, budget: int = 4096) -> bool:
        """See `BlockIndex.maintain`."""
        waiting = self._predictions.expire(now, budget)
        left = budget - self._slots.drain(budget)
        for known in self._workers.values():
            if known.holdings.demoting_until is not None:
                left -= self._demote(known.holdings, left)
                waiting = waiting or known.holdings.demoting_until is not None
            left -= known.holdings.expire_demoted(now, left)
            waiting = waiting or bool(known.holdings.demoted and now >= known.holdings.demoted_until)
        return bool(self._slots.dropped) or waiting

    def check_invariants(self) -> None:
        """See `BlockIndex.check_invariants`."""
        visible = [known.holdings for known in self._workers.values()]
        state_dump.check_holdings(self._tree, visible, list(self._slots.dropped))
        for counted in (sum(h.entries for h in visible), sum(len(h.gone) for h in visible)):
            assert not self._max_blocks or counted <= self._max_blocks, "max_blocks is kept"
        assert len(self._predictions) == sum(len(h.predictions) for h in visible), "predictions are counted"
        assert self._slots.live == sum(h.bit for h in visible), "live slots are those of the workers"
        for worker, known in self._workers.items():
            assert self._slots.owner(known.holdings.slot) == worker, "slots name their owners"
            assert known.holdings.full_groups == known.full_groups, "holdings know the groups"

    # The bound

    def _enforce_bound(self, added: int) -> None:
        """Drops what is above the bound, after at most so many entries came."""
        if not self._max_blocks:
            return
        self._added += added
        if self._added >= bound.round_length(self._max_blocks):
            self._added = 0
            self._tree.round += 1
        everyone = [known.holdings for known in self._workers.values()]
        if max(sum(h.entries for h in everyone), sum(len(h.gone) for h in everyone)) > self._max_blocks:
            for holdings in everyone:
                self._complete(holdings)
            self._evicted += bound.enforce(everyone, self._max_blocks)


def _integers(block_hashes: Sequence[int] | bytes) -> Iterator[int]:
    """Hashes one by one, from either form."""
    if not isinstance(block_hashes, bytes):
        return iter(block_hashes)
    if len(block_hashes) % 8:
        raise InvalidArgument("not whole 64-bit hashes", field="block_hashes")
    hashes = array("Q", block_hashes)
    if sys.byteorder == "big":
        hashes.byteswap()
    return iter(hashes)
