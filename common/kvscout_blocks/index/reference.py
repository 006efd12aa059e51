"""The block index in plain Python: the reference that the native twin is compared with.

::

    apply ── judge each event (the order of `Ignored`) ──▶ Holdings of the worker ──▶ PrefixTree
    find_matches ── walk the tree, one AND a column and block ──▶ slots ──▶ worker ranks

A worker's content sits in one slot of the tree. Dropping it (Cleared, reset, removal) takes the slot's bit
out of `_live`, which empties the worker for all readers at once, and gives it a new slot; the old one is
drained in slices, then used again. A load fills a slot whose bit is not in `_live` before it takes the other's place.
Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvscout_blocks.bytes.acceptance import Ignored, judge_content, local_hashes_of
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import Cleared, EventBatch, Removed, Stored, Tier
from kvscout_blocks.bytes.wire import MalformedBatch, decode_batch
from kvscout_blocks.index import bound, state_dump
from kvscout_blocks.index.block_index import (
    BATCH_LIMIT,
    DEFAULT_MAX_PREDICTED_BLOCKS,
    DEFAULT_PRUNE_RATIO,
    GROUP_LIMIT,
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
from kvscout_blocks.index.predictions import Predictions
from kvscout_blocks.index.prefix_tree import PrefixTree, match, sequence_hasher
from kvscout_blocks.index.slices import at_once
from kvscout_blocks.index.windows import Chain, WindowGroups, cut_rows
from kvscout_common.errors import InvalidArgument, KvscoutError, NotFound
from kvscout_common.worker import WorkerRank

_DRAINED_BY_APPLY = 512
"""Blocks of dropped content that each `apply` frees beside as many as its batch has. Whatever else fills the
index frees as much as it fills, too: so the memory of dropped content shrinks, whatever the calls are."""

_ENDED_BY_QUERY = 64
"""Predictions that a query ends at most."""

_NODE_BYTES = 420
_BINDING_BYTES = 360
"""Measured with tracemalloc on CPython 3.11, a block held by one worker and by two."""


class _Worker:
    """What the index knows of a worker rank, around the content of its slot."""

    def __init__(self, options: WorkerOptions, holdings: Holdings) -> None:
        self.options = options
        self.holdings = holdings
        self.epoch = 0
        self.last_event_id: int | None = None
        self.content = object()
        """Another one after each reset and load: what was begun for one content is not for the next."""
        self.groups: dict[int, bool] = {}
        """Known cache groups, and whether each is full attention."""
        self.incompatible = ""
        self.ignored: Counter[Ignored] = Counter()

    def ignore(self, reason: Ignored, number: int = 1) -> None:
        """Counts what was not indexed."""
        if number:
            self.ignored[reason] += number
            self.holdings.incomplete |= reason.is_limit

    @property
    def over_capacity(self) -> bool:
        """Whether there are more device copies than the device has room for."""
        return 0 < self.options.total_kv_blocks < self.holdings.device_copies

    def learn_group(self, group: int, full_attention: bool) -> bool:
        """Notes a group's kind the first time it is told; whether the group is full attention."""
        known = self.groups.get(group)
        if known is not None or len(self.groups) >= GROUP_LIMIT:
            return bool(known)
        self.groups[group] = full_attention
        if full_attention:
            self.holdings.set_full_groups(self.full_groups)
        return full_attention

    @property
    def full_groups(self) -> tuple[int, ...]:
        """The groups that must all have a block for it to be held."""
        return tuple(sorted(group for group, full in self.groups.items() if full))


class ReferenceDemotion:
    """A `slices.Work`: `BlockIndex.demotion`."""

    detached = False

    def __init__(self, holdings: Holdings | None, demote: Callable[[Holdings, int], int]) -> None:
        self.added = 0
        """Blocks that are predicted and were not before."""
        self._holdings = holdings
        self._demote = demote

    def step(self) -> bool:
        """See `Work.step`."""
        if self._holdings is None or not self._holdings.visible or self._holdings.demoting_until is None:
            return False
        self.added += self._demote(self._holdings, SLICE)
        return True


