"""One worker rank of the reference index: its engine hashes, the prefixes they are bound to, their copies.

::

    engine hash ─┬─ bound     nodes[hash], counts[hash]
                 ├─ orphan    orphans[hash] = (parent hash, local hash), counts[hash]
                 ├─ demoted   nodes[hash]: no longer verified, valid as a parent only
                 └─ ghost     ghosts[hash] = Ghost(parent hash, local hash): removed lately

What follows from these (levels, roots, device copies) is computed when it is needed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import takewhile
from typing import NamedTuple

from kvscout_blocks.bytes.acceptance import Ignored, judge_content, local_hashes_of
from kvscout_blocks.bytes.dump import DumpedBlock, DumpedOrphan, WorkerDump
from kvscout_blocks.bytes.events import EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import (
    GHOST_LIMIT,
    GROUP_LIMIT,
    ORPHAN_LIMIT,
    TWIN_LIMIT,
    WINDOW_LIMIT,
    Overlap,
    WorkerOptions,
)
from kvscout_blocks.index.reference_windows import (
    Chain,
    Counts,
    WindowGroups,
    add_copy,
    copies_of,
    counts_of,
    drop_copy,
)
from kvscout_common.hashing import extend_sequence
from kvscout_common.worker import WorkerRank

NOT_HELD = len(Tier)
"""The level of a block that is held on no tier; below it, a level is a `Tier`."""


class Prefix(int):
    """The sequence hash of a prompt's blocks up to one, whose local hash is `local`."""

    parent: Prefix | None
    """The prefix without its last block; None: it is one block long."""
    local: int
    depth: int
    """Its blocks."""

    def __new__(cls, parent: Prefix | None, local: int) -> Prefix:
        prefix = super().__new__(cls, extend_sequence(parent, local))
        prefix.parent, prefix.local = parent, local
        prefix.depth = 1 if parent is None else parent.depth + 1
        return prefix


class Clock:
    """Times in rounds of the `max_blocks` bound."""

    def __init__(self) -> None:
        self.round = 0
        self.used: dict[Prefix, int] = {}
        """Prefix → the round in which it was used last, never later than its parent's."""

    def touch(self, prefix: Prefix | None) -> None:
        """Mark a prefix and those above it as used in this round."""
        while prefix is not None and self.used.get(prefix, 0) < self.round:
            self.used[prefix] = self.round
            prefix = prefix.parent


class Orphan(NamedTuple):
    """The content of a block whose parent this worker never had."""

    parent: int
    local: int


@dataclass(slots=True, eq=False)
class Ghost:
    """A block that went."""

    engine_hash: int
    parent: int | None
    """Engine hash of the block above; None: it began a prompt."""
    local: int
    tiers: tuple[Tier, ...]
    """Tiers on which the engine still has it, as the bound dropped it; empty: the engine removed it."""


