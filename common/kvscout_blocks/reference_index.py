"""The block index in plain Python: the reference that the native twin is compared with.

::

    apply ── judge each event (the order of `Ignored`) ──▶ Holdings of the worker ──▶ PrefixTree
    find_matches ── walk the tree, one AND a column and block ──▶ slots ──▶ worker ranks

A worker's content sits in one slot of the tree. Dropping it (Cleared, reset, removal) takes the slot's bit
out of `_live`, which empties the worker for all readers at once, and gives it a new slot; the old one is
drained in slices, then used again. Not thread-safe: one event loop owns it.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from kvscout_blocks import bound, state_dump
from kvscout_blocks.acceptance import judge_content, local_hashes_of
from kvscout_blocks.events import Cleared, EventBatch, Removed, Stored
from kvscout_blocks.holdings import Holdings
from kvscout_blocks.index import (
    DEFAULT_MAX_PREDICTED_BLOCKS,
    DEFAULT_PRUNE_RATIO,
    GROUP_LIMIT,
    Applied,
    Ignored,
    IndexStats,
    Overlaps,
    WorkerDump,
    WorkerOptions,
    WorkerStats,
)
from kvscout_blocks.predictions import Predictions
from kvscout_blocks.prefix_tree import PrefixTree, match
from kvscout_blocks.wire import MalformedBatch, decode_batch
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.worker import WorkerRank

_DRAINED_BY_APPLY = 512
"""Blocks of dropped content that each `apply` frees beside as many as its batch has. Whatever else fills the
index frees as much as it fills, too: so the memory of dropped content shrinks, whatever the calls are."""

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
        self.groups: dict[int, bool] = {}
        """Known cache groups, and whether each is full attention."""
        self.incompatible = ""
        self.ignored: Counter[Ignored] = Counter()

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
        if block_size < 1:
            raise InvalidArgument("must be at least 1 token", field="block_size")
        if max_blocks < 0:
            raise InvalidArgument("must not be negative", field="max_blocks")
        if max_predicted_blocks < 1:
            raise InvalidArgument("must be at least 1", field="max_predicted_blocks")
        if not 0 < prune_ratio <= 1:
            raise InvalidArgument("must be above 0 and at most 1", field="prune_ratio")
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
        known.epoch, known.last_event_id, known.incompatible = 0, None, ""
        self._renew(worker, known)

    def demote(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> int:
        """See `BlockIndex.demote`."""
        known = self._workers.get(worker)
        if known is None:
            return 0
        holdings = known.holdings
        on_device = holdings.demote(now + ttl_seconds)
        added = self._predictions.add(holdings, on_device, now + ttl_seconds)
        self._drain(added)
        return added

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
        for event in batch.events:
            if isinstance(event, Cleared):
                self._renew(worker, known)
                continue
            if known.incompatible:
                known.ignored[Ignored.INCOMPATIBLE] += 1
            elif isinstance(event, Stored):
                self._stored(worker, known, event)
            else:
                self._removed(known, event)
            # Event by event, since each Cleared takes a slot.
            self._drain(len(event.engine_hashes) + 1)
        self._move_cursor(worker, epoch, event_id)
        self._enforce_bound(sum(len(event.engine_hashes) for event in batch.events if not isinstance(event, Cleared)))
        self._drain(_DRAINED_BY_APPLY)
        return Applied(len(batch.events), len(batch.faults), known.over_capacity, known.incompatible)

    def _stored(self, worker: WorkerRank, known: _Worker, event: Stored) -> None:
        """Judges one Stored event, in the order of `Ignored`, and stores what is left of it."""
        if not known.learn_group(event.group, event.full_attention):
            known.ignored[Ignored.SKIPPED_GROUP] += 1
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
                known.ignored[verdict] += 1
                return
            self._store_chain(known, event, local_hashes_of(event, self._block_size, self._eagle, adapters))

    def _store_chain(self, known: _Worker, event: Stored, local_hashes: Sequence[int]) -> None:
        """Stores an event's blocks below their parent, or as orphans if it is unknown."""
        holdings = known.holdings
        above = self._tree.root if event.parent is None else holdings.prefix_of(event.parent)
        if above is None:
            self._store_orphans(known, event, local_hashes)
            return
        at, mode = (event.group, event.tier), known.options.copies
        for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
            above = self._tree.child(above, local)
            if holdings.store(engine_hash, above, at, mode):
                self._predictions.cancel(holdings, above)
            else:
                known.ignored[Ignored.HASH_CONFLICT] += 1
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
                known.ignored[Ignored.ORPHAN_LIMIT] += rest
                return
            if not holdings.store_orphan(engine_hash, parent, local, at, mode):
                # What follows hangs below a block that this event contradicts.
                known.ignored[Ignored.HASH_CONFLICT] += rest
                return
            parent = engine_hash

    def _moved(self, known: _Worker, event: Stored) -> None:
        holdings = known.holdings
        for engine_hash in event.engine_hashes:
            if not holdings.move(engine_hash, (event.group, event.tier), known.options.copies):
                known.ignored[Ignored.UNKNOWN_MOVED] += 1
            elif holdings.predictions:
                self._cancel_prediction(holdings, engine_hash)

    def _removed(self, known: _Worker, event: Removed) -> None:
        if known.groups.get(event.group) is False:
            known.ignored[Ignored.SKIPPED_GROUP] += 1
            return
        holdings = known.holdings
        for engine_hash in event.engine_hashes:
            if holdings.predictions:
                self._cancel_prediction(holdings, engine_hash)
            if not holdings.remove(engine_hash, (event.group, event.tier)) and not holdings.retire_demoted(engine_hash):
                known.ignored[Ignored.UNKNOWN_REMOVED] += 1

    def _cancel_prediction(self, holdings: Holdings, engine_hash: int) -> None:
        node = holdings.prefix_of(engine_hash)
        if node is not None:
            self._predictions.cancel(holdings, node)

    def _move_cursor(self, worker: WorkerRank, epoch: int, event_id: int | None) -> None:
        known = self._workers.get(worker)
        if known is not None and event_id is not None:
            known.epoch, known.last_event_id = epoch, event_id

    # Queries

    def find_matches(self, block_hashes: Sequence[int] | bytes, *, now: float, early_exit: bool = False) -> Overlaps:
        """See `BlockIndex.find_matches`."""
        self._queries += 1
        self._predictions.expire(now)
        columns, deepest = match(self._tree, _integers(block_hashes), self._live, early_exit)
        self._tree.touch(deepest)
        device, host, disk, external, predicted = columns
        # A slot with a block in any column has one in `external` or in `predicted`.
        slots = sorted(external.keys() | predicted.keys())
        return Overlaps(
            tuple(owner for owner in (self._owners[slot] for slot in slots) if owner is not None),
            tuple(device.get(slot, 0) for slot in slots),
            tuple(host.get(slot, 0) for slot in slots),
            tuple(disk.get(slot, 0) for slot in slots),
            tuple(external.get(slot, 0) for slot in slots),
            tuple(predicted.get(slot, 0) for slot in slots),
        )

    def predict(
        self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, ttl_seconds: float, now: float
    ) -> int:
        """See `BlockIndex.predict`."""
        known = self._workers.get(worker)
        if known is None:
            return 0
        holdings = known.holdings
        self._predictions.expire(now)
        path = []
        node = self._tree.root
        for local in _integers(block_hashes):
            node = self._tree.child(node, local)
            path.append(node)
        added = self._predictions.add(holdings, [n for n in path if not n.masks[0] & holdings.bit], now + ttl_seconds)
        self._tree.prune(node)
        self._drain(added)
        return added

    # State

    def dump(self, worker: WorkerRank) -> WorkerDump | None:
        """See `BlockIndex.dump`."""
        known = self._workers.get(worker)
        if known is None:
            return None
        blocks, orphans = state_dump.dump_holdings(known.holdings)
        return WorkerDump(
            worker,
            known.epoch,
            known.last_event_id,
            tuple(sorted(known.groups.items())),
            blocks,
            orphans,
            known.incompatible,
        )

    def load(self, dump: WorkerDump) -> None:
        """See `BlockIndex.load`."""
        known = self._workers.get(dump.worker)
        if known is None:
            raise NotFound(f"worker {dump.worker.worker_id} rank {dump.worker.dp_rank} is not known")
        state_dump.check(dump)
        self.reset(dump.worker)
        known.epoch, known.last_event_id = dump.epoch, dump.last_event_id
        known.incompatible = dump.incompatible
        known.groups = dict(dump.groups)
        known.holdings.set_full_groups(known.full_groups)
        state_dump.load_holdings(known.holdings, dump)
        self._enforce_bound(len(dump.blocks) + len(dump.orphans))
        self._drain(len(dump.blocks))

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
            ghosts=len(holdings.ghosts),
            predictions=len(holdings.predictions),
            device_copies=holdings.device_copies,
            over_capacity=known.over_capacity,
            incompatible=known.incompatible,
            ignored=dict(known.ignored),
        )

    def stats(self) -> IndexStats:
        """See `BlockIndex.stats`."""
        everyone = [known.holdings for known in self._workers.values()]
        bindings = sum(len(h.blocks) + len(h.orphans) + len(h.ghosts) for h in everyone)
        return IndexStats(
            blocks=self._tree.held,
            memberships=sum(h.held for h in everyone),
            workers=sum(1 for h in everyone if h.held),
            orphans=sum(len(h.orphans) for h in everyone),
            hidden=sum(h.hidden() for h in everyone),
            ghosts=sum(len(h.ghosts) for h in everyone),
            predictions=len(self._predictions),
            bytes=self._tree.nodes * _NODE_BYTES + bindings * _BINDING_BYTES,
            evicted=self._evicted,
            queries=self._queries,
            unknown_worker=self._unknown_worker,
        )

    def maintain(self, *, now: float, budget: int = 4096) -> bool:
        """See `BlockIndex.maintain`."""
        self._predictions.expire(now)
        left = budget - self._drain(budget)
        waiting = False
        for known in self._workers.values():
            left -= known.holdings.expire_demoted(now, left)
            waiting = waiting or bool(known.holdings.demoted and now >= known.holdings.demoted_until)
        return bool(self._dropped) or waiting

    def check_invariants(self) -> None:
        """See `BlockIndex.check_invariants`."""
        visible = [known.holdings for known in self._workers.values()]
        state_dump.check_holdings(self._tree, visible, list(self._dropped))
        entries = sum(h.entries for h in visible)
        assert not self._max_blocks or entries <= self._max_blocks, "max_blocks is kept"
        assert len(self._predictions) == sum(len(h.predictions) for h in visible), "predictions are counted"
        assert self._live == sum(h.bit for h in visible), "live slots are those of the workers"
        for worker, known in self._workers.items():
            assert self._owners[known.holdings.slot] == worker, "slots name their owners"
            assert known.holdings.full_groups == known.full_groups, "holdings know the groups"

    # Slots and bounds

    def _new_holdings(self, worker: WorkerRank) -> Holdings:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._owners[slot] = worker
        else:
            slot = len(self._owners)
            self._owners.append(worker)
        holdings = Holdings(self._tree, slot)
        self._live |= holdings.bit
        return holdings

    def _renew(self, worker: WorkerRank, known: _Worker) -> None:
        """Empties a worker at once; its groups stay known."""
        self._drop(known.holdings)
        known.holdings = self._new_holdings(worker)
        known.holdings.set_full_groups(known.full_groups)

    def _drop(self, holdings: Holdings) -> None:
        self._live &= ~holdings.bit
        self._owners[holdings.slot] = None
        self._predictions.forget(holdings)
        holdings.visible = False
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
        self._evicted += bound.enforce([known.holdings for known in self._workers.values()], self._max_blocks)


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
