"""The block index in plain Python: the readable, slow definition with which the native backend is compared.

::

    apply ── Worker: judge each event (the order of `Ignored`), bind engine hashes to prefixes
    find_matches ── the nodes of the prompt ──▶ leading ones that each worker holds

Not thread-safe: one event loop owns it. Work on a whole rank is done in one step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.codec import decode_events, encode_dump, encode_events, read_dump
from kvscout_blocks.bytes.dump import WorkerDump
from kvscout_blocks.bytes.events import Cleared, DecodedBatch, Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_blocks.bytes.messages import Published, parse_batch
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.block_index import (
    BATCH_LIMIT,
    SLICE,
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
from kvscout_blocks.index.reference_dump import check_dump
from kvscout_blocks.index.reference_shared import SharedCache
from kvscout_blocks.index.reference_worker import Clock, Prefix, Worker
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.hashing import extend_sequence
from kvscout_common.worker import PoolKey, WorkerRank

_BINDING_BYTES = 780
"""Rough, on CPython 3.11."""


class ReferenceIndex(BlockIndex):
    """The block index in plain Python."""

    def _begin(self) -> None:
        self._clock = Clock()
        self._workers: dict[WorkerRank, Worker] = {}
        self._shared: dict[str, SharedCache] = {}
        self._evicted = 0
        self._queries = 0
        self._unknown_worker = 0

    # Workers

    def add_worker(self, worker: WorkerRank, options: WorkerOptions) -> None:
        old = self._workers.get(worker)
        if old is not None:
            if old.options.shared.name != options.shared.name:
                self._leave_shared(worker, old)
            old.options = options
        else:
            self._workers[worker] = Worker(self._clock, self.block_size, self.eagle, self.max_blocks, options)
        if options.shared.name:
            cache = self._shared.setdefault(options.shared.name, SharedCache())
            cache.join(worker, options.shared.blocks, self.max_blocks)

    def remove_rank(self, worker: WorkerRank) -> bool:
        old = self._workers.pop(worker, None)
        if old is not None:
            self._leave_shared(worker, old)
        return old is not None

    def _leave_shared(self, worker: WorkerRank, known: Worker) -> None:
        name = known.options.shared.name
        if name and self._shared[name].leave(worker):
            del self._shared[name]

    def reset(self, worker: WorkerRank) -> None:
        if worker in self._workers:
            self._empty(worker)
            name = self._workers[worker].options.shared.name
            if name:
                self._shared[name].agreement[worker] = 0

    def _empty(self, worker: WorkerRank) -> None:
        old = self._workers.pop(worker)
        self.add_worker(worker, old.options)
        self._workers[worker].ignored = old.ignored

    def workers(self) -> tuple[WorkerRank, ...]:
        return tuple(sorted(self._workers))

    def cursor(self, worker: WorkerRank) -> tuple[int, int | None] | None:
        known = self._workers.get(worker)
        return (known.epoch, known.last_event_id) if known is not None else None

    # Events

    def decode(self, payload: bytes) -> EventBatch:
        return decode_batch(payload)

    def decode_message(self, message: bytes) -> Published:
        return decode_events(parse_batch(message))

    def apply_payload(
        self, worker: WorkerRank, payload: bytes, *, epoch: int = 0, event_id: int | None = None
    ) -> Applied:
        try:
            batch = decode_batch(payload)
        except MalformedBatch:
            self._move_cursor(worker, epoch, event_id)
            raise
        return self.apply(worker, batch, epoch=epoch, event_id=event_id)

    def apply(self, worker: WorkerRank, batch: DecodedBatch, *, epoch: int = 0, event_id: int | None = None) -> Applied:
        assert isinstance(batch, EventBatch)
        known = self._workers.get(worker)
        if known is None:
            self._unknown_worker += 1
            return Applied(len(batch.events), len(batch.faults), False, "")
        self._clock.now += 1
        applied = 0
        for event in map(known.on_shared_tier, batch.events):
            blocks = 0 if isinstance(event, Cleared) else len(event.engine_hashes)
            if isinstance(event, Cleared):
                known.clear()
            elif applied + blocks > BATCH_LIMIT:
                if isinstance(event, Removed):
                    # Which of its blocks are left is unknown.
                    known.clear()
                known.ignore(Ignored.BATCH_LIMIT, blocks)
                continue
            elif known.incompatible:
                known.ignore(Ignored.INCOMPATIBLE)
            elif isinstance(event, Stored):
                known.store(event)
            else:
                known.remove(event)
            self._share(worker, known, event)
            applied += blocks
        known.settle_windows(batch)
        self._move_cursor(worker, epoch, event_id)
        self._enforce_bound()
        return Applied(len(batch.events), len(batch.faults), known.over_capacity, known.incompatible)

    def _share(self, worker: WorkerRank, known: Worker, event: Event) -> None:
        """Share what an event that was just applied says of the external tier."""
        cache = self._shared.get(known.options.shared.name)
        if cache is None or not known.may_share:
            return
        if isinstance(event, Cleared):
            cache.clear(worker)
        elif event.tier is not Tier.EXTERNAL:
            return
        elif isinstance(event, Removed):
            cache.remove(event.engine_hashes)
        else:
            cache.store(worker, _named(known, cache, event.engine_hashes))

    def _move_cursor(self, worker: WorkerRank, epoch: int, event_id: int | None) -> None:
        known = self._workers.get(worker)
        if known is not None and event_id is not None:
            known.epoch, known.last_event_id = epoch, event_id

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
        assert isinstance(batch, EventBatch)
        return encode_events(pool, adapters, worker, batch, epoch=epoch, event_id=event_id).SerializeToString()

    def demotion(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> Demotion:
        known, done = self._workers.get(worker), Demotion()
        if known is not None:
            done.added = self._predict(known, known.demote(now + ttl_seconds), now + ttl_seconds)
        return done

    def _enforce_bound(self) -> None:
        """Drop blocks above the bound, and a little more; see the invariants of `block_index`."""
        most, everyone = self.max_blocks, sorted(self._workers.values(), key=_entries, reverse=True)
        entries = sum(map(_entries, everyone))
        surplus = entries - most + min(most // 64, SLICE) if 0 < most < entries else 0
        self._evicted += surplus
        for worker in everyone:
            surplus -= worker.evict(surplus, unmatchable=True) if surplus else 0
        while surplus:
            surplus -= max(everyone, key=_entries).evict(surplus, unmatchable=False)
        for _ in range(sum(len(worker.gone) for worker in everyone) - most if most else 0):
            max(everyone, key=lambda worker: len(worker.gone)).forget_oldest_ghost()

    # Queries

    def find_matches(
        self, block_hashes: Sequence[int] | bytes, *, now: float, early_exit: bool = False, usable: int | None = None
    ) -> Overlaps:
        self._queries += 1
        self._clock.now += 1
        self._expire(now)
        path = _prefixes(block_hashes)
        most = len(path) if usable is None else usable
        rows = {rank: worker.overlap(path, most) for rank, worker in self._workers.items()}
        reach = max((max(row) for row in rows.values()), default=0)
        self._clock.touch(path[reach - 1] if reach else None)
        for rank, row in rows.items():
            cache = self._shared.get(self._workers[rank].options.shared.name)
            if cache is not None and self._workers[rank].may_share and cache.agreement[rank] >= 0:
                rows[rank] = row._replace(external=cache.run_from(path, row.disk))
        found = {rank: row for rank, row in rows.items() if any(row)}
        return Overlaps(tuple(found), *zip(*found.values(), strict=True)) if found else Overlaps()

    def incomplete(self) -> frozenset[WorkerRank]:
        return frozenset(rank for rank, worker in self._workers.items() if worker.incomplete)

    def repeated(self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, first: int) -> int:
        known = self._workers.get(worker)
        return 0 if known is None else sum(map(known.is_repeated, _prefixes(block_hashes)[first:]))

    def predict(
        self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, ttl_seconds: float, now: float
    ) -> int:
        known = self._workers.get(worker)
        if known is None:
            return 0
        self._expire(now)
        nodes = [node for node in _prefixes(block_hashes) if known.level(node) != Tier.DEVICE]
        return self._predict(known, nodes, now + ttl_seconds)

    def _predict(self, worker: Worker, nodes: Sequence[Prefix], until: float) -> int:
        """Predict nodes; above the maximum prune, soonest to expire first, the deepest before their parents."""
        added, total = worker.predict(nodes, until), self._predicted()
        if total > self.max_predicted_blocks:
            owners = ((owner, node) for owner in self._workers.values() for node in owner.predictions)
            in_order = sorted(owners, key=lambda pair: (pair[0].predictions[pair[1]], -pair[1].depth))
            for owner, node in in_order[: total - int(self.max_predicted_blocks * self.prune_ratio)]:
                del owner.predictions[node]
        return added

    def _predicted(self) -> int:
        return sum(len(worker.predictions) for worker in self._workers.values())

    def _expire(self, now: float) -> None:
        for worker in self._workers.values():
            worker.expire(now)

    def maintain(self, *, now: float, budget: int = 4096) -> bool:
        self._expire(now)
        named = {node for worker in self._workers.values() for node in worker.names}
        self._clock.used = {node: at for node, at in self._clock.used.items() if node in named}
        return False

    # State

    def cut(self, worker: WorkerRank) -> Cut | None:
        known = self._workers.get(worker)
        return _Copied(known.dump(worker)) if known is not None else None

    def loading(self, dump: WorkerDump) -> Loading:
        return Loading(lambda: self._begin_load(dump))

    def loading_messages(self, messages: Sequence[bytes]) -> Loading:
        return Loading(lambda: self._begin_load(read_dump(messages).dump))

    def _begin_load(self, dump: WorkerDump) -> _Load:
        if dump.worker not in self._workers:
            raise NotFound(f"worker {dump.worker.worker_id} rank {dump.worker.dp_rank} is not known")
        check_dump(dump, self.block_size)
        return _Load(self, self._workers[dump.worker], dump)

    def replace(self, old: Worker, dump: WorkerDump) -> bool:
        """Put a dump that was checked in place of a worker's state; False: another one began meanwhile."""
        if self._workers.get(dump.worker) is not old:
            return False
        self._empty(dump.worker)
        new = self._workers[dump.worker]
        new.fill(dump)
        cache = self._shared.get(new.options.shared.name)
        if cache is not None and new.may_share:
            on_tier = [name for name, counts in new.counts.items() if any(tier is Tier.EXTERNAL for _, tier in counts)]
            cache.store(dump.worker, [(name, new.nodes[name]) for name in on_tier if name in new.nodes])
        self._enforce_bound()
        return True

    def worker_stats(self, worker: WorkerRank) -> WorkerStats | None:
        known = self._workers.get(worker)
        if known is None:
            return None
        judged = known.windows.groups
        return WorkerStats(
            blocks=len(known.held()),
            hidden=len(known.held()) - len(known.rooted()),
            orphans=len(known.orphans),
            ghosts=len(known.gone),
            predictions=len(known.predictions),
            device_copies=known.device_copies,
            window_blocks=len(known.windows.blocks),
            unjudged_groups=[group for group, full in sorted(known.groups.items()) if not full and group not in judged],
            over_capacity=known.over_capacity,
            incomplete=known.incomplete,
            incompatible=known.incompatible,
            ignored=dict(known.ignored),
        )

    def stats(self) -> IndexStats:
        each = [stats for stats in map(self.worker_stats, self._workers) if stats is not None]
        bindings = sum(len(worker.counts) + len(worker.gone) for worker in self._workers.values())
        return IndexStats(
            blocks=len({node for worker in self._workers.values() for node in worker.held()}),
            memberships=sum(stats.blocks for stats in each),
            workers=sum(stats.blocks > 0 for stats in each),
            orphans=sum(stats.orphans for stats in each),
            hidden=sum(stats.hidden for stats in each),
            ghosts=sum(stats.ghosts for stats in each),
            predictions=self._predicted(),
            bytes=(bindings + self._predicted()) * _BINDING_BYTES,
            evicted=self._evicted,
            queries=self._queries,
            unknown_worker=self._unknown_worker,
        )

    def shared_caches(self) -> tuple[SharedCacheStats, ...]:
        return tuple(cache.stats(name) for name, cache in sorted(self._shared.items()))

    def check_invariants(self) -> None:
        for cache in self._shared.values():
            cache.check()
        for worker in self._workers.values():
            worker.check_invariants()
        if self.max_blocks:
            assert sum(map(_entries, self._workers.values())) <= self.max_blocks, "blocks are bounded"
            assert sum(len(worker.gone) for worker in self._workers.values()) <= self.max_blocks, "ghosts are bounded"


