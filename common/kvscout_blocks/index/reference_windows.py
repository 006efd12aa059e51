"""Blocks of sliding-window and state groups, and how far they let an overlap reach.

A group whose window has w tokens serves a prefix that ends after block n if it holds the last ⌈(w - 1) / block⌉ blocks
before that end, or all there are: vLLM's `find_longest_cache_hit`. What full attention holds is cut down to the longest
prefix that every group serves.

A group of states (state-space layers, linear attention) is one with a window of one token: what it needs is the state
at the end of the prefix. States stand where they end, so that the size of their blocks does not matter.

An engine names a block alike in all groups, and most often keeps only some blocks of an event's tokens. So the prefix
of a block follows from the full-attention groups, once the batch that stored it is applied (`settle`). Where they have
not got it, it follows from the event, if that has the content of each of its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import lcm

from kvscout_blocks.bytes.dump import Copies, DumpedWindowBlock, WindowGroup
from kvscout_blocks.bytes.events import STATE_WINDOW, Removed, Stored, Tier
from kvscout_blocks.index.block_index import MAX_COPIES, TWIN_LIMIT
from kvscout_common.hashing import extend_sequence
from kvscout_common.worker import CopyMode

Counts = dict[tuple[int, Tier], int]
"""(group, tier) → copies of a block there; never 0."""


def add_copy(counts: Counts, event: Stored, mode: CopyMode) -> None:
    """Add one copy where an event stored it, unless the mode or the limit says that there are enough."""
    number = counts.get((event.group, event.tier), 0)
    if not number or (mode is CopyMode.COUNT and number < MAX_COPIES):
        counts[event.group, event.tier] = number + 1


def drop_copy(counts: Counts, group: int, tier: Tier) -> bool:
    """Drop one copy; return False if there is none."""
    number = counts.pop((group, tier), 0)
    if number > 1:
        counts[group, tier] = number - 1
    return number > 0


def copies_of(counts: Counts) -> tuple[Copies, ...]:
    """Return counts in the form of a dump."""
    return tuple(Copies(group, tier, number) for (group, tier), number in sorted(counts.items()))


def counts_of(copies: Iterable[Copies]) -> Counts:
    """Return counts from the form of a dump."""
    return {(group, Tier(tier)): number for group, tier, number in copies}


class WindowGroups:
    """The sliding-window and state groups of one worker rank.

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
            block_size = self._block_size if event.window == STATE_WINDOW else event.block_size
            if not event.window or not event.block_size or block_size % self._block_size:
                return False
            self.groups[event.group] = WindowGroup(event.group, event.window, block_size)
        return True

    def store(self, event: Stored, mode: CopyMode, limit: int) -> int:
        """Add a copy of each block; return the number of those above the limit."""
        refused = 0
        for engine_hash in event.engine_hashes:
            if engine_hash in self.blocks or len(self.blocks) < limit:
                add_copy(self.blocks.setdefault(engine_hash, {}), event, mode)
            else:
                refused += 1
        return refused

    def remove(self, event: Removed) -> int:
        """Drop a copy of each block; return the number of those that had none."""
        unknown = 0
        for engine_hash in event.engine_hashes:
            counts = self.blocks.get(engine_hash, {})
            unknown += not drop_copy(counts, event.group, event.tier)
            if not counts:
                self.blocks.pop(engine_hash, None)
                self.prefixes.pop(engine_hash, None)
        return unknown

    def settle(self, bound: Mapping[int, int], chains: Iterable[tuple[Stored, Sequence[int]]]) -> int:
        """Bind the batch's blocks to prefixes; drop those without a known prefix, and return their number.

        Args:
            bound: Engine hash → sequence hash, of full-attention groups.
            chains: The batch's events of window groups that have content, and its local hashes.
        """
        unplaced = [engine_hash for engine_hash in self.blocks if engine_hash not in self.prefixes]
        found = {engine_hash: bound[engine_hash] for engine_hash in unplaced if engine_hash in bound}
        for event, local_hashes in chains:
            above = None
            if event.parent is not None:
                known = (where[event.parent] for where in (found, self.prefixes, bound) if event.parent in where)
                above = next(known, None)
                if above is None:
                    continue
            for engine_hash, local in zip(event.engine_hashes, local_hashes, strict=True):
                above = extend_sequence(above, local)
                found.setdefault(engine_hash, above)
        return self._place({engine_hash: found.get(engine_hash) for engine_hash in unplaced})

    def _place(self, sequence_hashes: Mapping[int, int | None]) -> int:
        """Bind blocks to prefixes; drop those without one or of one with too many, and return their number."""
        names = Counter(self.prefixes.values())
        for engine_hash, key in sequence_hashes.items():
            if key is None or names[key] >= TWIN_LIMIT:
                del self.blocks[engine_hash]
            else:
                names[key] += 1
                self.prefixes[engine_hash] = key
        return sum(engine_hash not in self.blocks for engine_hash in sequence_hashes)

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
