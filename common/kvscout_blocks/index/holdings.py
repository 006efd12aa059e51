"""What one worker rank holds: its engine hashes, the prefixes they are bound to, their copies.

::

    engine hash ─┬─ blocks    bound: Block(node, counts for each place)
                 ├─ orphans   parent unknown: Orphan(parent hash, local hash, counts), found by `waiting`
                 ├─ ghosts    removed lately: Ghost(parent hash, local hash), nothing in the tree
                 └─ demoted   no longer verified: node, valid as a parent only

`names` lists the hashes of each node, bound and demoted ones.

`Holdings` keeps `PrefixTree` in step: each change of counts sets the worker's bit at the node. It knows
nothing of event formats; `reference` judges events and calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from kvscout_blocks.bytes.events import Tier
from kvscout_blocks.index.block_index import GHOST_LIMIT, ORPHAN_LIMIT, TWIN_LIMIT, Cut
from kvscout_blocks.index.copies import Counts, Place, add_copy
from kvscout_blocks.index.prefix_tree import NOT_HELD, Node, PrefixTree
from kvscout_blocks.index.windows import WindowGroups
from kvscout_common.worker import CopyMode

K = TypeVar("K")
V = TypeVar("V")


class Block:
    """A bound engine hash. Several of one worker can share a node; `twin` links them."""

    __slots__ = ("counts", "engine_hash", "level", "node", "twin")

    def __init__(self, engine_hash: int, node: Node, counts: Counts) -> None:
        self.engine_hash = engine_hash
        self.node = node
        self.counts = counts
        self.level = NOT_HELD
        self.twin: Block | None = None


class Prediction(NamedTuple):
    """That a worker holds a node's block until `expiry`."""

    expiry: float
    serial: int
    """Tells it from earlier predictions of the same block."""


class Orphan(NamedTuple):
    """An engine hash whose parent this worker never had."""

    parent: int
    local: int
    counts: Counts


class Ghost:
    """A block that went: what it takes to put it back."""

    __slots__ = ("engine_hash", "local", "parent", "tiers")

    def __init__(self, engine_hash: int, parent: int | None, local: int, tiers: tuple[Tier, ...]) -> None:
        self.engine_hash = engine_hash
        self.parent = parent
        """Engine hash of the block above; None: it began a prompt."""
        self.local = local
        self.tiers = tiers
        """Where the engine still has it, for it was the bound that dropped it; empty: the engine removed it."""


def level_of(counts: Mapping[Place, int], full_groups: tuple[int, ...]) -> int:
    """The fastest tier at which every full-attention group has a copy there or faster, or `NOT_HELD`."""
    slowest = 0 if full_groups else NOT_HELD
    for group in full_groups:
        tier = 0
        while (group, tier) not in counts:
            tier += 1
            if tier == NOT_HELD:
                return NOT_HELD
        slowest = max(slowest, tier)
    return slowest


