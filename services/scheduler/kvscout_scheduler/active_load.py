"""Active load of one pool: numbers a worker slot, and the prefixes that its requests share.

A *slot* is a small integer that stands for a worker rank, so that every quantity is a column. This module and
`cost` are what a native twin replaces: they see slots, packed hashes and numbers, no request and no clock.

Invariants
1. `decode_blocks[slot]` = distinct active blocks of the slot's allocations + their private blocks.
2. `prefill_tokens[slot]` = Σ prefill tokens of its allocations in the prefill phase.
3. `requests[slot]` = its allocations. Without allocations all columns are exactly 0; none is ever negative.

An allocation costs O(runs of its path), `prefix_tree`. Not thread-safe.
"""

from __future__ import annotations

from typing import NamedTuple

from kvscout_scheduler.prefix_tree import Node, PrefixTree


class Lane(NamedTuple):
    """Workers whose block hashes are comparable."""

    block_size: int
    eagle: bool


class Allocation:
    """What one request occupies; opaque, valid until removed."""

    __slots__ = ("lane", "node", "prefill_tokens", "private_blocks", "slot")

    def __init__(self, slot: int, lane: Lane, node: Node | None, private_blocks: int, prefill_tokens: int) -> None:
        self.slot = slot
        self.lane = lane
        self.node = node
        self.private_blocks = private_blocks
        self.prefill_tokens = prefill_tokens


class ActiveLoad:
    """Load columns of one pool.

    Args:
        track_blocks: False: requests occupy no blocks (prefill pools, --no-track-active-blocks).
    """

    __slots__ = ("_trees", "decode_blocks", "prefill_tokens", "requests", "track_blocks", "version")

    def __init__(self, *, track_blocks: bool = True) -> None:
        self.track_blocks = track_blocks
        self.requests: list[int] = []
        self.prefill_tokens: list[int] = []
        self.decode_blocks: list[int] = []
        self.version = 0
        """Grows with every change: lets a watcher tell that nothing happened."""
        self._trees: dict[Lane, PrefixTree] = {}

    def ensure_slot(self, slot: int) -> None:
        """Makes room for a slot; new ones are idle."""
        missing = slot + 1 - len(self.requests)
        for column in (self.requests, self.prefill_tokens, self.decode_blocks):
            column.extend([0] * missing)

    def add(
        self, slot: int, lane: Lane, hashes: bytes, *, private_blocks: int = 0, prefill_tokens: int = 0
    ) -> Allocation:
        """Adds a request to a slot.

        Args:
            slot: The worker.
            lane: How its blocks are hashed.
            hashes: Packed local hashes of the blocks that other requests can share.
            private_blocks: Further blocks: the partial tail, blocks that were not hashed.
            prefill_tokens: Uncached prompt tokens.
        """
        node = None
        if self.track_blocks:
            tree = self._trees.get(lane)
            if tree is None:
                tree = self._trees[lane] = PrefixTree()
            node, new_blocks = tree.add(hashes, slot)
            self.decode_blocks[slot] += new_blocks + private_blocks
        else:
            private_blocks = 0
        self.requests[slot] += 1
        self.prefill_tokens[slot] += prefill_tokens
        self.version += 1
        return Allocation(slot, lane, node, private_blocks, prefill_tokens)

    def complete_prefill(self, allocation: Allocation) -> None:
        """Ends the prefill phase of a request; a second time changes nothing."""
        self.prefill_tokens[allocation.slot] -= allocation.prefill_tokens
        allocation.prefill_tokens = 0
        self.version += 1

    def add_private(self, allocation: Allocation, blocks: int) -> None:
        """Adds blocks to a request that no other request shares."""
        if self.track_blocks:
            allocation.private_blocks += blocks
            self.decode_blocks[allocation.slot] += blocks
            self.version += 1

    def remove(self, allocation: Allocation) -> None:
        """Releases all that a request occupies; it must not be used again."""
        slot = allocation.slot
        gone = allocation.private_blocks
        if allocation.node is not None:
            gone += self._trees[allocation.lane].remove(allocation.node, slot)
            allocation.node = None
        self.decode_blocks[slot] -= gone
        self.prefill_tokens[slot] -= allocation.prefill_tokens
        self.requests[slot] -= 1
        self.version += 1

    def shared(self, lane: Lane, hashes: bytes) -> dict[int, int]:
        """Leading blocks of a prompt that are active on each slot; slots with none are left out."""
        tree = self._trees.get(lane)
        return tree.shared(hashes) if tree is not None and self.track_blocks else {}

    def check_invariants(self, allocations: list[Allocation]) -> None:
        """Raises AssertionError unless the columns follow from these allocations, all that there are."""
        size = len(self.requests)
        requests, prefill, blocks = [0] * size, [0] * size, [0] * size
        for allocation in allocations:
            requests[allocation.slot] += 1
            prefill[allocation.slot] += allocation.prefill_tokens
            blocks[allocation.slot] += allocation.private_blocks
        for tree in self._trees.values():
            tree.check_invariants()
            for slot, active in tree.recount().items():
                blocks[slot] += active
        assert requests == self.requests, "requests add up"
        assert prefill == self.prefill_tokens, "prefill tokens add up"
        assert blocks == self.decode_blocks, "blocks add up"
        assert min([0, *prefill, *blocks]) == 0, "nothing is negative"
