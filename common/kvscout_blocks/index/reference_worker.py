"""One worker rank of the reference index: its engine hashes, the prefixes they are bound to, their copies.

::

    engine hash ─┬─ bound     nodes[hash], counts[hash]
                 ├─ orphan    orphans[hash] = (parent hash, local hash), counts[hash]
                 ├─ demoted   nodes[hash]: no longer verified, valid as a parent only
                 └─ ghost     ghosts[hash] = Ghost(parent hash, local hash): removed lately

What follows from these (levels, roots, device copies) is computed when it is needed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from kvscout_blocks.bytes.acceptance import Ignored, judge_content, local_hashes_of
from kvscout_blocks.bytes.dump import DumpedBlock, DumpedOrphan, WorkerDump
from kvscout_blocks.bytes.events import Cleared, Event, EventBatch, Removed, Stored, Tier
from kvscout_blocks.index.block_index import (
    GROUP_LIMIT,
    ORPHAN_LIMIT,
    TWIN_LIMIT,
    WINDOW_LIMIT,
    Overlap,
    WorkerOptions,
    ghost_limit,
)
from kvscout_blocks.index.reference_windows import Counts, WindowGroups, add_copy, copies_of, counts_of, drop_copy
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
    """Times of use, in calls of the index."""

    def __init__(self) -> None:
        self.now = 0
        self.used: dict[Prefix, int] = {}
        """Prefix → when it was used last, never before a prefix below it."""

    def touch(self, prefix: Prefix | None) -> None:
        """Mark a prefix and those above it as used now."""
        while prefix is not None and self.used.get(prefix, 0) < self.now:
            self.used[prefix] = self.now
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
        """Known cache groups, and whether each is full attention: a block must be in all that are to be held."""
        self.windows = WindowGroups(block_size)
        self.incompatible = ""
        self.ignored: Counter[Ignored] = Counter()
        self._clock = clock
        self._block_size = block_size
        self._eagle = eagle
        self._max_window_blocks = max_blocks or WINDOW_LIMIT
        self._asks_for_ghosts = max_blocks > 0
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
        self.predictions: dict[Prefix, float] = {}
        """Node → expiry, in seconds of the index's clock."""
        self.incomplete = False
        """A limit kept blocks out."""
        self.zero_is_block = False
        """A prompt began without a parent, or a block was named 0: so a parent 0 is a block like any other."""
        self.windows.clear()

    # Queries

    def overlap(self, path: Sequence[Prefix], usable: int) -> Overlap:
        """Return the leading blocks of a prompt that the worker has."""
        levels = [self.level(node) for node in path]
        device, host, disk, external = (_leading(level <= tier for level in levels) for tier in Tier)
        predicted = _leading(not level or node in self.predictions for node, level in zip(path, levels, strict=True))
        if self.windows.groups:
            # What is predicted beyond what is held will come with its windows.
            predicted = predicted if predicted > device else 0
            most = (device, host, disk, external) if self.full_groups else [len(path)] * len(Tier)
            device, host, disk, external = (self.windows.longest(path, most[tier], usable, tier) for tier in Tier)
        return Overlap(device, host, disk, external, max(predicted, device))

    @property
    def full_groups(self) -> list[int]:
        """Return the full-attention groups."""
        return [group for group, full in self.groups.items() if full]

    def level(self, node: Prefix) -> int:
        """Return the fastest tier at which one of a node's hashes is in every full-attention group."""
        level, full_groups = NOT_HELD, self.full_groups
        for name in self.names.get(node, ()):
            copies = self.counts.get(name, {})
            fastest = [min((at for where, at in copies if where == group), default=NOT_HELD) for group in full_groups]
            level = min(level, max(fastest))
        return level

    def is_repeated(self, node: Prefix) -> bool:
        """Return whether one of a node's hashes has several copies on the device in one group."""
        copies = (at for name in self.names.get(node, ()) for at in self.counts.get(name, {}).items())
        return any(tier is Tier.DEVICE and number > 1 for (_, tier), number in copies)

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
        copies = (at for counts in self.counts.values() for at in counts.items())
        return sum(number for (_, tier), number in copies if tier is Tier.DEVICE)

    @property
    def over_capacity(self) -> bool:
        """Return whether there are more device copies than the device has room for."""
        return 0 < self.options.total_kv_blocks < self.device_copies

    # Events

    def on_shared_tier(self, event: Event) -> Event:
        """Return an event with the external tier in place of the one on which the engine announces shared blocks."""
        if isinstance(event, Cleared) or event.tier is not self.options.shared.tier:
            return event
        return replace(event, tier=Tier.EXTERNAL)

    @property
    def may_share(self) -> bool:
        """Return whether what it announces can be shared: not with several groups, of which a prefix hit needs all."""
        return not self.incompatible and len(self.groups) <= 1 and all(self.groups.values())

    def ignore(self, reason: Ignored, number: int = 1) -> None:
        """Count what was not indexed."""
        if number:
            self.ignored[reason] += number
            self.incomplete |= reason.is_limit

    @property
    def ghost_limit(self) -> int:
        """Return how many ghosts there are at most."""
        return ghost_limit(self.options.total_kv_blocks, asked=self._asks_for_ghosts)

    def store(self, event: Stored) -> None:
        """Judge one Stored event, in the order of `Ignored`, and store its blocks."""
        has_content = bool(event.tokens or event.local_hashes)
        self._asks_for_ghosts |= event.tier is not Tier.DEVICE or not has_content
        if 0 in event.engine_hashes or (event.parent is None and has_content):
            self.zero_is_block = True
        event = self._without_zero_parent(event)
        if event.group not in self.groups and len(self.groups) < GROUP_LIMIT:
            self.groups[event.group] = event.full_attention
            if event.full_attention:
                self._doubt_evicted()
        if not self.groups.get(event.group):
            if event.group in self.groups and self.windows.learn(event):
                refused = self.windows.store(event, self.options.copies, self._max_window_blocks)
                self.ignore(Ignored.WINDOW_LIMIT, refused)
            else:
                self.ignore(Ignored.SKIPPED_GROUP)
        elif not has_content:
            self._move(event)
        elif (verdict := self._judge(event)) is None:
            self._store_chain(event, self._local_hashes(event))
        else:
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
            self.names_gone.clear()
            for engine_hash in event.engine_hashes:
                if engine_hash in self.nodes:
                    self.predictions.pop(self.nodes[engine_hash], None)
                if not self._remove_copy(engine_hash, event.group, event.tier):
                    self.ignore(Ignored.UNKNOWN_REMOVED)

    def settle_windows(self, batch: EventBatch) -> None:
        """Find the prefixes of the blocks that a batch stored in groups with a window."""
        stored = [event for event in batch.events if isinstance(event, Stored) and event.group in self.windows.groups]
        if stored:
            events = [self._without_zero_parent(event) for event in stored if event.tokens or event.local_hashes]
            chains = [(event, self._local_hashes(event)) for event in events if self._judge(event) is None]
            bound = {name: self.nodes[name] for name in self.nodes.keys() & self.counts.keys()}
            self.ignore(Ignored.UNKNOWN_MOVED, self.windows.settle(bound, chains))

    def _without_zero_parent(self, event: Stored) -> Stored:
        """Replace a parent 0 by none where no block of the worker is named 0 and its roots come so."""
        if event.parent != 0 or self.zero_is_block or 0 in self.counts:
            return event
        return replace(event, parent=None)

    def _judge(self, event: Stored) -> Ignored | None:
        return judge_content(event, self._block_size, self._eagle, self.options.adapters)

    def _local_hashes(self, event: Stored) -> Sequence[int]:
        return local_hashes_of(event, self._block_size, self._eagle, self.options.adapters)

    def _store_chain(self, event: Stored, local_hashes: Sequence[int]) -> None:
        """Store an event's blocks below their parent, or as orphans if it is unknown."""
        for engine_hash in event.engine_hashes if event.parent is None else (event.parent, *event.engine_hashes):
            self._restore_evicted(engine_hash)
        if event.parent is not None and event.parent not in self.nodes:
            self._store_orphans(event, event.parent, local_hashes)
            return
        node = None if event.parent is None else self.nodes[event.parent]
        for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
            node = Prefix(node, local)
            self._store_copy(engine_hash, node, event)
        self._clock.touch(node)

    def _store_copy(self, engine_hash: int, node: Prefix, event: Stored) -> None:
        if engine_hash in self.orphans or (self._is_bound(engine_hash) and self.nodes[engine_hash] != node):
            self.ignore(Ignored.HASH_CONFLICT)
        elif self._is_bound(engine_hash) or self._bind(engine_hash, node, {}):
            add_copy(self.counts[engine_hash], event, self.options.copies)
            self.predictions.pop(node, None)
            self._adopt(engine_hash)
        else:
            self.ignore(Ignored.TWIN_LIMIT)

    def _store_orphans(self, event: Stored, parent: int, local_hashes: Sequence[int]) -> None:
        for position, (engine_hash, local) in enumerate(zip(event.engine_hashes, local_hashes, strict=True)):
            orphan = self.orphans.get(engine_hash)
            full = orphan is None and len(self.orphans) >= ORPHAN_LIMIT
            if full or self._is_bound(engine_hash) or (orphan is not None and orphan != (parent, local)):
                # What follows hangs below a block that this event contradicts.
                self.ignore(Ignored.ORPHAN_LIMIT if full else Ignored.HASH_CONFLICT, len(local_hashes) - position)
                return
            if orphan is None:
                self._forget(engine_hash)
                self.orphans[engine_hash], self.counts[engine_hash] = Orphan(parent, local), {}
            add_copy(self.counts[engine_hash], event, self.options.copies)
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
                add_copy(self.counts[engine_hash], event, self.options.copies)
            elif engine_hash in self.nodes:
                self._store_copy(engine_hash, self.nodes[engine_hash], event)
            else:
                self.ignore(Ignored.UNKNOWN_MOVED)

    def _remove_copy(self, engine_hash: int, group: int, tier: Tier) -> bool:
        """Drop a copy of a known hash; False: it has none there."""
        ghost, counts = self.ghosts.get(engine_hash), self.counts.get(engine_hash)
        if ghost is not None and tier in ghost.tiers:
            ghost.tiers = tuple(other for other in ghost.tiers if other is not tier)
            return True
        if counts is None:
            demoted = engine_hash in self.nodes
            if demoted:
                self._bury(engine_hash, ())
            return demoted
        known = drop_copy(counts, group, tier)
        if not counts:
            self.drop(engine_hash)
        return known

    # Engine hashes

    def drop(self, engine_hash: int) -> None:
        """Drop an orphan, or turn a bound hash into a ghost; if it has copies, the engine still has them."""
        counts, groups = self.counts.pop(engine_hash), self.full_groups
        if self.orphans.pop(engine_hash, None) is None:
            self._bury(engine_hash, tuple(tier for tier in Tier if all((group, tier) in counts for group in groups)))

    def demote(self, until: float) -> list[Prefix]:
        """Turn bound hashes into demoted ones and drop orphans; return the nodes that the device held."""
        on_device = [node for node in self.names if self.level(node) == Tier.DEVICE]
        self.demoted_until = max(self.demoted_until, until)
        self.counts.clear()
        self.orphans.clear()
        self._doubt_evicted()
        self.windows.clear()
        return on_device

    def predict(self, nodes: Sequence[Prefix], until: float) -> int:
        """Predict nodes, or refresh them; return the number of new predictions."""
        before = len(self.predictions)
        for node in nodes:
            self.predictions[node] = max(until, self.predictions.get(node, until))
        return len(self.predictions) - before

    def expire(self, now: float) -> None:
        """End the predictions and forget the demoted hashes whose time has come."""
        self.predictions = {node: until for node, until in self.predictions.items() if until > now}
        if now >= self.demoted_until:
            for engine_hash in self.nodes.keys() - self.counts.keys():
                self._forget(engine_hash)

    def evict(self, surplus: int, *, unmatchable: bool) -> int:
        """Drop up to `surplus` entries, and return their number: those that no query can match, or any blocks.

        Of blocks those used longest ago go first, the deepest before their parents.
        """
        rooted = self.rooted() if unmatchable else set()
        nodes = [node for node in self.names if node not in rooted]
        nodes.sort(key=lambda node: (self._clock.used.get(node, 0), -node.depth))
        entries = [*self.orphans] if unmatchable else []
        entries += [name for node in nodes for name in self.names[node] if name in self.counts]
        self.names_gone.clear()
        for engine_hash in entries[:surplus]:
            self.drop(engine_hash)
        return min(surplus, len(entries))

    def forget_oldest_ghost(self) -> None:
        """Give the place of the oldest ghost away, of which there must be one."""
        oldest = self.gone.popleft()
        if self.ghosts.get(oldest.engine_hash) is oldest:
            del self.ghosts[oldest.engine_hash]

    def _restore_evicted(self, engine_hash: int) -> None:
        """Give a block that the bound dropped its copies again, and all those above it.

        The engine named it, so it has them all. Where the prefix is not whole any more nothing comes back.
        """
        chain: list[tuple[Ghost, tuple[Tier, ...]]] = []
        ghost = self.ghosts.get(engine_hash)
        while ghost is not None and ghost.tiers:
            chain.append((ghost, ghost.tiers))
            ghost.tiers = ()
            ghost = None if ghost.parent is None else self.ghosts.get(ghost.parent)
        for ghost, tiers in reversed(chain):
            if ghost.parent is None or ghost.parent in self.nodes:
                node = Prefix(None if ghost.parent is None else self.nodes[ghost.parent], ghost.local)
                counts = {(group, tier): 1 for tier in tiers for group in self.full_groups}
                if self._bind(ghost.engine_hash, node, counts):
                    self._adopt(ghost.engine_hash)

    def _adopt(self, engine_hash: int) -> None:
        """Bind the orphans that waited for a hash, and those that waited for them."""
        arrived = [engine_hash]
        while arrived:
            parent = arrived.pop()
            for child in [name for name, orphan in self.orphans.items() if orphan.parent == parent]:
                node = Prefix(self.nodes[parent], self.orphans.pop(child).local)
                if self._bind(child, node, self.counts.pop(child)):
                    arrived.append(child)
                else:
                    self.ignore(Ignored.TWIN_LIMIT)

    def _is_bound(self, engine_hash: int) -> bool:
        return engine_hash in self.nodes and engine_hash in self.counts

    def _bind(self, engine_hash: int, node: Prefix, counts: Counts) -> bool:
        """Bind a hash with its copies; False: its node has too many names, and none without copies that could go."""
        names = self.names.get(node, [])
        if engine_hash not in names:
            if len(names) >= TWIN_LIMIT:
                oldest = next((name for name in names if name not in self.counts), None)
                if oldest is None:
                    return False
                self._forget(oldest)
            self._forget(engine_hash)
            self.names.setdefault(node, []).append(engine_hash)
        self.nodes[engine_hash], self.counts[engine_hash] = node, counts
        self._clock.touch(node)
        return True

    def _forget(self, engine_hash: int) -> None:
        """End a ghost or demoted hash, as the hash is stored again or has to go."""
        self.ghosts.pop(engine_hash, None)
        if engine_hash in self.nodes:
            self._unname(engine_hash)

    def _unname(self, engine_hash: int) -> Prefix:
        """Take a hash from its node, and return the node."""
        node = self.nodes.pop(engine_hash)
        self.names[node].remove(engine_hash)
        if not self.names[node]:
            del self.names[node]
        return node

    def _bury(self, engine_hash: int, tiers: tuple[Tier, ...]) -> None:
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
        while len(self.gone) >= self.ghost_limit:
            self.forget_oldest_ghost()
        ghost = self.ghosts[engine_hash] = Ghost(engine_hash, parent, node.local, tiers)
        self.gone.append(ghost)

    def _doubt_evicted(self) -> None:
        """Forget which of the blocks that the bound dropped the engine has."""
        for ghost in self.ghosts.values():
            ghost.tiers = ()

    # State

    def dump(self, rank: WorkerRank) -> WorkerDump:
        """Return the state, in the order that `WorkerDump` promises."""
        below: dict[Prefix | None, set[Prefix]] = {}
        for name in self.nodes.keys() & self.counts.keys():
            node: Prefix | None = self.nodes[name]
            while node is not None and node not in below.setdefault(node.parent, set()):
                below[node.parent].add(node)
                node = node.parent
        return WorkerDump(
            rank,
            self.epoch,
            self.last_event_id,
            tuple(sorted(self.groups.items())),
            tuple(self._dumped_blocks(below)),
            tuple(
                DumpedOrphan(name, *orphan, copies_of(self.counts[name]))
                for name, orphan in sorted(self.orphans.items())
            ),
            self.incompatible,
            tuple(sorted(self.windows.groups.values())),
            self.windows.dump(),
            self.incomplete,
        )

    def _dumped_blocks(self, below: dict[Prefix | None, set[Prefix]]) -> Iterator[DumpedBlock]:
        dumped, stack = 0, [(node, -1) for node in sorted(below.get(None, ()), key=_local, reverse=True)]
        while stack:
            node, parent = stack.pop()
            names = sorted(name for name in self.names.get(node, ()) if name in self.counts)
            for name in names:
                yield DumpedBlock(name, parent, node.local, copies_of(self.counts[name]))
            if not names:
                yield DumpedBlock(None, parent, node.local, ())
            stack += [(child, dumped) for child in sorted(below.get(node, ()), key=_local, reverse=True)]
            dumped += max(len(names), 1)

    def fill(self, dump: WorkerDump) -> None:
        """Take over a dump that was checked; the worker is empty."""
        self.epoch, self.last_event_id = dump.epoch, dump.last_event_id
        self.incompatible, self.incomplete = dump.incompatible, dump.incomplete
        self.groups = dict(dump.groups)
        self.windows = WindowGroups(self._block_size, dump.windows)
        self.windows.fill(dump.window_blocks)
        nodes: list[Prefix] = []
        for block in dump.blocks:
            nodes.append(Prefix(nodes[block.parent] if block.parent >= 0 else None, block.local_hash))
            if block.engine_hash is not None:
                self._bind(block.engine_hash, nodes[-1], counts_of(block.copies))
        for engine_hash, parent, local, copies in dump.orphans:
            self.orphans[engine_hash], self.counts[engine_hash] = Orphan(parent, local), counts_of(copies)

    def check_invariants(self) -> None:
        """See `BlockIndex.check_invariants`."""
        known = [*self.nodes, *self.orphans, *self.ghosts]
        assert len(known) == len(set(known)), "an engine hash is known in one way"
        assert len(self.ghosts) <= len(self.gone) <= self.ghost_limit, "ghosts are bounded"
        assert len(self.orphans) <= ORPHAN_LIMIT, "orphans are bounded"
        assert self.orphans.keys() <= self.counts.keys() <= self.orphans.keys() | self.nodes.keys(), "who has copies"
        assert all(self.counts.values()), "a known block has a copy"
        groups = {group for counts in self.counts.values() for group, _ in counts}
        assert groups <= {*self.full_groups}, "copies are in full-attention groups"
        named = {(name, node) for node, names in self.names.items() for name in names}
        assert named == set(self.nodes.items()), "nodes know their hashes"
        assert all(len(names) <= TWIN_LIMIT for names in self.names.values()), "names are bounded"
        parents = {orphan.parent for orphan in self.orphans.values()}
        assert not any(map(self._is_bound, parents)), "no orphan's parent is bound"


def _leading(held: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, held))


def _local(node: Prefix) -> int:
    return node.local