class _Copied(Cut):
    def __init__(self, dump: WorkerDump) -> None:
        self._dump = dump

    def dump(self) -> WorkerDump:
        return self._dump

    def messages(self, pool: PoolKey, *, history_incomplete: bool, epoch: int | None = None) -> list[bytes]:
        dump = self._dump if epoch is None else replace(self._dump, epoch=epoch)
        messages = encode_dump(pool, dump, history_incomplete=history_incomplete)
        return [message.SerializeToString() for message in messages]


class _Load(NamedTuple):
    """A dump that was checked, and the worker whose state it is to replace."""

    blocks: ReferenceIndex
    old: Worker
    dump: WorkerDump

    def step(self) -> bool:
        return False

    def commit(self) -> bool:
        return self.blocks.replace(self.old, self.dump)


def _named(known: Worker, cache: SharedCache, engine_hashes: Iterable[int]) -> list[tuple[int, int]]:
    """Return engine and sequence hash of the blocks of an event whose prefix is known: to the worker, or the cache."""
    named: list[tuple[int, int]] = []
    for name in engine_hashes:
        orphan = known.orphans.get(name)
        if orphan is not None:
            above = cache.blocks[orphan.parent].prefix if orphan.parent in cache.blocks else None
            if named and named[-1][0] == orphan.parent:
                above = named[-1][1]
            if above is not None:
                named.append((name, extend_sequence(above, orphan.local)))
        elif name in known.nodes and name in known.counts:
            named.append((name, known.nodes[name]))
    return named


def _entries(worker: Worker) -> int:
    """Return what the bound counts of a worker: its bound hashes and orphans."""
    return len(worker.counts)


def _prefixes(block_hashes: Sequence[int] | bytes) -> list[Prefix]:
    """Return the prefixes of a prompt, one a block."""
    if isinstance(block_hashes, bytes):
        if len(block_hashes) % 8:
            raise InvalidArgument("not whole 64-bit hashes", field="block_hashes")
        block_hashes = struct.unpack(f"<{len(block_hashes) // 8}Q", block_hashes)
    prefixes: list[Prefix] = []
    for local in block_hashes:
        prefixes.append(Prefix(prefixes[-1] if prefixes else None, local))
    return prefixes
