"""The block index in plain Python: the readable, slow definition with which the native backend is compared.

::

    apply ── Worker: judge each event (the order of `Ignored`), bind engine hashes to prefixes
    find_matches ── the nodes of the prompt ──▶ leading ones that each worker holds

Not thread-safe: one event loop owns it. Work on a whole rank is done at once.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.codec import decode_events, encode_dump, encode_events, read_dump
from kvscout_blocks.bytes.dump import DumpedBlock, DumpedOrphan, DumpedWindowBlock, WorkerDump
from kvscout_blocks.bytes.events import Cleared, DecodedBatch, EventBatch, Removed, Stored
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_blocks.bytes.messages import Published, parse_batch
from kvscout_blocks.bytes.wire import decode_batch
from kvscout_blocks.index.block_index import (
    BATCH_LIMIT,
    GROUP_LIMIT,
    MAX_COPIES,
    ORPHAN_LIMIT,
    SLICE,
    Applied,
    BlockIndex,
    Cut,
    Demotion,
    IndexStats,
    Loading,
    Overlaps,
    WorkerOptions,
    WorkerStats,
)
from kvscout_blocks.index.reference_worker import Node, PrefixTree, Worker
from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_common.hashing import sequence_hashes
from kvscout_common.worker import PoolKey, WorkerRank

_NODE_BYTES = 420
_BINDING_BYTES = 360
"""Rough, on CPython 3.11."""


class ReferenceIndex(BlockIndex):
    """The block index in plain Python."""

    def _begin(self) -> None:
        self._tree = PrefixTree()
        self._workers: dict[WorkerRank, Worker] = {}
        self._expiries: list[tuple[float, int, int, Worker, Node]] = []
        """Heap of predictions, soonest to expire first, deeper blocks before their parents. An entry whose expiry is
        not that of its worker's prediction is stale."""
        self._serial = count()
        self._stored = 0
        """Blocks stored in this round of the bound's clock."""
        self._evicted = 0
        self._queries = 0
        self._unknown_worker = 0

    # Workers

    def add_worker(self, worker: WorkerRank, options: WorkerOptions) -> None:
        if worker in self._workers:
            self._workers[worker].options = options
        else:
            self._workers[worker] = self._new_worker(options)

    def _new_worker(self, options: WorkerOptions) -> Worker:
        return Worker(self._tree, self.block_size, self.eagle, self.max_blocks, options)

    def remove_rank(self, worker: WorkerRank) -> bool:
        known = self._workers.pop(worker, None)
        if known is not None:
            known.clear()
        return known is not None

    def reset(self, worker: WorkerRank) -> None:
        known = self._workers.get(worker)
        if known is not None:
            self._replace(worker, known, self._new_worker(known.options))

    def _replace(self, worker: WorkerRank, old: Worker, new: Worker) -> None:
        new.ignored = old.ignored
        self._workers[worker] = new
        old.clear()

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
        applied = 0
        for event in batch.events:
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
            applied += blocks
        known.settle_windows(batch)
        self._move_cursor(worker, epoch, event_id)
        self._enforce_bound(applied)
        return Applied(len(batch.events), len(batch.faults), known.over_capacity, known.incompatible)

    def _move_cursor(self, worker: WorkerRank, epoch: int, event_id: int | None) -> None:
        known = self._workers.get(worker)
        if known is not None and event_id is not None:
            known.epoch, known.last_event_id = epoch, event_id

    def demotion(self, worker: WorkerRank, *, ttl_seconds: float, now: float) -> Demotion:
        known, done = self._workers.get(worker), _Demoted()
        if known is not None:
            done.added = self._predict(known, known.demote(now + ttl_seconds), now + ttl_seconds)
        return done

    def _enforce_bound(self, stored: int) -> None:
        """Drop blocks above the bound, and a little more; see the invariants of `block_index`."""
        most = self.max_blocks
        if not most:
            return
        self._stored += stored
        if self._stored >= max(most // 64, 1):
            self._stored = 0
            self._tree.round += 1
        everyone = sorted(self._workers.values(), key=lambda worker: worker.entries, reverse=True)
        entries = sum(worker.entries for worker in everyone)
        surplus = entries - most + min(most // 64, SLICE) if entries > most else 0
        for worker in everyone:
            surplus -= worker.evict_unmatchable(surplus)
        while surplus > 0:
            largest = max(everyone, key=lambda worker: worker.entries)
            surplus -= largest.evict(largest.bound_nodes(), surplus)
        self._evicted += entries - sum(worker.entries for worker in everyone)
        for _ in range(sum(len(worker.gone) for worker in everyone) - most):
            max(everyone, key=lambda worker: len(worker.gone)).forget_oldest_ghost()

    # Queries

    def find_matches(
        self, block_hashes: Sequence[int] | bytes, *, now: float, early_exit: bool = False, usable: int | None = None
    ) -> Overlaps:
        self._queries += 1
        self._expire(now)
        hashes = _integers(block_hashes)
        path = self._tree.path(hashes)
        if path:
            self._tree.touch(path[-1])
        has_windows = any(worker.windows is not None for worker in self._workers.values())
        prefixes = sequence_hashes(hashes) if has_windows else []
        most = len(hashes) if usable is None else usable
        rows = {rank: worker.overlap(path, prefixes, most) for rank, worker in self._workers.items()}
        found = {rank: row for rank, row in rows.items() if any(row)}
        return Overlaps(tuple(found), *zip(*found.values(), strict=True)) if found else Overlaps()

    def incomplete(self) -> frozenset[WorkerRank]:
        return frozenset(rank for rank, worker in self._workers.items() if worker.incomplete)

    def predict(
        self, worker: WorkerRank, block_hashes: Sequence[int] | bytes, *, ttl_seconds: float, now: float
    ) -> int:
        known = self._workers.get(worker)
        if known is None:
            return 0
        self._expire(now)
        path = [self._tree.root]
        for local in _integers(block_hashes):
            path.append(self._tree.child(path[-1], local))
        return self._predict(known, [node for node in path[1:] if known.levels.get(node) != 0], now + ttl_seconds)

    def _predict(self, worker: Worker, nodes: Iterable[Node], expiry: float) -> int:
        """Predict nodes for a worker or refresh them; return the number of those that were not predicted before."""
        before = len(worker.predictions)
        for node in nodes:
            if worker.predictions.get(node, -math.inf) < expiry:
                worker.predictions[node] = expiry
                heapq.heappush(self._expiries, (expiry, -node.depth, next(self._serial), worker, node))
        added = len(worker.predictions) - before
        if self._predicted() > self.max_predicted_blocks:
            while self._predicted() > int(self.max_predicted_blocks * self.prune_ratio):
                self._end_soonest()
        if len(self._expiries) > 2 * self._predicted() + 1024:
            self._expiries = [entry for entry in self._expiries if entry[3].predictions.get(entry[4]) == entry[0]]
            heapq.heapify(self._expiries)
        return added

    def _predicted(self) -> int:
        return sum(len(worker.predictions) for worker in self._workers.values())

    def _end_soonest(self) -> None:
        expiry, _, _, worker, node = heapq.heappop(self._expiries)
        if worker.predictions.get(node) == expiry:
            del worker.predictions[node]

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            self._end_soonest()

    def maintain(self, *, now: float, budget: int = 4096) -> bool:
        self._expire(now)
        for worker in self._workers.values():
            worker.expire_demoted(now)
        return False

    # State

    def cut(self, worker: WorkerRank) -> Cut | None:
        known = self._workers.get(worker)
        return _Copied(known.dump(worker)) if known is not None else None

    def loading(self, dump: WorkerDump) -> Loading:
        return _Loading(self, lambda: dump)

    def loading_messages(self, messages: Sequence[bytes]) -> Loading:
        return _Loading(self, lambda: read_dump(messages).dump)

    def check(self, dump: WorkerDump) -> Worker:
        """Verify that a dump can be loaded, and return the worker that it replaces.

        Raises:
            NotFound: The worker is not known.
            InvalidArgument: Naming the first entry that contradicts another.
        """
        if dump.worker not in self._workers:
            raise NotFound(f"worker {dump.worker.worker_id} rank {dump.worker.dp_rank} is not known")
        _check_dump(dump, self.block_size)
        return self._workers[dump.worker]

    def replace(self, old: Worker, dump: WorkerDump) -> bool:
        """Put a dump that was checked in place of a worker's state; False: another one began meanwhile."""
        if self._workers.get(dump.worker) is not old:
            return False
        new = self._new_worker(old.options)
        new.fill(dump)
        self._replace(dump.worker, old, new)
        self._enforce_bound(new.entries)
        return True

    def worker_stats(self, worker: WorkerRank) -> WorkerStats | None:
        known = self._workers.get(worker)
        if known is None:
            return None
        windows = known.windows
        judged = windows.groups if windows is not None else {}
        return WorkerStats(
            blocks=len(known.levels),
            hidden=known.hidden,
            orphans=len(known.orphans),
            ghosts=len(known.gone),
            predictions=len(known.predictions),
            device_copies=known.device_copies,
            window_blocks=len(windows.blocks) if windows is not None else 0,
            unjudged_groups=[group for group, full in sorted(known.groups.items()) if not full and group not in judged],
            over_capacity=known.over_capacity,
            incomplete=known.incomplete,
            incompatible=known.incompatible,
            ignored=dict(known.ignored),
        )

    def stats(self) -> IndexStats:
        everyone = self._workers.values()
        bindings = sum(worker.entries + len(worker.gone) for worker in everyone)
        return IndexStats(
            blocks=len({node for worker in everyone for node in worker.levels}),
            memberships=sum(len(worker.levels) for worker in everyone),
            workers=sum(bool(worker.levels) for worker in everyone),
            orphans=sum(len(worker.orphans) for worker in everyone),
            hidden=sum(worker.hidden for worker in everyone),
            ghosts=sum(len(worker.gone) for worker in everyone),
            predictions=self._predicted(),
            bytes=len(self._tree) * _NODE_BYTES + bindings * _BINDING_BYTES,
            evicted=self._evicted,
            queries=self._queries,
            unknown_worker=self._unknown_worker,
        )

    def check_invariants(self) -> None:
        for worker in self._workers.values():
            worker.check_invariants()
        if self.max_blocks:
            assert sum(worker.entries for worker in self._workers.values()) <= self.max_blocks, "blocks are bounded"
            assert sum(len(worker.gone) for worker in self._workers.values()) <= self.max_blocks, "ghosts are bounded"


class _Demoted(Demotion):
    def step(self) -> bool:
        return False


class _Copied(Cut):
    def __init__(self, dump: WorkerDump) -> None:
        self._dump = dump

    def step(self) -> bool:
        return False

    def dump(self) -> WorkerDump:
        return self._dump

    def messages(self, pool: PoolKey, *, history_incomplete: bool, epoch: int | None = None) -> list[bytes]:
        dump = self._dump if epoch is None else replace(self._dump, epoch=epoch)
        messages = encode_dump(pool, dump, history_incomplete=history_incomplete)
        return [message.SerializeToString() for message in messages]


class _Loading(Loading):
    """Reads and checks a dump in its only step, and loads it with `commit`."""

    def __init__(self, index: ReferenceIndex, read: Callable[[], WorkerDump]) -> None:
        self._index = index
        self._read = read
        self._checked: tuple[Worker, WorkerDump] | None = None
        self._ended = False

    def step(self) -> bool:
        if self._checked is None and not self._ended:
            dump = self._read()
            self._checked = self._index.check(dump), dump
        return False

    def commit(self) -> bool:
        checked, self._checked = self._checked, None
        self._ended = True
        return checked is not None and self._index.replace(*checked)

    def abandon(self) -> None:
        self._checked, self._ended = None, True


def encode_batch(
    worker: WorkerRank,
    pool: PoolKey,
    adapters: Mapping[int, str],
    batch: DecodedBatch,
    *,
    epoch: int,
    event_id: int | None,
) -> bytes:
    """See `backend.encode_batch`."""
    assert isinstance(batch, EventBatch)
    return encode_events(pool, adapters, worker, batch, epoch=epoch, event_id=event_id).SerializeToString()


def _integers(block_hashes: Sequence[int] | bytes) -> Sequence[int]:
    if not isinstance(block_hashes, bytes):
        return block_hashes
    if len(block_hashes) % 8:
        raise InvalidArgument("not whole 64-bit hashes", field="block_hashes")
    return struct.unpack(f"<{len(block_hashes) // 8}Q", block_hashes)


def _check_dump(dump: WorkerDump, block_size: int) -> None:  # noqa: C901, PLR0912  # one rule after the other
    """Verify that a dump does not contradict itself, for an index with blocks of `block_size` tokens."""
    _check_ascending("groups", [group for group, _ in dump.groups])
    if len(dump.groups) > GROUP_LIMIT:
        raise InvalidArgument(f"more than {GROUP_LIMIT}", field="groups")
    full = {group for group, is_full in dump.groups if is_full}
    hashes: set[int] = set()
    for position, block in enumerate(dump.blocks):
        field = f"blocks.{position}"
        if not -1 <= block.parent < position:
            raise InvalidArgument("its parent does not come before it", field=field)
        if (block.engine_hash is None) != (not block.copies):
            raise InvalidArgument("a hole has copies, or a block has none", field=field)
        _check_entry(block, field, full, "is not full attention", hashes)
    bound = frozenset(hashes)
    for position, orphan in enumerate(dump.orphans):
        field = f"orphans.{position}"
        _check_entry(orphan, field, full, "is not full attention", hashes)
        if not orphan.copies:
            raise InvalidArgument("an orphan has no copies", field=field)
        if orphan.parent_engine_hash in bound:
            raise InvalidArgument("its parent is known", field=field)
    if len(dump.orphans) > ORPHAN_LIMIT:
        raise InvalidArgument(f"more than {ORPHAN_LIMIT}", field="orphans")
    _check_ascending("windows", [group.number for group in dump.windows])
    for position, group in enumerate(dump.windows):
        field = f"windows.{position}"
        if (group.number, False) not in dump.groups:
            raise InvalidArgument("is no group that is not full attention", field=field)
        if not group.window or not group.block_size:
            raise InvalidArgument("has no tokens", field=field)
        if group.block_size % block_size:
            raise InvalidArgument(f"its blocks are no multiple of {block_size} tokens", field=field)
    hashes = set()
    for position, window_block in enumerate(dump.window_blocks):
        field = f"window_blocks.{position}"
        if not window_block.copies:
            raise InvalidArgument("has no copies", field=field)
        _check_entry(window_block, field, {group.number for group in dump.windows}, "has no window", hashes)
    if dump.incompatible and (dump.blocks or dump.orphans or dump.window_blocks):
        raise InvalidArgument("a worker that is not indexed has blocks", field="incompatible")


def _check_ascending(field: str, numbers: Sequence[int]) -> None:
    for position in range(1, len(numbers)):
        if numbers[position - 1] >= numbers[position]:
            raise InvalidArgument("does not come after the one before it", field=f"{field}.{position}")


def _check_entry(
    entry: DumpedBlock | DumpedOrphan | DumpedWindowBlock, field: str, groups: set[int], otherwise: str, seen: set[int]
) -> None:
    if entry.engine_hash is not None:
        if entry.engine_hash in seen:
            raise InvalidArgument("its engine hash comes twice", field=field)
        seen.add(entry.engine_hash)
    for group, _, number in entry.copies:
        if group not in groups:
            raise InvalidArgument(f"group {group} {otherwise}", field=field)
        if not 1 <= number <= MAX_COPIES:
            raise InvalidArgument(f"{number} copies", field=field)