class Worker:
    """State of one worker rank.

    Args:
        clock: Shared by all workers of the index.
        block_size: Tokens of a block.
        eagle: Blocks are EAGLE windows.
        max_blocks: Bound of the index; 0: none.
        options: As registered.
    """

    def __init__(self, clock: Clock, block_size: int, eagle: bool, max_blocks: int, options: WorkerOptions) -> None:
        self.options = options
        self.epoch = 0
        self.last_event_id: int | None = None
        self.groups: dict[int, bool] = {}
        """Known cache groups, and whether each is full attention."""
        self.full_groups: tuple[int, ...] = ()
        """Groups that must all have a block for it to be held."""
        self.windows = WindowGroups(block_size)
        self.incompatible = ""
        self.ignored: Counter[Ignored] = Counter()
        self._clock = clock
        self._block_size = block_size
        self._eagle = eagle
        self._max_window_blocks = max_blocks or WINDOW_LIMIT
        self.clear()

    def clear(self) -> None:
        """Drop all blocks; groups stay known."""
        self.nodes: dict[int, Prefix] = {}
        """Prefixes of engine hashes, bound and demoted ones."""
        self.counts: dict[int, Counts] = {}
        """Copies of engine hashes, bound ones and orphans; what the `max_blocks` bound counts, besides ghosts."""
        self.names: dict[Prefix, list[int]] = {}
        """Engine hashes of each node, bound and demoted ones, in the order in which they were bound."""
        self.names_gone: dict[Prefix, int] = {}
        """Node → the engine hash that was bound there until the event in hand removed it."""
        self.orphans: dict[int, Orphan] = {}
        self.ghosts: dict[int, Ghost] = {}
        self.gone: deque[Ghost] = deque()
        """Ghosts, oldest first, with those that were stored again since: they keep their places."""
        self.demoted_until = 0.0
        self.predictions: dict[float, OrderedDict[Prefix, float]] = {}
        """Lifetime → node → expiry, in seconds of the index's clock, in the order in which they were made."""
        self.incomplete = False
        """A limit kept blocks out."""
        self.zero_is_block = False
        """A prompt began without a parent, or a block was named 0: so a parent 0 is a block like any other."""
        self.windows.clear()

    # Queries

    def overlap(self, path: Sequence[Prefix], usable: int) -> Overlap:
        """Return the leading blocks of a prompt that the worker has."""
        levels = [self.level(node) for node in path]
        device, host, disk, external = (_leading(level <= at for level in levels) for at in Tier)
        predicted = next(
            (n for n in range(device, len(path)) if levels[n] and not self.is_predicted(path[n])), len(path)
        )
        overlap = Overlap(device, host, disk, external, predicted)
        if not self.windows.groups:
            return overlap
        most = overlap if self.full_groups else [len(path)] * len(Tier)
        device, host, disk, external = (self.windows.longest(path, most[tier], usable, tier) for tier in Tier)
        # What is predicted beyond what is held will come with its windows.
        predicted = predicted if predicted > overlap.device else 0
        return Overlap(device, host, disk, external, max(predicted, device))

    def level(self, node: Prefix) -> int:
        """Return the fastest tier at which one of a node's hashes is in every full-attention group."""
        level: int = NOT_HELD
        for name in self.names.get(node, ()):
            tiers = [NOT_HELD] * len(self.full_groups)
            for group, tier in self.counts.get(name, ()):
                position = self.full_groups.index(group)
                tiers[position] = min(tiers[position], tier)
            level = min(level, max(tiers, default=NOT_HELD))
        return level

    def held(self) -> list[Prefix]:
        """Return the nodes that are held on any tier."""
        return [node for node in self.names if self.level(node) != NOT_HELD]

    def rooted(self) -> set[Prefix]:
        """Return the held nodes whose ancestors are all held: what a query can match."""
        rooted: set[Prefix] = set()
        for node in sorted(self.held(), key=lambda node: node.depth):
            if node.parent is None or node.parent in rooted:
                rooted.add(node)
        return rooted

    @property
    def device_copies(self) -> int:
        """Return Σ device counts over blocks and groups, orphans included."""
        return sum(
            number for counts in self.counts.values() for (_, tier), number in counts.items() if tier is Tier.DEVICE
        )

    @property
    def over_capacity(self) -> bool:
        """Return whether there are more device copies than the device has room for."""
        return 0 < self.options.total_kv_blocks < self.device_copies

    # Events

    def ignore(self, reason: Ignored, number: int = 1) -> None:
        """Count what was not indexed."""
        if number:
            self.ignored[reason] += number
            self.incomplete |= reason.is_limit

    def set_groups(self, groups: dict[int, bool]) -> None:
        """Set the known cache groups; a block must be in all full-attention ones to be held."""
        full_groups = tuple(sorted(group for group, full in groups.items() if full))
        if full_groups != self.full_groups:
            self._doubt_evicted()
        self.groups, self.full_groups = groups, full_groups

    def store(self, event: Stored) -> None:
        """Judge one Stored event, in the order of `Ignored`, and store its blocks."""
        has_content = bool(event.tokens or event.local_hashes)
        if 0 in event.engine_hashes or (event.parent is None and has_content):
            self.zero_is_block = True
        event = self._without_zero_parent(event)
        if event.group not in self.groups and len(self.groups) < GROUP_LIMIT:
            self.set_groups({**self.groups, event.group: event.full_attention})
        if not self.groups.get(event.group):
            if event.group in self.groups and self.windows.learn(event):
                refused = self.windows.store(event, self.options.copies, self._max_window_blocks)
                self.ignore(Ignored.WINDOW_LIMIT, refused)
            else:
                self.ignore(Ignored.SKIPPED_GROUP)
        elif not has_content:
            self._move(event)
        else:
            verdict = judge_content(event, self._block_size, self._eagle, self.options.adapters)
            if verdict is None:
                self._store_chain(event, self._local_hashes(event))
                return
            self.ignore(verdict)
            if verdict is Ignored.BLOCK_SIZE:
                sizes = f"the engine's blocks have {event.block_size} tokens, the registration says {self._block_size}"
                self.incompatible = sizes
                self.clear()

    def remove(self, event: Removed) -> None:
        """Drop the copies that a Removed event names."""
        if event.group in self.windows.groups:
            self.ignore(Ignored.UNKNOWN_REMOVED, self.windows.remove(event))
        elif self.groups.get(event.group) is False:
            self.ignore(Ignored.SKIPPED_GROUP)
        else:
            for engine_hash in event.engine_hashes:
                if engine_hash in self.nodes:
                    self._end_prediction(self.nodes[engine_hash])
                if not self._remove_copy(engine_hash, (event.group, event.tier)):
                    self.ignore(Ignored.UNKNOWN_REMOVED)
            self.names_gone.clear()

    def settle_windows(self, batch: EventBatch) -> None:
        """Find the prefixes of the blocks that a batch stored in groups with a window."""

        def sequence_hash_of(engine_hash: int) -> int | None:
            return self.nodes[engine_hash] if self._is_bound(engine_hash) else None

        def chains() -> Iterator[Chain]:
            rules = self._block_size, self._eagle, self.options.adapters
            for event in batch.events:
                if not isinstance(event, Stored) or event.group not in self.windows.groups:
                    continue
                event = self._without_zero_parent(event)
                if (event.tokens or event.local_hashes) and judge_content(event, *rules) is None:
                    yield event.parent, event.engine_hashes, self._local_hashes(event)

        self.ignore(Ignored.UNKNOWN_MOVED, self.windows.settle(sequence_hash_of, chains()))

    def _without_zero_parent(self, event: Stored) -> Stored:
        """Replace a parent 0 by none where no block of the worker is named 0 and its roots come so."""
        if event.parent != 0 or self.zero_is_block or 0 in self.counts:
            return event
        return replace(event, parent=None)

    def _local_hashes(self, event: Stored) -> Sequence[int]:
        return local_hashes_of(event, self._block_size, self._eagle, self.options.adapters)

    def _store_chain(self, event: Stored, local_hashes: Sequence[int]) -> None:
        """Store an event's blocks below their parent, or as orphans if it is unknown."""
        for engine_hash in (*(() if event.parent is None else (event.parent,)), *event.engine_hashes):
            self._restore_evicted(engine_hash)
        if event.parent is not None and event.parent not in self.nodes:
            self._store_orphans(event, event.parent, local_hashes)
            return
        above = None if event.parent is None else self.nodes[event.parent]
        for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
            above = Prefix(above, local)
            self._store_copy(engine_hash, above, event)
        self._clock.touch(above)

    def _store_copy(self, engine_hash: int, node: Prefix, event: Stored) -> None:
        if engine_hash in self.orphans or (self._is_bound(engine_hash) and self.nodes[engine_hash] != node):
            self.ignore(Ignored.HASH_CONFLICT)
            return
        if engine_hash not in self.counts:
            if not self._has_room(engine_hash, node):
                self.ignore(Ignored.TWIN_LIMIT)
                return
            self._bind(engine_hash, node, {})
        self._add_copy(engine_hash, event)
        self._end_prediction(node)
        self._adopt(engine_hash)

    def _store_orphans(self, event: Stored, parent: int, local_hashes: Sequence[int]) -> None:
        for position, (engine_hash, local) in enumerate(zip(event.engine_hashes, local_hashes, strict=True)):
            orphan = self.orphans.get(engine_hash)
            if orphan is None and len(self.orphans) >= ORPHAN_LIMIT:
                self.ignore(Ignored.ORPHAN_LIMIT, len(local_hashes) - position)
                return
            if self._is_bound(engine_hash) or (orphan is not None and orphan != (parent, local)):
                # What follows hangs below a block that this event contradicts.
                self.ignore(Ignored.HASH_CONFLICT, len(local_hashes) - position)
                return
            if orphan is None:
                self._forget(engine_hash)
                self.orphans[engine_hash], self.counts[engine_hash] = Orphan(parent, local), {}
            self._add_copy(engine_hash, event)
            parent = engine_hash

    def _move(self, event: Stored) -> None:
        """Store blocks that are named by their engine hashes alone: a tier change."""
        for engine_hash in event.engine_hashes:
            self._restore_evicted(engine_hash)
            ghost = self.ghosts.pop(engine_hash, None)
            if ghost is not None:
                back = replace(event, engine_hashes=(engine_hash,), parent=ghost.parent)
                self._store_chain(back, (ghost.local,))
            elif engine_hash in self.orphans:
                self._add_copy(engine_hash, event)
            elif engine_hash in self.nodes:
                self._store_copy(engine_hash, self.nodes[engine_hash], event)
            else:
                self.ignore(Ignored.UNKNOWN_MOVED)

    def _add_copy(self, engine_hash: int, event: Stored) -> None:
        add_copy(self.counts[engine_hash], (event.group, event.tier), self.options.copies)

    def _remove_copy(self, engine_hash: int, at: tuple[int, Tier]) -> bool:
        """Drop a copy of a known hash; False: it has none there."""
        ghost = self.ghosts.get(engine_hash)
        if ghost is not None and at[1] in ghost.tiers:
            ghost.tiers = tuple(tier for tier in ghost.tiers if tier is not at[1])
        elif engine_hash in self.counts:
            if not drop_copy(self.counts[engine_hash], at):
                return False
            if not self.counts[engine_hash]:
                self.drop(engine_hash)
        elif engine_hash in self.nodes:
            self._bury(engine_hash)
        else:
            return False
        return True

    # Engine hashes

    def drop(self, engine_hash: int) -> None:
        """Drop an orphan, or turn a bound hash into a ghost; if it has copies, the engine still has them."""
        counts, groups = self.counts.pop(engine_hash), self.full_groups
        if self.orphans.pop(engine_hash, None) is None:
            on_all = (tier for tier in Tier if groups and all((group, tier) in counts for group in groups))
            self._bury(engine_hash, tuple(on_all))

    def demote(self, until: float) -> list[Prefix]:
        """Turn bound hashes into demoted ones and drop orphans; return the nodes that the device held."""
        on_device = [node for node in self.names if self.level(node) == Tier.DEVICE]
        self.demoted_until = max(self.demoted_until, until)
        self.counts.clear()
        self.orphans.clear()
        self._doubt_evicted()
        self.windows.clear()
        return on_device

    def expire_demoted(self, now: float) -> None:
        """Forget the demoted hashes if their time has come."""
        if now >= self.demoted_until:
            for engine_hash in [name for name in self.nodes if name not in self.counts]:
                self._forget(engine_hash)

    def evict(self, surplus: int, *, unmatchable: bool) -> int:
        """Drop about `surplus` entries, and return their number: those that no query can match, or any blocks.

        Of blocks those used longest ago go first, the deepest before their parents: an ancestor was never used longer
        ago than a block below it.
        """
        before, nodes = len(self.counts), dict.fromkeys(self.bound_nodes())
        if unmatchable:
            for engine_hash in list(self.orphans)[:surplus]:
                self.drop(engine_hash)
            for node in self.rooted():
                nodes.pop(node, None)
        for node in nsmallest(surplus, nodes, key=lambda node: (self._clock.used.get(node, 0), -node.depth)):
            if before - len(self.counts) < surplus:
                for engine_hash in [name for name in self.names[node] if name in self.counts]:
                    self.drop(engine_hash)
        self.names_gone.clear()
        return before - len(self.counts)

    def bound_nodes(self) -> Iterator[Prefix]:
        """Return the nodes of bound hashes."""
        return (node for name, node in self.nodes.items() if name in self.counts)

    def forget_oldest_ghost(self) -> None:
        """Give the place of the oldest ghost away, of which there must be one."""
        oldest = self.gone.popleft()
        if self.ghosts.get(oldest.engine_hash) is oldest:
            del self.ghosts[oldest.engine_hash]

    def _restore_evicted(self, engine_hash: int) -> None:
        """Give a block that the bound dropped its copies again, and all those above it.

        The engine named it, so it has them all. Where the prefix is not whole any more nothing comes back.
        """
        chain: list[Ghost] = []
        ghost = self.ghosts.get(engine_hash)
        while ghost is not None and ghost.tiers and len(chain) < len(self.ghosts):
            chain.append(ghost)
            ghost = self.ghosts.get(ghost.parent) if ghost.parent is not None else None
        while chain:
            ghost, parent = chain[-1], chain[-1].parent
            counts = {(group, tier): 1 for tier in ghost.tiers for group in self.full_groups}
            if parent is not None and parent not in self.nodes:
                break
            node = Prefix(None if parent is None else self.nodes[parent], ghost.local)
            if not self._restore(ghost.engine_hash, node, counts):
                break
            self._adopt(chain.pop().engine_hash)
        for ghost in chain:
            ghost.tiers = ()

    def _restore(self, engine_hash: int, node: Prefix, counts: Counts) -> bool:
        """Bind a hash with its copies; False: its node has too many."""
        if not self._has_room(engine_hash, node):
            return False
        self._bind(engine_hash, node, counts)
        self._clock.touch(node)
        return True

    def _adopt(self, engine_hash: int) -> None:
        """Bind the orphans that waited for a hash, and those that waited for them."""
        arrived = [engine_hash]
        while arrived:
            parent = arrived.pop()
            for child in [name for name, orphan in self.orphans.items() if orphan.parent == parent]:
                node = Prefix(self.nodes[parent], self.orphans.pop(child).local)
                if self._restore(child, node, self.counts.pop(child)):
                    arrived.append(child)
                else:
                    self.ignore(Ignored.TWIN_LIMIT)

    def _is_bound(self, engine_hash: int) -> bool:
        return engine_hash in self.nodes and engine_hash in self.counts

    def _bind(self, engine_hash: int, node: Prefix, counts: Counts) -> None:
        self._forget(engine_hash, bound_to=node)
        names = self.names.setdefault(node, [])
        if engine_hash not in names:
            names.append(engine_hash)
        self.nodes[engine_hash], self.counts[engine_hash] = node, counts

    def _has_room(self, engine_hash: int, node: Prefix) -> bool:
        """Make room for a hash at a node: of too many the first without copies goes; return False if there is none."""
        names = self.names.get(node, [])
        if len(names) < TWIN_LIMIT or engine_hash in names:
            return True
        oldest = next((name for name in names if name not in self.counts), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def _forget(self, engine_hash: int, bound_to: Prefix | None = None) -> None:
        """End a ghost or demoted hash, as the hash is stored again or has to go."""
        self.ghosts.pop(engine_hash, None)
        node = self.nodes.get(engine_hash)
        if node is not None and node != bound_to:
            self._unname(engine_hash)

    def _unname(self, engine_hash: int) -> Prefix:
        """Take a hash from its node, and return the node."""
        node = self.nodes.pop(engine_hash)
        self.names[node].remove(engine_hash)
        if not self.names[node]:
            del self.names[node]
        return node

    def _bury(self, engine_hash: int, tiers: tuple[Tier, ...] = ()) -> None:
        """Turn a hash that leaves its node into the youngest ghost, if the block above has or had a name."""
        node = self._unname(engine_hash)
        if node not in self.names:
            self.names_gone[node] = engine_hash
        parent: int | None = None
        if node.parent is not None:
            names = self.names.get(node.parent)
            parent = names[0] if names else self.names_gone.get(node.parent)
            if parent is None:
                return
        if len(self.gone) >= GHOST_LIMIT:
            self.forget_oldest_ghost()
        ghost = self.ghosts[engine_hash] = Ghost(engine_hash, parent, node.local, tiers)
        self.gone.append(ghost)

    def _doubt_evicted(self) -> None:
        """Forget which of the blocks that the bound dropped the engine has."""
        for ghost in self.ghosts.values():
            ghost.tiers = ()

    # Predictions

    @property
    def predicted(self) -> int:
        """Return the number of predictions."""
        return sum(map(len, self.predictions.values()))

    def is_predicted(self, node: Prefix) -> bool:
        """Return whether a node is predicted."""
        return any(node in queue for queue in self.predictions.values())

    def predict(self, nodes: Sequence[Prefix], ttl_seconds: float, now: float) -> int:
        """Predict nodes, the last of which ends first, or refresh them; return the number of new predictions."""
        before = self.predicted
        for node in reversed(nodes):
            if all(queue.get(node, 0.0) <= now + ttl_seconds for queue in self.predictions.values()):
                self._end_prediction(node)
                self.predictions.setdefault(ttl_seconds, OrderedDict())[node] = now + ttl_seconds
        return self.predicted - before

    def _end_prediction(self, node: Prefix) -> None:
        for queue in self.predictions.values():
            queue.pop(node, None)

    # State

    def dump(self, rank: WorkerRank) -> WorkerDump:
        """Return the state, in the order that `WorkerDump` promises."""
        below: dict[Prefix | None, set[Prefix]] = {}
        for bound in self.bound_nodes():
            node: Prefix | None = bound
            while node is not None and node not in below.setdefault(node.parent, set()):
                below[node.parent].add(node)
                node = node.parent
        blocks: list[DumpedBlock] = []
        stack: list[tuple[Prefix | None, int]] = [(None, -1)]
        while stack:
            node, parent = stack.pop()
            position = len(blocks) if node is not None else -1
            if node is not None:
                names = sorted(name for name in self.names.get(node, ()) if name in self.counts)
                blocks.extend(DumpedBlock(name, parent, node.local, copies_of(self.counts[name])) for name in names)
                blocks.extend([] if names else [DumpedBlock(None, parent, node.local, ())])
            children = sorted(below.get(node, ()), key=lambda child: child.local, reverse=True)
            stack.extend((child, position) for child in children)
        return WorkerDump(
            rank,
            self.epoch,
            self.last_event_id,
            tuple(sorted(self.groups.items())),
            tuple(blocks),
            tuple(
                DumpedOrphan(name, *orphan, copies_of(self.counts[name]))
                for name, orphan in sorted(self.orphans.items())
            ),
            self.incompatible,
            tuple(sorted(self.windows.groups.values())),
            self.windows.dump(),
            self.incomplete,
        )

    def fill(self, dump: WorkerDump) -> None:
        """Take over a dump that was checked; the worker is empty."""
        self.epoch, self.last_event_id = dump.epoch, dump.last_event_id
        self.incompatible, self.incomplete = dump.incompatible, dump.incomplete
        self.set_groups(dict(dump.groups))
        self.windows = WindowGroups(self._block_size, dump.windows)
        self.windows.fill(dump.window_blocks)
        nodes: list[Prefix] = []
        for block in dump.blocks:
            above = nodes[block.parent] if block.parent >= 0 else None
            nodes.append(Prefix(above, block.local_hash))
            if block.engine_hash is not None:
                self._restore(block.engine_hash, nodes[-1], counts_of(block.copies))
        for engine_hash, parent, local, copies in dump.orphans:
            self.orphans[engine_hash], self.counts[engine_hash] = Orphan(parent, local), counts_of(copies)

    def check_invariants(self) -> None:
        """See `BlockIndex.check_invariants`."""
        kinds = (self.nodes, self.orphans, self.ghosts)
        known = [engine_hash for kind in kinds for engine_hash in kind]
        assert len(known) == len(set(known)), "an engine hash is known in one way"
        assert len(self.ghosts) <= len(self.gone) <= GHOST_LIMIT, "ghosts are bounded"
        assert len(self.orphans) <= ORPHAN_LIMIT, "orphans are bounded"
        assert self.orphans.keys() <= self.counts.keys() <= self.orphans.keys() | self.nodes.keys(), "who has copies"
        assert all(self.counts.values()), "a known block has a copy"
        groups = {group for counts in self.counts.values() for group, _ in counts}
        assert all(self.groups[group] for group in groups), "copies are in full-attention groups"
        named = {(name, node) for node, names in self.names.items() for name in names}
        assert named == set(self.nodes.items()), "nodes know their hashes"
        assert all(len(names) <= TWIN_LIMIT for names in self.names.values()), "names are bounded"
        parents = {orphan.parent for orphan in self.orphans.values()}
        assert not any(map(self._is_bound, parents)), "no orphan's parent is bound"


def _leading(held: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, held))
