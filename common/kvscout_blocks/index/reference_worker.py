"""One worker rank of the reference index: its engine hashes, the prefixes they are bound to, their copies.

::

    engine hash ─┬─ blocks    bound: Block(node, counts for each place)
                 ├─ orphans   parent unknown: Orphan(parent hash, local hash, counts), found by `waiting`
                 ├─ ghosts    removed lately: Ghost(parent hash, local hash), not in the tree
                 └─ demoted   no longer verified: node, valid as a parent only
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakValueDictionary

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


class Node:
    """One prefix: the block with local hash `local` below `parent`."""

    __slots__ = ("__weakref__", "depth", "local", "parent", "sequence_hash", "used")

    def __init__(self, parent: Node | None, local: int) -> None:
        self.parent = parent
        self.local = local
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.sequence_hash: int = extend_sequence(parent.sequence_hash if parent and parent.depth else None, local)
        self.used = 0
        """The tree's round in which it was used last; never later than its parent's."""


class PrefixTree:
    """All prefixes that a worker has an engine hash or a prediction for, and those above them."""

    def __init__(self) -> None:
        self.root = Node(None, 0)
        self.round = 0
        """The clock of the `max_blocks` bound."""
        self._nodes: WeakValueDictionary[tuple[Node, int], Node] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._nodes)

    def child(self, parent: Node, local: int) -> Node:
        """Return the node below `parent`; it lives as long as something refers to it or a node below it."""
        node = self._nodes.get((parent, local))
        if node is None:
            node = self._nodes[parent, local] = Node(parent, local)
        return node

    def path(self, hashes: Iterable[int]) -> list[Node]:
        """Return the nodes of a prompt, as far as there are any."""
        path, node = [], self.root
        for local in hashes:
            child = self._nodes.get((node, local))
            if child is None:
                break
            path.append(node := child)
        return path

    def touch(self, node: Node | None) -> None:
        """Mark a block and its ancestors as used in this round."""
        while node is not None and node.used < self.round:
            node.used = self.round
            node = node.parent


@dataclass(slots=True)
class Block:
    """A bound engine hash."""

    node: Node
    counts: Counts


class Orphan(NamedTuple):
    """An engine hash whose parent this worker never had."""

    parent: int
    local: int
    counts: Counts


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
        tree: Shared by all workers of the index.
        block_size: Tokens of a block.
        eagle: Blocks are EAGLE windows.
        max_blocks: Bound of the index; 0: none.
        options: As registered.
    """

    def __init__(self, tree: PrefixTree, block_size: int, eagle: bool, max_blocks: int, options: WorkerOptions) -> None:
        self.options = options
        self.epoch = 0
        self.last_event_id: int | None = None
        self.groups: dict[int, bool] = {}
        """Known cache groups, and whether each is full attention."""
        self.full_groups: tuple[int, ...] = ()
        """Groups that must all have a block for it to be held."""
        self.windows: WindowGroups | None = None
        self.incompatible = ""
        self.ignored: Counter[Ignored] = Counter()
        self._tree = tree
        self._block_size = block_size
        self._eagle = eagle
        self._max_window_blocks = max_blocks or WINDOW_LIMIT
        self.clear()

    def clear(self) -> None:
        """Drop all blocks; groups stay known."""
        self.blocks: dict[int, Block] = {}
        self.names: dict[Node, list[int]] = {}
        """Engine hashes of each node, bound and demoted ones, in the order in which they were bound."""
        self.names_gone: dict[Node, int] = {}
        """Node → the engine hash that was bound there until the event in hand removed it."""
        self.levels: dict[Node, int] = {}
        """Fastest tier of each held node, cumulative over full-attention groups."""
        self.orphans: dict[int, Orphan] = {}
        self.waiting: dict[int, dict[int, None]] = {}
        """Parent hash → orphans that wait for it, in order."""
        self.ghosts: dict[int, Ghost] = {}
        self.gone: deque[Ghost] = deque()
        """Ghosts, oldest first, with those that were stored again since: they keep their places."""
        self.demoted: dict[int, Node] = {}
        self.demoted_until = 0.0
        self.predictions: dict[Node, float] = {}
        """Node → expiry, in seconds of the index's clock."""
        self.device_copies = 0
        self.incomplete = False
        """A limit kept blocks out."""
        self.zero_is_block = False
        """A prompt began without a parent, or a block was named 0: so a parent 0 is a block like any other."""
        if self.windows is not None:
            self.windows = self.windows.emptied()

    # Queries

    def overlap(self, path: Sequence[Node], sequence_hashes: Sequence[int], usable: int) -> Overlap:
        """Return the leading blocks of a prompt that the worker has; `path` ends where the tree does."""
        levels = self.levels
        device, host, disk, external = (_leading(levels.get(node, NOT_HELD) <= at for node in path) for at in Tier)
        predicted = _leading(levels.get(node) == Tier.DEVICE or node in self.predictions for node in path)
        overlap = Overlap(device, host, disk, external, predicted)
        if self.windows is None:
            return overlap
        most = overlap if self.full_groups else [len(sequence_hashes)] * len(Tier)
        device, host, disk, external = (
            self.windows.longest(sequence_hashes, most[tier], usable, tier) for tier in Tier
        )
        # What is predicted beyond what is held will come with its windows.
        predicted = predicted if predicted > overlap.device else 0
        return Overlap(device, host, disk, external, max(predicted, device))

    def rooted(self) -> set[Node]:
        """Return the held nodes whose ancestors are all held: what a query can match."""
        rooted = {self._tree.root}
        for node in sorted(self.levels, key=lambda node: node.depth):
            if node.parent in rooted:
                rooted.add(node)
        return rooted - {self._tree.root}

    @property
    def hidden(self) -> int:
        """Blocks held below a hole."""
        return len(self.levels) - len(self.rooted())

    @property
    def entries(self) -> int:
        """Bound hashes and orphans: what the `max_blocks` bound counts, besides ghosts."""
        return len(self.blocks) + len(self.orphans)

    @property
    def over_capacity(self) -> bool:
        """Whether there are more device copies than the device has room for."""
        return 0 < self.options.total_kv_blocks < self.device_copies

    # Events

    def ignore(self, reason: Ignored, number: int = 1) -> None:
        """Count what was not indexed."""
        if number:
            self.ignored[reason] += number
            self.incomplete |= reason.is_limit

    def set_groups(self, groups: dict[int, bool]) -> None:
        """Set the known cache groups; a block must be in all full-attention ones to be held."""
        self.groups = groups
        full_groups = tuple(sorted(group for group, full in groups.items() if full))
        if full_groups != self.full_groups:
            self.full_groups = full_groups
            self._doubt_evicted()
            for node in self.names:
                self._refresh(node)

    def store(self, event: Stored) -> None:
        """Judge one Stored event, in the order of `Ignored`, and store its blocks."""
        has_content = bool(event.tokens or event.local_hashes)
        if 0 in event.engine_hashes or (event.parent is None and has_content):
            self.zero_is_block = True
        event = self._without_zero_parent(event)
        if event.group not in self.groups and len(self.groups) < GROUP_LIMIT:
            self.set_groups({**self.groups, event.group: event.full_attention})
        if not self.groups.get(event.group):
            self._store_window(event)
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
        if self.groups.get(event.group) is False:
            if self.windows is None or event.group not in self.windows.groups:
                self.ignore(Ignored.SKIPPED_GROUP)
            else:
                self.ignore(Ignored.UNKNOWN_REMOVED, self.windows.remove(event))
            return
        for engine_hash in event.engine_hashes:
            node = self.prefix_of(engine_hash)
            if node is not None:
                self.predictions.pop(node, None)
            if self._remove_copy(engine_hash, (event.group, event.tier)):
                continue
            if engine_hash in self.demoted:
                self._bury(engine_hash, self.demoted.pop(engine_hash))
            else:
                self.ignore(Ignored.UNKNOWN_REMOVED)
        self.names_gone.clear()

    def settle_windows(self, batch: EventBatch) -> None:
        """Find the prefixes of the blocks that a batch stored in groups with a window."""
        windows = self.windows
        if windows is None:
            return

        def sequence_hash_of(engine_hash: int) -> int | None:
            block = self.blocks.get(engine_hash)
            return block.node.sequence_hash if block is not None else None

        def chains() -> Iterator[Chain]:
            rules = self._block_size, self._eagle, self.options.adapters
            for event in batch.events:
                if not isinstance(event, Stored) or event.group not in windows.groups:
                    continue
                event = self._without_zero_parent(event)
                if (event.tokens or event.local_hashes) and judge_content(event, *rules) is None:
                    yield event.parent, event.engine_hashes, self._local_hashes(event)

        self.ignore(Ignored.UNKNOWN_MOVED, windows.settle(sequence_hash_of, chains))

    def _without_zero_parent(self, event: Stored) -> Stored:
        """Replace a parent 0 by none where no block of the worker is named 0 and its roots come so."""
        if event.parent != 0 or self.zero_is_block or 0 in self.blocks or 0 in self.orphans:
            return event
        return replace(event, parent=None)

    def _local_hashes(self, event: Stored) -> Sequence[int]:
        return local_hashes_of(event, self._block_size, self._eagle, self.options.adapters)

    def _store_window(self, event: Stored) -> None:
        windows = self.windows or WindowGroups(self._block_size)
        if event.group not in self.groups or not windows.learn(event):
            self.ignore(Ignored.SKIPPED_GROUP)
            return
        self.windows = windows
        self.ignore(Ignored.WINDOW_LIMIT, windows.store(event, self.options.copies, self._max_window_blocks))

    def _store_chain(self, event: Stored, local_hashes: Sequence[int]) -> None:
        """Store an event's blocks below their parent, or as orphans if it is unknown."""
        for engine_hash in (*(() if event.parent is None else (event.parent,)), *event.engine_hashes):
            self._restore_evicted(engine_hash)
        above = self._tree.root if event.parent is None else self.prefix_of(event.parent)
        if above is None:
            self._store_orphans(event, local_hashes)
            return
        for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
            above = self._tree.child(above, local)
            self._store_copy(engine_hash, above, (event.group, event.tier))
        self._tree.touch(above)

    def _store_copy(self, engine_hash: int, node: Node, at: tuple[int, Tier]) -> None:
        block = self.blocks.get(engine_hash)
        if engine_hash in self.orphans or (block is not None and block.node is not node):
            self.ignore(Ignored.HASH_CONFLICT)
            return
        if block is None:
            if not self._has_room(engine_hash, node):
                self.ignore(Ignored.TWIN_LIMIT)
                return
            block = self._bind(engine_hash, node, {})
        self._add_copy(block.counts, at)
        self._refresh(node)
        self.predictions.pop(node, None)
        self._adopt(engine_hash)

    def _store_orphans(self, event: Stored, local_hashes: Sequence[int]) -> None:
        assert event.parent is not None
        parent, rest = event.parent, len(local_hashes)
        for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
            orphan = self.orphans.get(engine_hash)
            if orphan is None and len(self.orphans) >= ORPHAN_LIMIT:
                self.ignore(Ignored.ORPHAN_LIMIT, rest)
                return
            if engine_hash in self.blocks or (orphan is not None and orphan[:2] != (parent, local)):
                # What follows hangs below a block that this event contradicts.
                self.ignore(Ignored.HASH_CONFLICT, rest)
                return
            if orphan is None:
                self._forget(engine_hash)
                orphan = self._add_orphan(engine_hash, Orphan(parent, local, {}))
            self._add_copy(orphan.counts, (event.group, event.tier))
            parent, rest = engine_hash, rest - 1

    def _move(self, event: Stored) -> None:
        """Store blocks that are named by their engine hashes alone: a tier change."""
        for engine_hash in event.engine_hashes:
            self._restore_evicted(engine_hash)
            ghost, orphan = self.ghosts.pop(engine_hash, None), self.orphans.get(engine_hash)
            node = self.prefix_of(engine_hash)
            if ghost is not None:
                back = replace(event, engine_hashes=(engine_hash,), parent=ghost.parent)
                self._store_chain(back, (ghost.local,))
            elif orphan is not None:
                self._add_copy(orphan.counts, (event.group, event.tier))
            elif node is not None:
                self._store_copy(engine_hash, node, (event.group, event.tier))
            else:
                self.ignore(Ignored.UNKNOWN_MOVED)

    def _remove_copy(self, engine_hash: int, at: tuple[int, Tier]) -> bool:
        """Drop one copy; False if there is none like it."""
        ghost, block, orphan = self.ghosts.get(engine_hash), self.blocks.get(engine_hash), self.orphans.get(engine_hash)
        if ghost is not None and at[1] in ghost.tiers:
            ghost.tiers = tuple(tier for tier in ghost.tiers if tier is not at[1])
            return True
        counts = block.counts if block else orphan.counts if orphan else {}
        if not drop_copy(counts, at):
            return False
        self.device_copies -= at[1] is Tier.DEVICE
        if block is not None and not counts:
            self.unbind(engine_hash)
        elif block is not None:
            self._refresh(block.node)
        elif not counts:
            self.drop_orphan(engine_hash)
        return True

    # Engine hashes

    def prefix_of(self, engine_hash: int) -> Node | None:
        """Return the node that an engine hash names, bound or demoted; None for orphans, ghosts and unknown ones."""
        block = self.blocks.get(engine_hash)
        return block.node if block is not None else self.demoted.get(engine_hash)

    def unbind(self, engine_hash: int) -> None:
        """Turn a bound hash into a ghost; if it has copies, the bound drops it and the engine still has them."""
        block = self.blocks[engine_hash]
        groups = self.full_groups
        tiers = tuple(tier for tier in Tier if groups and all((group, tier) in block.counts for group in groups))
        self.device_copies -= _device_copies(block.counts)
        del self.blocks[engine_hash]
        self._refresh(block.node)
        self._bury(engine_hash, block.node, tiers)

    def drop_orphan(self, engine_hash: int) -> None:
        """Drop an orphan, whatever copies it has."""
        orphan = self.orphans.pop(engine_hash)
        self.device_copies -= _device_copies(orphan.counts)
        siblings = self.waiting[orphan.parent]
        del siblings[engine_hash]
        if not siblings:
            del self.waiting[orphan.parent]

    def demote(self, until: float) -> list[Node]:
        """Turn bound hashes into demoted ones and drop orphans; return the nodes that the device held."""
        on_device = [node for node, level in self.levels.items() if level == Tier.DEVICE]
        self.demoted.update((engine_hash, block.node) for engine_hash, block in self.blocks.items())
        self.demoted_until = max(self.demoted_until, until)
        for kind in (self.blocks, self.levels, self.orphans, self.waiting):
            kind.clear()
        self.device_copies = 0
        self._doubt_evicted()
        if self.windows is not None:
            self.windows = self.windows.emptied()
        return on_device

    def expire_demoted(self, now: float) -> None:
        """Forget the demoted hashes if their time has come."""
        if now >= self.demoted_until:
            for engine_hash in list(self.demoted):
                self._forget(engine_hash)

    def evict(self, nodes: Iterable[Node], surplus: int) -> int:
        """Drop about `surplus` blocks of the nodes used longest ago, the deepest first; return their number.

        An ancestor was never used longer ago than a block below it, so it goes later.
        """
        dropped = 0
        for node in nsmallest(surplus, nodes, key=lambda node: (node.used, -node.depth)):
            if dropped >= surplus:
                break
            for engine_hash in [name for name in self.names[node] if name in self.blocks]:
                self.unbind(engine_hash)
                dropped += 1
        self.names_gone.clear()
        return dropped

    def evict_unmatchable(self, surplus: int) -> int:
        """Drop about `surplus` entries that no query can match: orphans, then bound blocks that are not rooted."""
        orphans = list(self.orphans)[: max(surplus, 0)]
        for engine_hash in orphans:
            self.drop_orphan(engine_hash)
        if surplus <= len(orphans):
            return len(orphans)
        rooted = self.rooted()
        unmatchable = [node for node in self.bound_nodes() if node not in rooted]
        return len(orphans) + self.evict(unmatchable, surplus - len(orphans))

    def bound_nodes(self) -> dict[Node, None]:
        """Return the nodes with a bound hash, in order."""
        return dict.fromkeys(block.node for block in self.blocks.values())

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
        above: Node | None = None
        ghost = self.ghosts.get(engine_hash)
        while above is None and ghost is not None and ghost.tiers and len(chain) < len(self.ghosts):
            chain.append(ghost)
            above = self._tree.root if ghost.parent is None else self.prefix_of(ghost.parent)
            ghost = self.ghosts.get(ghost.parent) if ghost.parent is not None else None
        while above is not None and chain:
            above = self._tree.child(above, chain[-1].local)
            if not self._has_room(chain[-1].engine_hash, above):
                break
            ghost = chain.pop()
            self.restore(ghost.engine_hash, above, {(g, tier): 1 for tier in ghost.tiers for g in self.full_groups})
            self._adopt(ghost.engine_hash)
        for ghost in chain:
            ghost.tiers = ()

    def restore(self, engine_hash: int, node: Node, counts: Counts) -> None:
        """Bind a hash with its copies, from a dump or after an eviction, unless its node has too many."""
        if self._has_room(engine_hash, node):
            self.device_copies += _device_copies(counts)
            self._bind(engine_hash, node, counts)
            self._refresh(node)
            self._tree.touch(node)

    def _adopt(self, engine_hash: int) -> None:
        """Bind the orphans that waited for a hash, and those that waited for them."""
        arrived = [engine_hash]
        while arrived:
            parent = arrived.pop()
            for child in list(self.waiting.get(parent, ())):
                orphan = self.orphans[child]
                self.drop_orphan(child)
                node = self._tree.child(self.blocks[parent].node, orphan.local)
                if self._has_room(child, node):
                    self.restore(child, node, orphan.counts)
                    arrived.append(child)
                else:
                    self.ignore(Ignored.TWIN_LIMIT)

    def _bind(self, engine_hash: int, node: Node, counts: Counts) -> Block:
        self._forget(engine_hash, bound_to=node)
        names = self.names.setdefault(node, [])
        if engine_hash not in names:
            names.append(engine_hash)
        block = self.blocks[engine_hash] = Block(node, counts)
        return block

    def _has_room(self, engine_hash: int, node: Node) -> bool:
        """Whether a node may have a hash; of too many the first one without copies goes for it."""
        names = self.names.get(node, [])
        if len(names) < TWIN_LIMIT or engine_hash in names:
            return True
        oldest = next((name for name in names if name not in self.blocks), None)
        if oldest is not None:
            self._forget(oldest)
        return oldest is not None

    def _forget(self, engine_hash: int, bound_to: Node | None = None) -> None:
        """End a ghost or demoted hash, as the hash is stored again or has to go."""
        self.ghosts.pop(engine_hash, None)
        node = self.demoted.pop(engine_hash, None)
        if node is not None and node is not bound_to:
            self._unname(engine_hash, node)

    def _unname(self, engine_hash: int, node: Node) -> None:
        self.names[node].remove(engine_hash)
        if not self.names[node]:
            del self.names[node]

    def _bury(self, engine_hash: int, node: Node, tiers: tuple[Tier, ...] = ()) -> None:
        """Turn a hash that leaves its node into the youngest ghost, if the block above has or had a name."""
        self._unname(engine_hash, node)
        if node not in self.names:
            self.names_gone[node] = engine_hash
        parent: int | None = None
        if node.depth > 1:
            assert node.parent is not None
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

    def _add_copy(self, counts: Counts, at: tuple[int, Tier]) -> None:
        self.device_copies += add_copy(counts, at, self.options.copies) and at[1] is Tier.DEVICE

    def _add_orphan(self, engine_hash: int, orphan: Orphan) -> Orphan:
        self.orphans[engine_hash] = orphan
        self.waiting.setdefault(orphan.parent, {})[engine_hash] = None
        self.device_copies += _device_copies(orphan.counts)
        return orphan

    def _refresh(self, node: Node) -> None:
        """Recompute the level of a node: the fastest at which one of its hashes is in every full-attention group."""
        bound = [self.blocks[name] for name in self.names.get(node, ()) if name in self.blocks]
        level = min((self._level(block.counts) for block in bound), default=NOT_HELD)
        if level == NOT_HELD:
            self.levels.pop(node, None)
        else:
            self.levels[node] = level

    def _level(self, counts: Counts) -> int:
        fastest = [min((t for g, t in counts if g == group), default=NOT_HELD) for group in self.full_groups]
        return max(fastest, default=NOT_HELD)

    # State

    def dump(self, rank: WorkerRank) -> WorkerDump:
        """Return the state, in the order that `WorkerDump` promises."""
        below: dict[Node, set[Node]] = {}
        for node in self.bound_nodes():
            while node.parent is not None and node not in below.setdefault(node.parent, set()):
                below[node.parent].add(node)
                node = node.parent
        blocks: list[DumpedBlock] = []
        stack = [(self._tree.root, -1)]
        while stack:
            node, parent = stack.pop()
            position = -1
            if node.parent is not None:
                position = len(blocks)
                bound = [(name, self.blocks[name]) for name in self.names.get(node, ()) if name in self.blocks]
                blocks.extend(
                    DumpedBlock(name, parent, node.local, copies_of(block.counts)) for name, block in sorted(bound)
                )
                if not bound:
                    blocks.append(DumpedBlock(None, parent, node.local, ()))
            children = sorted(below.get(node, ()), key=lambda child: child.local, reverse=True)
            stack.extend((child, position) for child in children)
        return WorkerDump(
            rank,
            self.epoch,
            self.last_event_id,
            tuple(sorted(self.groups.items())),
            tuple(blocks),
            tuple(
                DumpedOrphan(name, orphan.parent, orphan.local, copies_of(orphan.counts))
                for name, orphan in sorted(self.orphans.items())
            ),
            self.incompatible,
            tuple(sorted(self.windows.groups.values())) if self.windows is not None else (),
            self.windows.dump() if self.windows is not None else (),
            self.incomplete,
        )

    def fill(self, dump: WorkerDump) -> None:
        """Take over a dump that was checked; the worker is empty."""
        self.epoch, self.last_event_id = dump.epoch, dump.last_event_id
        self.incompatible, self.incomplete = dump.incompatible, dump.incomplete
        self.set_groups(dict(dump.groups))
        if dump.windows:
            self.windows = WindowGroups(self._block_size, dump.windows)
            for engine_hash, sequence_hash, copies in reversed(dump.window_blocks):
                if self.windows.place(engine_hash, sequence_hash):
                    self.windows.blocks[engine_hash] = counts_of(copies)
        nodes: list[Node] = []
        for block in dump.blocks:
            above = nodes[block.parent] if block.parent >= 0 else self._tree.root
            nodes.append(self._tree.child(above, block.local_hash))
            if block.engine_hash is not None:
                self.restore(block.engine_hash, nodes[-1], counts_of(block.copies))
        for engine_hash, parent, local, copies in dump.orphans:
            self._add_orphan(engine_hash, Orphan(parent, local, counts_of(copies)))

    def check_invariants(self) -> None:
        """See `BlockIndex.check_invariants`."""
        kinds = (self.blocks, self.orphans, self.ghosts, self.demoted)
        known = [engine_hash for kind in kinds for engine_hash in kind]
        assert len(known) == len(set(known)), "an engine hash is known in one way"
        assert len(self.ghosts) <= len(self.gone) <= GHOST_LIMIT, "ghosts are bounded"
        assert len(self.orphans) <= ORPHAN_LIMIT, "orphans are bounded"
        named = {(name, node) for node, names in self.names.items() for name in names}
        bound = {(name, block.node) for name, block in self.blocks.items()}
        assert named == bound | self.demoted.items(), "nodes know their hashes"
        assert all(len(names) <= TWIN_LIMIT for names in self.names.values()), "names are bounded"
        counts = [block.counts for block in self.blocks.values()]
        counts += [orphan.counts for orphan in self.orphans.values()]
        assert all(counts), "a known block has a copy"
        assert all(self.groups[group] for each in counts for group, _ in each), "copies are in full-attention groups"
        assert self.device_copies == sum(map(_device_copies, counts)), "device copies are counted"
        levels = dict(self.levels)
        for node in self.names:
            self._refresh(node)
        assert levels == self.levels, "levels follow the copies"
        waiting = {child: parent for parent, children in self.waiting.items() for child in children}
        assert waiting == {name: orphan.parent for name, orphan in self.orphans.items()}, "orphans wait"
        assert not waiting.values() & self.blocks.keys(), "no orphan's parent is bound"


def _leading(held: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, held))


def _device_copies(counts: Counts) -> int:
    return sum(number for (_, tier), number in counts.items() if tier is Tier.DEVICE)