class Holdings:
    """The content of one worker rank, in one slot of the tree.

    Args:
        tree: Shared by all workers of the index.
        slot: This worker's bit position in the tree's masks; no other user until it is drained.
    """

    def __init__(self, tree: PrefixTree, slot: int) -> None:
        self.tree = tree
        self.slot = slot
        self.bit = 1 << slot
        self.full_groups: tuple[int, ...] = ()
        self.blocks: dict[int, Block] = {}
        self.nodes: dict[Node, Block] = {}
        """Bound nodes, each with the first of its blocks."""
        self.names: dict[Node, tuple[int, ...]] = {}
        """Engine hashes of each node in the order in which they were bound: bound ones and demoted ones."""
        self.names_gone: dict[Node, int] = {}
        """Node → the engine hash that was bound there until the event in hand removed it."""
        self.incomplete = False
        """A limit kept something out."""
        self.refused_twins = 0
        """Blocks that were not bound because theirs had too many engine hashes."""
        self.orphans: dict[int, Orphan] = {}
        self.waiting: dict[int, dict[int, None]] = {}
        """Parent hash → orphans that wait for it, in order."""
        self.ghosts: dict[int, Ghost] = {}
        self.gone: deque[Ghost] = deque()
        """What went, oldest first, with those that came back since: they keep their places."""
        self.demoted: dict[int, Node] = {}
        self.demoted_until = 0.0
        self.demoting_until: float | None = None
        """When the predictions end that bound hashes are being turned into; None: they are not."""
        self.cuts: list[Cut] = []
        """Cuts under way: to be completed before anything changes."""
        self.predictions: dict[Node, Prediction] = {}
        """Kept by `predictions.Predictions`."""
        self.visible = True
        """False once the worker dropped it: then it only waits to be drained."""
        self.held = 0
        """Nodes held on any tier."""
        self.device_copies = 0
        self.windows: WindowGroups | None = None
        self.zero_is_block = False
        """A prompt began without a parent, or a block was called 0: so a parent 0 is a block like any other."""
        """Groups with a sliding window, if there are any."""
        self.may_have_hidden = False
        """False proves that no block is hidden; True says that one may be."""

    @property
    def entries(self) -> int:
        """Bound hashes and orphans: what the `max_blocks` bound counts, besides ghosts."""
        return len(self.blocks) + len(self.orphans)

    def set_full_groups(self, groups: tuple[int, ...]) -> None:
        """Tells which full-attention groups the worker has; a block must be in all of them to be held."""
        if groups == self.full_groups:
            return
        self.full_groups = groups
        self._doubt_evicted()
        for block in self.blocks.values():
            self._relevel(block)

    def prefix_of(self, engine_hash: int) -> Node | None:
        """The node that an engine hash names, held or demoted; None for orphans, ghosts and unknown ones."""
        block = self.blocks.get(engine_hash)
        return block.node if block is not None else self.demoted.get(engine_hash)

    def store(self, engine_hash: int, node: Node, at: Place, mode: CopyMode) -> bool:
        """Adds one copy of a block whose prefix is known.

        Returns:
            False if the hash is an orphan or bound to another prefix, or the node has too many: nothing changed.
        """
        block = self.blocks.get(engine_hash)
        if block is None:
            if engine_hash in self.orphans or not self._has_room(engine_hash, node):
                return False
            block = self._bind(engine_hash, node, {})
            self.forget(engine_hash, bound_to=node)
        elif block.node is not node:
            return False
        self._add_copy(block.counts, at, mode)
        self._relevel(block)
        self._adopt(engine_hash)
        return True

    def store_orphan(self, engine_hash: int, parent: int, local: int, at: Place, mode: CopyMode) -> bool:
        """Adds one copy of a block whose parent is unknown; the caller checks `can_wait`."""
        orphan = self.orphans.get(engine_hash)
        if engine_hash in self.blocks or (orphan is not None and orphan[:2] != (parent, local)):
            return False
        if orphan is None:
            self.forget(engine_hash)
            orphan = self.orphans[engine_hash] = Orphan(parent, local, {})
            self.waiting.setdefault(parent, {})[engine_hash] = None
        self._add_copy(orphan.counts, at, mode)
        return True

    def can_wait(self, engine_hash: int) -> bool:
        """Whether there is room for this orphan."""
        return engine_hash in self.orphans or len(self.orphans) < ORPHAN_LIMIT

    def move(self, engine_hash: int, at: Place, mode: CopyMode) -> bool:
        """Adds one copy of a block by its engine hash alone; False if that is neither bound, demoted nor an orphan."""
        orphan = self.orphans.get(engine_hash)
        if orphan is not None:
            self._add_copy(orphan.counts, at, mode)
            return True
        node = self.prefix_of(engine_hash)
        return node is not None and self.store(engine_hash, node, at, mode)

    def remove(self, engine_hash: int, at: Place) -> bool:
        """Drops one copy; False if there is none like it."""
        ghost = self.ghosts.get(engine_hash)
        if ghost is not None and at[1] in ghost.tiers:
            ghost.tiers = tuple(tier for tier in ghost.tiers if tier is not at[1])
            return True
        block = self.blocks.get(engine_hash)
        orphan = self.orphans.get(engine_hash)
        counts = block.counts if block else orphan.counts if orphan else {}
        number = counts.get(at, 0)
        if not number:
            return False
        if number > 1:
            counts[at] = number - 1
        else:
            del counts[at]
        self.device_copies -= at[1] is Tier.DEVICE
        if block is not None:
            self._relevel(block)
            if not counts:
                self.unbind(block)
        elif not counts:
            self._drop_orphan(engine_hash)
        return True

    def retire_demoted(self, engine_hash: int) -> bool:
        """Turns a demoted hash into a ghost because the engine removed it; False if it is none."""
        node = self.demoted.pop(engine_hash, None)
        if node is None:
            return False
        self._bury(engine_hash, node)
        return True

    def restore_evicted(self, engine_hash: int) -> None:
        """Gives a block that the bound dropped its copies again, and all those above it.

        The engine named it, so it has them all. Where the prefix is not whole any more nothing comes back.
        """
        chain: list[Ghost] = []
        above: Node | None = None
        ghost = self.ghosts.get(engine_hash)
        while ghost is not None and ghost.tiers and len(chain) < len(self.ghosts):
            chain.append(ghost)
            above = self.tree.root if ghost.parent is None else self.prefix_of(ghost.parent)
            if above is not None or ghost.parent is None:
                break
            ghost = self.ghosts.get(ghost.parent)
        while (
            above is not None
            and chain
            and self._has_room(chain[-1].engine_hash, self.tree.child(above, chain[-1].local))
        ):
            ghost = chain.pop()
            above = self.tree.child(above, ghost.local)
            del self.ghosts[ghost.engine_hash]
            counts = {(group, tier): 1 for tier in ghost.tiers for group in self.full_groups}
            self.device_copies += _device_copies(counts)
            self._relevel(self._bind(ghost.engine_hash, above, counts))
            self._adopt(ghost.engine_hash)
            self.tree.touch(above)
        for ghost in chain:
            ghost.tiers = ()

    def forget_oldest_ghost(self) -> None:
        """Gives the place of the oldest one away, of which there must be any."""
        oldest = self.gone.popleft()
        if self.ghosts.get(oldest.engine_hash) is oldest:
            del self.ghosts[oldest.engine_hash]

    def _doubt_evicted(self) -> None:
        """It is no longer known which of the blocks that the bound dropped the engine has."""
        for ghost in self.ghosts.values():
            ghost.tiers = ()

    def unbind(self, block: Block) -> None:
        """Makes a bound hash a ghost, whatever copies it has: then it is the bound that drops it."""
        tiers = tuple(
            tier for tier in Tier if self.full_groups and all((g, tier) in block.counts for g in self.full_groups)
        )
        self.device_copies -= _device_copies(block.counts)
        block.counts.clear()
        self._relevel(block)
        self._unlink(block)
        self._bury(block.engine_hash, block.node, tiers)

    def evict_orphan(self, engine_hash: int) -> None:
        """Drops an orphan, whatever copies it has."""
        self.device_copies -= _device_copies(self.orphans[engine_hash].counts)
        self._drop_orphan(engine_hash)

    def begin_demotion(self, until: float) -> None:
        """Drops the orphans; `demote` does the rest."""
        for engine_hash in list(self.orphans):
            self.evict_orphan(engine_hash)
        self._doubt_evicted()
        if self.windows is not None:
            self.windows = self.windows.emptied()
        self.demoted_until = max(self.demoted_until, until)
        self.demoting_until = until

    def demote(self, budget: int) -> list[Node]:
        """Makes about so many bound hashes demoted, and ends the demotion with the last; nodes that the device held."""
        on_device = []
        while self.nodes and budget > 0:
            node = next(reversed(self.nodes))
            if node.level(self.bit) == Tier.DEVICE:
                on_device.append(node)
            for block in list(twins(self.nodes[node])):
                self.device_copies -= _device_copies(block.counts)
                block.counts.clear()
                self._relevel(block)
                self._unlink(block)
                self.demoted[block.engine_hash] = node
                budget -= 1
        if not self.nodes:
            self.demoting_until = None
            self.may_have_hidden = False
        return on_device

    def expire_demoted(self, now: float, budget: int) -> int:
        """Forgets demoted hashes whose time has come, at most `budget`; how many it forgot."""
        if now < self.demoted_until or self.demoting_until is not None:
            return 0

        def forget(engine_hash: int, node: Node) -> None:
            self._unname(engine_hash, node)
            self.tree.release(node)

        return _drain(self.demoted, budget, forget)

    def restore(self, engine_hash: int, node: Node, counts: Counts) -> None:
        """Binds a hash with its copies, from a dump, unless its node has too many; the hash must be unknown."""
        if self._has_room(engine_hash, node):
            self.device_copies += _device_copies(counts)
            self._relevel(self._bind(engine_hash, node, counts))

    def restore_orphan(self, engine_hash: int, orphan: Orphan) -> None:
        """Adds an orphan with its copies, from a dump; the hash must be unknown."""
        self.device_copies += _device_copies(orphan.counts)
        self.orphans[engine_hash] = orphan
        self.waiting.setdefault(orphan.parent, {})[engine_hash] = None

    def hidden(self) -> int:
        """Blocks held below a hole. O(1) if there cannot be any, else O(blocks)."""
        if not self.may_have_hidden:
            return 0
        hidden = self.held - len(self.rooted())
        self.may_have_hidden = hidden > 0
        return hidden

    def rooted(self) -> set[Node]:
        """Nodes held with all their ancestors, which is what a query can match. O(blocks)."""
        is_rooted: dict[Node, bool] = {self.tree.root: True}
        for node in self.nodes:
            trail = []
            step: Node | None = node
            while step is not None and step not in is_rooted:
                trail.append(step)
                step = step.parent
            for member in reversed(trail):
                parent = member.parent
                is_rooted[member] = parent is not None and is_rooted[parent] and member.held_by(self.bit)
        return {node for node in self.nodes if is_rooted[node]}

    def drain(self, budget: int) -> int:
        """Takes content that is no longer visible out of the tree, at most `budget` entries; how many."""
        tree, bit = self.tree, self.bit
        self.names.clear()

        def drop_block(_: int, block: Block) -> None:
            tree.set_level(block.node, bit, NOT_HELD)
            tree.release(block.node)

        def drop_prediction(node: Node, _: Prediction) -> None:
            tree.set_predicted(node, bit, False)
            tree.release(node)

        left = budget - _drain(self.blocks, budget, drop_block)
        left -= _drain(self.predictions, left, drop_prediction)
        left -= _drain(self.demoted, left, lambda _, node: tree.release(node))
        if not self.blocks:
            self.nodes.clear()
            self.orphans.clear()
            self.waiting.clear()
            self.ghosts.clear()
            self.gone.clear()
        return budget - left

    @property
    def drained(self) -> bool:
        """Whether nothing of it is left in the tree."""
        return not (self.blocks or self.predictions or self.demoted)

    def _add_copy(self, counts: Counts, at: Place, mode: CopyMode) -> None:
        self.device_copies += add_copy(counts, at, mode) and at[1] is Tier.DEVICE

    def _bind(self, engine_hash: int, node: Node, counts: Counts) -> Block:
        block = Block(engine_hash, node, counts)
        block.twin = self.nodes.get(node)
        self.nodes[node] = self.blocks[engine_hash] = block
        names = self.names.get(node, ())
        if engine_hash not in names:
            self.names[node] = (*names, engine_hash)
        self.tree.acquire(node)
        return block

    def _unname(self, engine_hash: int, node: Node) -> None:
        names = tuple(name for name in self.names[node] if name != engine_hash)
        if names:
            self.names[node] = names
        else:
            del self.names[node]

    def _has_room(self, engine_hash: int, node: Node) -> bool:
        """Whether a node may have a hash; of too many the first one without copies goes for it."""
        names = self.names.get(node, ())
        if len(names) < TWIN_LIMIT or engine_hash in names:
            return True
        oldest = next((name for name in names if name not in self.blocks), None)
        if oldest is None:
            self.refused_twins += 1
            return False
        self.forget(oldest)
        return True

    def _unlink(self, block: Block) -> None:
        """Takes a block out of `blocks` and `nodes`; the caller takes over its hold on the node."""
        del self.blocks[block.engine_hash]
        head = self.nodes[block.node]
        if head is block:
            if block.twin is None:
                del self.nodes[block.node]
            else:
                self.nodes[block.node] = block.twin
            return
        while head.twin is not block:
            assert head.twin is not None
            head = head.twin
        head.twin = block.twin

    def _relevel(self, block: Block) -> None:
        """Brings the tree in step with a block's counts."""
        level = level_of(block.counts, self.full_groups)
        if level == block.level:
            return
        block.level = level
        node = block.node
        head = self.nodes[node]
        best = level if head.twin is None else min(twin.level for twin in twins(head))
        before = node.level(self.bit)
        if best == before:
            return
        self.tree.set_level(node, self.bit, best)
        if best == NOT_HELD:
            self.held -= 1
            self.may_have_hidden = self.may_have_hidden or bool(node.children)
        elif before == NOT_HELD:
            self.held += 1
            parent = node.parent
            assert parent is not None
            self.may_have_hidden = self.may_have_hidden or not parent.held_by(self.bit)

    def _adopt(self, engine_hash: int) -> None:
        """Binds the orphans that waited for a hash, and those that waited for them."""
        arrived = [engine_hash]
        while arrived:
            parent = arrived.pop()
            for child in self.waiting.pop(parent, ()):
                orphan = self.orphans.pop(child)
                node = self.tree.child(self.blocks[parent].node, orphan.local)
                if not self._has_room(child, node):
                    self.device_copies -= _device_copies(orphan.counts)
                    continue
                self._relevel(self._bind(child, node, orphan.counts))
                self.tree.touch(node)
                arrived.append(child)

    def forget(self, engine_hash: int, bound_to: Node | None = None) -> None:
        """Ends a ghost or demoted hash, because the hash is stored again or has to go."""
        self.ghosts.pop(engine_hash, None)
        node = self.demoted.pop(engine_hash, None)
        if node is not None:
            if node is not bound_to:
                self._unname(engine_hash, node)
            self.tree.release(node)

    def _bury(self, engine_hash: int, node: Node, tiers: tuple[Tier, ...] = ()) -> None:
        """Makes a hash that leaves its node the youngest ghost, if it is known what the block above is called."""
        above = node.parent
        assert above is not None
        parent = None
        if above.parent is not None:
            names = self.names.get(above)
            parent = names[0] if names else self.names_gone.get(above)
        self._unname(engine_hash, node)
        if node not in self.names:
            self.names_gone[node] = engine_hash
        self.tree.release(node)
        if parent is None and above.parent is not None:
            return
        if len(self.gone) >= GHOST_LIMIT:
            self.forget_oldest_ghost()
        ghost = self.ghosts[engine_hash] = Ghost(engine_hash, parent, node.local, tiers)
        self.gone.append(ghost)

    def _drop_orphan(self, engine_hash: int) -> None:
        parent = self.orphans.pop(engine_hash).parent
        siblings = self.waiting[parent]
        del siblings[engine_hash]
        if not siblings:
            del self.waiting[parent]


def twins(block: Block | None) -> Iterator[Block]:
    """A node's blocks, from its first one."""
    while block is not None:
        yield block
        block = block.twin


def _device_copies(counts: Counts) -> int:
    return sum(number for (_, tier), number in counts.items() if tier is Tier.DEVICE)


def _drain(entries: dict[K, V], budget: int, drop: Callable[[K, V], None]) -> int:
    """Pops at most `budget` entries, youngest first, and drops each; how many it popped."""
    number = min(len(entries), max(budget, 0))
    for _ in range(number):
        drop(*entries.popitem())
    return number
