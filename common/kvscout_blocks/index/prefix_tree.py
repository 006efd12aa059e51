"""The tree of prefixes, and who holds each: the part of the reference index that queries walk.

::

    root ─17─▶ Node(masks = (0b0011, 0b0011, 0b0111, 0b0111, 0b1000))
                              device  ≤host   ≤disk   ≤external predicted      one bit a worker slot

A prefix is its path of local hashes, so no two prefixes are ever confused. The first four masks are
cumulative (a slot on the device is in all of them), so that a query needs one AND a column and block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvscout_common.hashing import extend_sequence

COLUMNS: Final = 5
"""Device, host, disk, external (cumulative), predicted."""

NOT_HELD: Final = 4
"""The level of a block that is held on no tier; below it, a level is a `Tier`."""

Masks = tuple[int, int, int, int, int]

_NOBODY: Final[Masks] = (0, 0, 0, 0, 0)


class Node:
    """One prefix: the block with local hash `local` below `parent`."""

    __slots__ = ("children", "depth", "local", "masks", "parent", "refs", "used")

    def __init__(self, parent: Node | None, local: int) -> None:
        self.parent = parent
        self.local = local
        self.depth: int = parent.depth + 1 if parent is not None else 0
        """Blocks of the prefix; 0 for the root."""
        self.children: dict[int, Node] | None = None
        self.masks: Masks = _NOBODY
        self.refs = 0
        """Bound engine hashes, demoted hashes and predictions, of all workers."""
        self.used = 0
        """The tree's round in which it was used last; never later than its parent's."""

    def held_by(self, bit: int) -> bool:
        """Whether a slot holds the block on any tier; the root is held by all."""
        return self.parent is None or bool(self.masks[3] & bit)

    def level(self, bit: int) -> int:
        """The fastest tier on which a slot holds the block, or `NOT_HELD`."""
        masks = self.masks
        if masks[0] & bit:
            return 0
        if masks[1] & bit:
            return 1
        if masks[2] & bit:
            return 2
        return 3 if masks[3] & bit else NOT_HELD

    def path(self) -> list[int]:
        """Local hashes from block 0 to this block."""
        hashes = []
        node = self
        while node.parent is not None:
            hashes.append(node.local)
            node = node.parent
        return hashes[::-1]


class PrefixTree:
    """All prefixes that any worker needs, with the slots that hold them."""

    def __init__(self) -> None:
        self.root = Node(None, 0)
        self.nodes = 0
        """Nodes besides the root."""
        self.held = 0
        """Nodes that any slot holds on any tier."""
        self.round = 0
        """The clock of the `max_blocks` bound: how often a share of it was stored."""

    def child(self, parent: Node, local: int) -> Node:
        """The node of a block below `parent`, made if need be; `acquire` or `prune` it afterwards."""
        if parent.children is None:
            parent.children = {}
        node = parent.children.get(local)
        if node is None:
            node = parent.children[local] = Node(parent, local)
            self.nodes += 1
        return node

    def acquire(self, node: Node) -> None:
        """Keeps a node alive until as many `release`."""
        node.refs += 1

    def release(self, node: Node) -> None:
        """Ends one `acquire`."""
        node.refs -= 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Removes a node, and then its ancestors, where nothing needs them."""
        while node.parent is not None and not node.refs and not node.children:
            parent = node.parent
            if parent.children is None or parent.children.pop(node.local, None) is None:
                return
            self.nodes -= 1
            node = parent

    def set_level(self, node: Node, bit: int, level: int) -> None:
        """Puts a slot's block on a tier, or on none with `NOT_HELD`."""
        d, h, k, e, p = node.masks
        before = e
        d = d | bit if level <= 0 else d & ~bit
        h = h | bit if level <= 1 else h & ~bit
        k = k | bit if level <= 2 else k & ~bit
        e = e | bit if level <= 3 else e & ~bit
        node.masks = (d, h, k, e, p)
        self.held += bool(e) - bool(before)

    def set_predicted(self, node: Node, bit: int, predicted: bool) -> None:
        """Marks a block as predicted for a slot, or no longer."""
        d, h, k, e, p = node.masks
        node.masks = (d, h, k, e, p | bit if predicted else p & ~bit)

    def touch(self, node: Node | None) -> None:
        """Marks a block and its ancestors as used in this round; stops where they are marked already."""
        while node is not None and node.used < self.round:
            node.used = self.round
            node = node.parent

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children:
                stack.extend(node.children.values())


Matches = tuple[dict[int, int], ...]
"""For each column: slot → leading blocks."""


def sequence_hasher() -> Callable[[Node], int]:
    """A function that tells the sequence hashes of nodes, and remembers them: only while no node goes."""
    known: dict[Node, int] = {}

    def sequence_hash_of(node: Node) -> int:
        path = []
        step = node
        while step.parent is not None and step not in known:
            path.append(step)
            step = step.parent
        above = known.get(step)
        for below in reversed(path):
            known[below] = above = extend_sequence(above, below.local)
        return known[node]

    return sequence_hash_of


def match(tree: PrefixTree, hashes: Iterable[int], live: int, early_exit: bool) -> tuple[Matches, Node]:
    """Walks a request through the tree.

    Along a request the set of slots that hold everything so far only shrinks: a slot that leaves at
    block k has k leading blocks.

    Args:
        tree: The tree.
        hashes: Local hashes from block 0.
        live: The slots that take part.
        early_exit: Stop when at most one slot is left.

    Returns:
        For each column the slots with at least one block, and the deepest node reached.
    """
    columns: Matches = tuple({} for _ in range(COLUMNS))
    alive = [live] * COLUMNS
    node = tree.root
    masks: Masks | None = None
    depth = 0
    for local in hashes:
        child = node.children.get(local) if node.children else None
        if child is None:
            break
        if child.masks != masks:
            masks = child.masks
            for column in range(COLUMNS):
                held = masks[column] if column < NOT_HELD else masks[0] | masks[NOT_HELD]
                gone = alive[column] & ~held
                if gone:
                    alive[column] ^= gone
                    _record(columns[column], gone, depth)
        left = alive[3] | alive[NOT_HELD]
        if not left:
            break
        node = child
        depth += 1
        if early_exit and not left & (left - 1):
            break
    for column in range(COLUMNS):
        _record(columns[column], alive[column], depth)
    return columns, node


def _record(column: dict[int, int], slots: int, blocks: int) -> None:
    """Notes how many leading blocks each of some slots has; none is not worth a row."""
    while slots and blocks:
        low = slots & -slots
        column[low.bit_length() - 1] = blocks
        slots ^= low
