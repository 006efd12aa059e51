"""Blocks of sliding-window groups, and how far they let an overlap reach.

A group whose window has w tokens serves a prefix that ends after block n if it holds the last ⌈(w - 1) / block⌉ blocks
before that end, or all there are: vLLM's `find_longest_cache_hit`. What full attention holds is cut down to the longest
prefix that every group serves.

An engine names a block alike in all groups, and most often keeps only some blocks of an event's tokens. So the prefix
of a block follows from the full-attention groups, once the batch that stored it is applied (`settle`). Where they have
not got it, it follows from the event, if that has the content of each of its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import lcm

from kvscout_blocks.bytes.dump import Copies, DumpedWindowBlock, WindowGroup
from kvscout_blocks.bytes.events import Removed, Stored, Tier
from kvscout_blocks.index.block_index import MAX_COPIES, TWIN_LIMIT
from kvscout_common.hashing import extend_sequence
from kvscout_common.worker import CopyMode

Counts = dict[tuple[int, Tier], int]
"""(group, tier) → copies of a block there; never 0."""

Chain = tuple[int | None, Sequence[int], Sequence[int]]
"""Blocks of an event: engine hash of the parent, engine hashes, local hashes."""


def add_copy(counts: Counts, at: tuple[int, Tier], mode: CopyMode) -> None:
    """Add one copy, unless the mode or the limit says that there are enough."""
    number = counts.get(at, 0)
    if not number or (mode is CopyMode.COUNT and number < MAX_COPIES):
        counts[at] = number + 1


def drop_copy(counts: Counts, at: tuple[int, Tier]) -> bool:
    """Drop one copy; return False if there is none."""
    if at not in counts:
        return False
    counts[at] -= 1
    if not counts[at]:
        del counts[at]
    return True


def copies_of(counts: Counts) -> tuple[Copies, ...]:
    """Return counts in the form of a dump."""
    return tuple(Copies(group, tier, number) for (group, tier), number in sorted(counts.items()))


def counts_of(copies: Iterable[Copies]) -> Counts:
    """Return counts from the form of a dump."""
    return {(group, Tier(tier)): number for group, tier, number in copies}


class WindowGroups:
    """The sliding-window groups of one worker rank.

    Args:
        block_size: Tokens of the index's blocks.
        groups: Those that are known.
    """

    def __init__(self, block_size: int, groups: Iterable[WindowGroup] = ()) -> None:
        self._block_size = block_size
        self.groups = {group.number: group for group in groups}
        self.blocks: dict[int, Counts] = {}
        """Engine hash → copies; never none."""
        self.prefixes: dict[int, int] = {}
        """Engine hash → sequence hash; blocks of the batch that is being applied have none yet."""

    def clear(self) -> None:
        """Drop all blocks; groups stay known."""
        self.blocks, self.prefixes = {}, {}

    def learn(self, event: Stored) -> bool:
        """Note a group's window the first time that an event names it; return whether it has one that can be judged."""
        if event.group not in self.groups:
            if not event.window or not event.block_size or event.block_size % self._block_size:
                return False
            self.groups[event.group] = WindowGroup(event.group, event.window, event.block_size)
        return True

    def store(self, event: Stored, mode: CopyMode, limit: int) -> int:
        """Add a copy of each block; return the number of those above the limit."""
        refused = 0
        for engine_hash in event.engine_hashes:
            if engine_hash in self.blocks or len(self.blocks) < limit:
                add_copy(self.blocks.setdefault(engine_hash, {}), (event.group, event.tier), mode)
            else:
                refused += 1
        return refused

    def remove(self, event: Removed) -> int:
        """Drop a copy of each block; return the number of those that had none."""
        unknown = 0
        for engine_hash in event.engine_hashes:
            counts = self.blocks.get(engine_hash, {})
            unknown += not drop_copy(counts, (event.group, event.tier))
            if not counts:
                self.blocks.pop(engine_hash, None)
                self.prefixes.pop(engine_hash, None)
        return unknown

    def settle(self, sequence_hash_of: Callable[[int], int | None], chains: Iterable[Chain]) -> int:
        """Bind the batch's blocks to prefixes; drop those without a known prefix, and return their number.

        Args:
            sequence_hash_of: Sequence hash of an engine hash in full-attention groups.
            chains: The batch's events of window groups, as far as they have content.
        """
        unplaced = [engine_hash for engine_hash in self.blocks if engine_hash not in self.prefixes]
        keys = {engine_hash: sequence_hash_of(engine_hash) for engine_hash in unplaced}
        for parent, engine_hashes, local_hashes in chains if None in keys.values() else ():
            above = None
            if parent is not None:
                known = (keys.get(parent), self.prefixes.get(parent), sequence_hash_of(parent))
                above = next((key for key in known if key is not None), None)
                if above is None:
                    continue
            for engine_hash, local in zip(engine_hashes, local_hashes, strict=True):
                above = extend_sequence(above, local)
                if keys.get(engine_hash) is None:
                    keys[engine_hash] = above
        return self._place({engine_hash: keys[engine_hash] for engine_hash in unplaced})

    def _place(self, sequence_hashes: dict[int, int | None]) -> int:
        """Bind blocks to prefixes; drop those without one or of one with too many, and return their number."""
        names = Counter(self.prefixes.values())
        dropped = 0
        for engine_hash, key in sequence_hashes.items():
            if key is None or names[key] >= TWIN_LIMIT:
                del self.blocks[engine_hash]
                dropped += 1
            else:
                names[key] += 1
                self.prefixes[engine_hash] = key
        return dropped

    def dump(self) -> tuple[DumpedWindowBlock, ...]:
        """Return the blocks, by engine hash."""
        return tuple(
            DumpedWindowBlock(engine_hash, self.prefixes[engine_hash], copies_of(counts))
            for engine_hash, counts in sorted(self.blocks.items())
        )

    def fill(self, blocks: Sequence[DumpedWindowBlock]) -> None:
        """Take over the blocks of a dump; there are none yet."""
        self.blocks = {block.engine_hash: counts_of(block.copies) for block in reversed(blocks)}
        self._place({block.engine_hash: block.sequence_hash for block in reversed(blocks)})

    def longest(self, sequence_hashes: Sequence[int], most: int, usable: int, tier: Tier) -> int:
        """Return the length of the longest prefix that all groups serve.

        Args:
            sequence_hashes: Of the prompt's prefixes.
            most: Blocks that full attention has.
            usable: See `BlockIndex.find_matches`.
            tier: Copies there or on a faster one count.
        """
        held = {
            (group, self.prefixes[name]) for name, counts in self.blocks.items() for group, at in counts if at <= tier
        }
        longest = self._longest(sequence_hashes, most, held)
        if longest > usable:
            shorter = self._longest(sequence_hashes, usable, held)
            return shorter if shorter < usable else longest
        return longest

    def _longest(self, sequence_hashes: Sequence[int], most: int, held: set[tuple[int, int]]) -> int:
        alignment = lcm(*(group.block_size // self._block_size for group in self.groups.values()))
        end = most - most % alignment
        while end and not all(self._serves(group, sequence_hashes, end, held) for group in self.groups.values()):
            end -= alignment
        return end

    def _serves(self, group: WindowGroup, sequence_hashes: Sequence[int], end: int, held: set[tuple[int, int]]) -> bool:
        ratio = group.block_size // self._block_size
        needed = max(-(-(group.window - 1) // group.block_size), 1)
        blocks = range(max(end // ratio - needed, 0), end // ratio)
        return all((group.number, sequence_hashes[(block + 1) * ratio - 1]) in held for block in blocks)
