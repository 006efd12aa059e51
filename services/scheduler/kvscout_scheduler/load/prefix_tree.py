"""Blocks that active requests share, by worker: a radix tree over packed local hashes.

::

    root ── [10 20]┬── [30]      ends 1   holders {w0: 1}
            holders├── [99]      ends 1   holders {w0: 1}
            {w0: 3}└── ends 1 (a request of exactly these two blocks)

An active request is a whole prefix, so it is a path from the root. A node is a *run* of blocks without a branch; it
counts, for each worker slot, the requests whose path goes through it. The path says what the prefix is: local
hashes suffice, no sequence hash is computed.

Invariants
1. A node's holders are a subset of its parent's, and none is counted 0: along a request the set of workers shrinks.
2. A request ends at the end of a run; `ends` counts those.
3. Each node but the root has `ends` > 0 or at least two children; so there are at most two nodes a request, and
   the runs together are at most the blocks of the active requests.
4. The first block of a run is its key among its siblings.

Complexity: O(nodes on the path), each a memory comparison of its run; a request that shares nothing is one node,
whatever its length. Not thread-safe.
"""

from __future__ import annotations

HASH_BYTES = 8


class Node:
    """A run of blocks; opaque to everyone but the tree."""

    __slots__ = ("children", "ends", "holders", "parent", "run")

    def __init__(self, run: bytes, parent: Node | None, holders: dict[int, int]) -> None:
        self.run = run
        self.parent = parent
        self.holders = holders
        self.children: dict[bytes, Node] = {}
        self.ends = 0


class PrefixTree:
    """Active prefixes of the workers of one block size."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root = Node(b"", None, {})

    def add(self, hashes: bytes, slot: int) -> tuple[Node, int]:
        """Add a request on a worker.

        Args:
            hashes: Packed local hashes of its prompt.
            slot: The worker.

        Returns:
            What to give `remove`, and the number of blocks that were not active on the worker before.
        """
        node, at, end, new = self._root, 0, len(hashes), 0
        while at < end:
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                child = Node(hashes[at:], node, {slot: 1})
                node.children[hashes[at : at + HASH_BYTES]] = child
                node, new = child, new + end - at
                break
            if not hashes.startswith(child.run, at):
                child = self._split(node, child, common_bytes(child.run, hashes, at))
            length = len(child.run)
            count = child.holders.get(slot, 0)
            if not count:
                new += length
            child.holders[slot] = count + 1
            node, at = child, at + length
        node.ends += 1
        return node, new // HASH_BYTES

    def remove(self, end: Node, slot: int) -> int:
        """Remove a request that was added.

        Args:
            end: What `add` returned.
            slot: The worker it was added on.

        Returns:
            The number of blocks that are no longer active on the worker.
        """
        end.ends -= 1
        gone, node = 0, end
        while node.parent is not None:
            count = node.holders[slot] - 1
            if count:
                node.holders[slot] = count
            else:
                del node.holders[slot]
                gone += len(node.run)
            node = node.parent
        if end.parent is not None and not end.holders:
            del end.parent.children[end.run[:HASH_BYTES]]
            end = end.parent
        if end.parent is not None and not end.ends and len(end.children) == 1:
            self._join(end.parent, end)
        return gone // HASH_BYTES

    def shared(self, hashes: bytes) -> dict[int, int]:
        """Return leading blocks of a prompt that are active on each worker; workers with none are left out.

        Args:
            hashes: Packed local hashes of the prompt.
        """
        node, at, end = self._root, 0, len(hashes)
        shared: dict[int, int] = {}
        while at < end:
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            whole = hashes.startswith(child.run, at)
            at += len(child.run) if whole else common_bytes(child.run, hashes, at)
            shared.update(dict.fromkeys(child.holders, at // HASH_BYTES))
            if not whole:
                break
            node = child
        return shared

    @staticmethod
    def _split(parent: Node, node: Node, at: int) -> Node:
        """Cut a run in two; returns the upper part. The lower part stays the node that requests point at."""
        upper = Node(node.run[:at], parent, dict(node.holders))
        parent.children[upper.run[:HASH_BYTES]] = upper
        node.run, node.parent = node.run[at:], upper
        upper.children[node.run[:HASH_BYTES]] = node
        return upper

    @staticmethod
    def _join(parent: Node, node: Node) -> None:
        """Give the run of a node where nothing ends to its only child, whose holders are the same."""
        (child,) = node.children.values()
        child.run, child.parent = node.run + child.run, parent
        parent.children[child.run[:HASH_BYTES]] = child


def common_bytes(run: bytes, hashes: bytes, at: int) -> int:
    """Return the bytes of the common prefix of a run and hashes[at:], which share the first block, in whole blocks."""
    low, high = 1, min(len(run), len(hashes) - at) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if hashes.startswith(run[: middle * HASH_BYTES], at):
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES
