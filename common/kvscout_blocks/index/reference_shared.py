"""Caches that several worker ranks read, such as a Mooncake store or a shared file system: their *members*.

What one member announces on the external tier, every member can read. So a query counts, beyond the blocks that a rank
holds by itself, those that follow in the shared cache without a gap. Blocks outlive the rank that stored them, until a
member says that they were removed, all members have cleared their caches, or the last member leaves.

Members name a prefix alike, or they would not find each other's blocks: one whose names mostly differ reads nothing
here. A block whose parent neither its publisher nor the cache has is not shared, since its prefix is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvscout_blocks.index.block_index import SHARED_LIMIT, SharedCacheStats
from kvscout_common.worker import WorkerRank


@dataclass(slots=True)
class _Block:
    prefix: int
    """Sequence hash."""
    place: int
    fresh: bool
    """A member announced it that has cleared its caches since all had."""


class SharedCache:
    """One shared cache."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        """By engine hash."""
        self.held: dict[int, int] = {}
        """Sequence hash → engine hash."""
        self.order: deque[int] = deque()
        """Engine hashes as they came; what went since keeps its place."""
        self.first = 0
        """Number of the first place in the order."""
        self.limit = 0
        self.evicted = 0
        self.cleared: set[WorkerRank] = set()
        self.agreement: dict[WorkerRank, int] = {}
        """Blocks that each member named as others did, less those that it named otherwise."""

    def join(self, member: WorkerRank, blocks: int, bound: int) -> None:
        """Make a rank a member.

        Args:
            member: The rank.
            blocks: How many it says that the cache has room for; 0 = unknown.
            bound: Of the index; 0 = none.
        """
        self.agreement.setdefault(member, 0)
        room = blocks or SHARED_LIMIT
        self.limit = max(self.limit, min(room, bound) if bound else room)

    def leave(self, member: WorkerRank) -> bool:
        """End a membership; return whether nobody is left."""
        del self.agreement[member]
        self.cleared.discard(member)
        return not self.agreement

    def store(self, member: WorkerRank, blocks: Iterable[tuple[int, int]]) -> None:
        """Add blocks that a member announced: engine hash and sequence hash of each."""
        fresh = member in self.cleared
        for engine_hash, prefix in blocks:
            name = self.held.get(prefix)
            if name is None:
                if self.agreement[member] >= 0 and engine_hash not in self.blocks:
                    self._add(engine_hash, prefix, fresh)
            elif name == engine_hash:
                self.agreement[member] += 1
                self.blocks[name].fresh |= fresh
            else:
                self.agreement[member] -= 1

    def _add(self, engine_hash: int, prefix: int, fresh: bool) -> None:
        self.blocks[engine_hash] = _Block(prefix, self.first + len(self.order), fresh)
        self.held[prefix] = engine_hash
        self.order.append(engine_hash)
        if len(self.order) > self.limit:
            oldest = self.order.popleft()
            if oldest in self.blocks and self.blocks[oldest].place == self.first:
                self.remove((oldest,))
                self.evicted += 1
            self.first += 1

    def remove(self, engine_hashes: Iterable[int]) -> None:
        """Drop blocks, whoever stored them."""
        for engine_hash in engine_hashes:
            if engine_hash in self.blocks:
                del self.held[self.blocks.pop(engine_hash).prefix]

    def clear(self, member: WorkerRank) -> None:
        """Note that a member cleared its caches. Once all have, the shared one has only what they stored since."""
        self.cleared.add(member)
        if len(self.cleared) == len(self.agreement):
            self.remove([name for name, block in self.blocks.items() if not block.fresh])
            for block in self.blocks.values():
                block.fresh = False
            self.cleared.clear()

    def run_from(self, path: Sequence[int], start: int) -> int:
        """Return where the blocks of a prompt end that follow one of its blocks here, without a gap."""
        end = start
        while end < len(path) and path[end] in self.held:
            end += 1
        return end

    def stats(self, name: str) -> SharedCacheStats:
        """Return its state."""
        disagreeing = sum(balance < 0 for balance in self.agreement.values())
        return SharedCacheStats(name, len(self.blocks), len(self.agreement), disagreeing, self.evicted)

    def check(self) -> None:
        """See `BlockIndex.check_invariants`."""
        assert self.held == {block.prefix: name for name, block in self.blocks.items()}, "blocks are held"
        assert all(self.order[block.place - self.first] == name for name, block in self.blocks.items()), "placed"
        assert len(self.order) <= self.limit, "shared caches are bounded"