class ReferenceCut:
    """See `index.Cut`."""

    detached = False

    def __init__(self, head: WorkerDump, holdings: Holdings) -> None:
        self._holdings = holdings
        self._slices = state_dump.dump_holdings(holdings, head)
        self._dump: WorkerDump | None = None
        holdings.cuts.append(self)

    def step(self) -> bool:
        """See `Work.step`."""
        if self not in self._holdings.cuts:
            return False
        try:
            next(self._slices)
        except StopIteration as end:
            self._dump = end.value
            self._holdings.cuts.remove(self)
            return False
        return True

    def dump(self) -> WorkerDump | None:
        """See `Cut.dump`."""
        at_once(self)
        return self._dump


class ReferenceLoading:
    """See `index.Loading`."""

    detached = False

    def __init__(self, index: ReferenceIndex, dump: WorkerDump) -> None:
        self._index = index
        self._dump = dump
        self._filled: list[Holdings] = []
        self._slices = index.fill(dump, self._filled)
        self._content: object = None

    def step(self) -> bool:
        """See `Work.step`."""
        try:
            next(self._slices)
        except StopIteration as end:
            self._content = end.value or self._content
            return False
        except KvscoutError:
            self.abandon()
            raise
        return True

    def commit(self) -> bool:
        """See `Loading.commit`."""
        done = bool(self._filled) and self._index.replace(self._dump, self._filled[0], self._content)
        if done:
            self._filled.clear()
        self.abandon()
        return done

    def abandon(self) -> None:
        """See `Loading.abandon`."""
        self._slices.close()
        while self._filled:
            self._index.drop(self._filled.pop())


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
        self._eagle = eagle
        self._max_blocks = max_blocks
        self._tree = PrefixTree()
        self._predictions = Predictions(self._tree, max_blocks=max_predicted_blocks, prune_ratio=prune_ratio)
        self._workers: dict[WorkerRank, _Worker] = {}
        self._owners: list[WorkerRank | None] = []
        """Slot → worker; None where the slot is free or drained."""
        self._free_slots: list[int] = []
        self._live = 0
        """Slots that queries see."""
        self._dropped: deque[Holdings] = deque()
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
            self._workers[worker] = _Worker(options, self._new_holdings(worker))

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
        self._drop(known.holdings)
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
        self._drain(added)
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
                known.ignore(Ignored.BATCH_LIMIT, blocks)
                continue
            filled += blocks
            if known.incompatible:
                known.ignore(Ignored.INCOMPATIBLE)
            elif isinstance(event, Stored):
                self._stored(worker, known, event)
            else:
                self._removed(known, event)
            # Event by event, since each Cleared takes a slot.
            self._drain(blocks + 1)
        self._settle_windows(known, batch)
        self._move_cursor(worker, epoch, event_id)
        self._enforce_bound(filled)
        self._drain(_DRAINED_BY_APPLY)
        return Applied(len(batch.events), len(batch.faults), known.over_capacity, known.incompatible)

    def _stored(self, worker: WorkerRank, known: _Worker, event: Stored) -> None:
        """Judges one Stored event, in the order of `Ignored`, and stores what is left of it."""
        if not known.learn_group(event.group, event.full_attention):
            self._window_stored(known, event)
        elif not event.tokens and not event.local_hashes:
            self._moved(known, event)
        else:
            adapters = known.options.adapters
            verdict = judge_content(event, self._block_size, self._eagle, adapters)
            if verdict is Ignored.BLOCK_SIZE:
                known.incompatible = (
                    f"the engine's blocks have {event.block_size} tokens, the registration says {self._block_size}"
                )
                self._renew(worker, known)
            if verdict is not None:
                known.ignore(verdict)
                return
            self._store_chain(known, event, local_hashes_of(event, self._block_size, self._eagle, adapters))

    def _window_stored(self, known: _Worker, event: Stored) -> None:
        """Stores an event of a group that is not full attention, if it has a window."""
        holdings = known.holdings
        windows = WindowGroups(self._block_size) if holdings.windows is None else holdings.windows
        if known.groups.get(event.group) is not False or not windows.learn(event):
            known.ignore(Ignored.SKIPPED_GROUP)
            return
        holdings.windows = windows
        refused = windows.store(event, known.options.copies, self._max_blocks or WINDOW_LIMIT)
        known.ignore(Ignored.WINDOW_LIMIT, refused)

    def _settle_windows(self, known: _Worker, batch: EventBatch) -> None:
        """Finds the prefixes of what a batch stored in groups with a window."""
        windows = known.holdings.windows
        if windows is None:
            return
        blocks, sequence_hashes = known.holdings.blocks, sequence_hasher()

        def sequence_hash_of(engine_hash: int) -> int | None:
            block = blocks.get(engine_hash)
            return sequence_hashes(block.node) if block is not None else None

        rules = self._block_size, self._eagle, known.options.adapters
        groups = windows.groups

        def chains() -> Iterator[Chain]:
            for event in batch.events:
                if not isinstance(event, Stored) or event.group not in groups:
                    continue
                if (event.tokens or event.local_hashes) and judge_content(event, *rules) is None:
                    yield event.parent, event.engine_hashes, local_hashes_of(event, *rules)

        unknown = windows.settle(sequence_hash_of, chains)
        known.ignore(Ignored.UNKNOWN_MOVED, unknown)

    def _store_chain(self, known: _Worker, event: Stored, local_hashes: Sequence[int]) -> None:
        """Stores an event's blocks below their parent, or as orphans if it is unknown."""
        holdings = known.holdings
        if event.parent is not None:
            holdings.restore_evicted(event.parent)
        for engine_hash in event.engine_hashes:
            holdings.restore_evicted(engine_hash)
        above = self._tree.root if event.parent is None else holdings.prefix_of(event.parent)
        if above is None:
            self._store_orphans(known, event, local_hashes)
            return
        at, mode = (event.group, event.tier), known.options.copies
        refused_before = holdings.refused_twins
        for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
            above = self._tree.child(above, local)
            refused = holdings.refused_twins
            if holdings.store(engine_hash, above, at, mode):
                self._predictions.cancel(holdings, above)
            elif holdings.refused_twins == refused:
                known.ignore(Ignored.HASH_CONFLICT)
        known.ignore(Ignored.TWIN_LIMIT, holdings.refused_twins - refused_before)
        self._tree.touch(above)
        self._tree.prune(above)

    def _store_orphans(self, known: _Worker, event: Stored, local_hashes: Sequence[int]) -> None:
        holdings = known.holdings
        at, mode = (event.group, event.tier), known.options.copies
        parent = event.parent
        assert parent is not None
        for position, (engine_hash, local) in enumerate(zip(event.engine_hashes, local_hashes, strict=True)):
            rest = len(local_hashes) - position
            if not holdings.can_wait(engine_hash):
                known.ignore(Ignored.ORPHAN_LIMIT, rest)
                return
            if not holdings.store_orphan(engine_hash, parent, local, at, mode):
                # What follows hangs below a block that this event contradicts.
                known.ignore(Ignored.HASH_CONFLICT, rest)
                return
            parent = engine_hash

    def _moved(self, known: _Worker, event: Stored) -> None:
        holdings = known.holdings
        for engine_hash in event.engine_hashes:
            holdings.restore_evicted(engine_hash)
            ghost = holdings.ghosts.get(engine_hash)
            if ghost is not None:
                holdings.forget(engine_hash)
                back = replace(event, engine_hashes=(engine_hash,), parent=ghost.parent)
                self._store_chain(known, back, (ghost.local,))
            elif not holdings.move(engine_hash, (event.group, event.tier), known.options.copies):
                known.ignore(Ignored.UNKNOWN_MOVED)
            elif holdings.predictions:
                self._cancel_prediction(holdings, engine_hash)

    def _removed(self, known: _Worker, event: Removed) -> None:
        holdings = known.holdings
        if known.groups.get(event.group) is False:
            if holdings.windows is None or event.group not in holdings.windows.groups:
                known.ignore(Ignored.SKIPPED_GROUP)
            elif unknown := holdings.windows.remove(event):
                known.ignore(Ignored.UNKNOWN_REMOVED, unknown)
            return
        for engine_hash in event.engine_hashes:
            if holdings.predictions:
                self._cancel_prediction(holdings, engine_hash)
            if not holdings.remove(engine_hash, (event.group, event.tier)) and not holdings.retire_demoted(engine_hash):
                known.ignore(Ignored.UNKNOWN_REMOVED)
        holdings.names_gone.clear()

    def _cancel_prediction(self, holdings: Holdings, engine_hash: int) -> None:
        node = holdings.prefix_of(engine_hash)
        if node is not None:
            self._predictions.cancel(holdings, node)

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
        columns, deepest = match(self._tree, hashes, self._live, early_exit)
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
        owners = tuple(owner for owner in (self._owners[slot] for slot, _ in found) if owner is not None)
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
        self._drain(added)
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
        holdings = self._new_holdings(None)
        aside.append(holdings)
        holdings.set_full_groups(tuple(sorted(group for group, full in dump.groups if full)))
        holdings.incomplete = dump.incomplete
        if dump.windows:
            holdings.windows = WindowGroups(self._block_size, dump.windows)
        for _ in state_dump.load_holdings(holdings, dump):
            self._drain(SLICE)
            yield
        return content

    def replace(self, dump: WorkerDump, holdings: Holdings, content: object) -> bool:
        """Puts what was filled in place of a content; False: that is gone."""
        known = self._workers.get(dump.worker)
        if known is None or known.content is not content:
            return False
        self._drop(known.holdings)
        known.holdings = holdings
        known.content = object()
        known.epoch, known.last_event_id = dump.epoch, dump.last_event_id
        known.incompatible = dump.incompatible
        known.groups = dict(dump.groups)
        self._owners[holdings.slot] = dump.worker
        self._live |= holdings.bit
        self._enforce_bound(len(dump.blocks) + len(dump.orphans))
        return True

    def drop(self, holdings: Holdings) -> None:
        """Drops what was filled and is not put in place."""
        self._drop(holdings)

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
        left = budget - self._drain(budget)
        for known in self._workers.values():
            if known.holdings.demoting_until is not None:
                left -= self._demote(known.holdings, left)
                waiting = waiting or known.holdings.demoting_until is not None
            left -= known.holdings.expire_demoted(now, left)
            waiting = waiting or bool(known.holdings.demoted and now >= known.holdings.demoted_until)
        return bool(self._dropped) or waiting

    def check_invariants(self) -> None:
        """See `BlockIndex.check_invariants`."""
        visible = [known.holdings for known in self._workers.values()]
        state_dump.check_holdings(self._tree, visible, list(self._dropped))
        for counted in (sum(h.entries for h in visible), sum(len(h.gone) for h in visible)):
            assert not self._max_blocks or counted <= self._max_blocks, "max_blocks is kept"
        assert len(self._predictions) == sum(len(h.predictions) for h in visible), "predictions are counted"
        assert self._live == sum(h.bit for h in visible), "live slots are those of the workers"
        for worker, known in self._workers.items():
            assert self._owners[known.holdings.slot] == worker, "slots name their owners"
            assert known.holdings.full_groups == known.full_groups, "holdings know the groups"

    # Slots and bounds

    def _new_holdings(self, worker: WorkerRank | None) -> Holdings:
        """Empty ones of a worker; of None, such as no query sees."""
        if self._free_slots:
            slot = self._free_slots.pop()
            self._owners[slot] = worker
        else:
            slot = len(self._owners)
            self._owners.append(worker)
        holdings = Holdings(self._tree, slot)
        if worker is not None:
            self._live |= holdings.bit
        return holdings

    def _renew(self, worker: WorkerRank, known: _Worker) -> None:
        """Empties a worker at once; its groups stay known."""
        windows = known.holdings.windows
        self._drop(known.holdings)
        known.holdings = self._new_holdings(worker)
        known.holdings.set_full_groups(known.full_groups)
        known.holdings.windows = windows.emptied() if windows is not None else None

    def _drop(self, holdings: Holdings) -> None:
        self._live &= ~holdings.bit
        self._owners[holdings.slot] = None
        self._predictions.forget(holdings)
        holdings.visible = False
        holdings.cuts.clear()
        self._dropped.append(holdings)

    def _drain(self, budget: int) -> int:
        """Frees content that was dropped, at most `budget` blocks; how many it freed."""
        left = budget
        while self._dropped and left > 0:
            holdings = self._dropped[0]
            left -= holdings.drain(left)
            if holdings.drained:
                self._dropped.popleft()
                self._free_slots.append(holdings.slot)
        return budget - left

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
