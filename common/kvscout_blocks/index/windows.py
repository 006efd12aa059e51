"""What sliding-window groups of hybrid models hold, and how far it lets a query's overlap reach.

::

    engine hash ── blocks ──▶ sequence hash, copies
    sequence hash ── held ──▶ places (group, tier) with a copy

A group whose window has w tokens serves a prefix that ends after block n if it holds the last ⌈(w - 1) / block⌉ blocks
before that end, or all there are: vLLM's `find_longest_cache_hit`. What full attention holds is cut down to the longest
prefix that every group serves.

An engine names a block alike in all groups, and most often keeps only some blocks of what an event's tokens tell. So
the prefix of a block follows from the full-attention groups, once the batch that stored it is applied (`settle`). Where
they have not got it, it follows from the event, if that tells the content of each of its blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import lcm

from kvscout_blocks.bytes.dump import DumpedWindowBlock, WindowGroup
from kvscout_blocks.bytes.events import Removed, Stored, Tier
from kvscout_blocks.index.block_index import MAX_COPIES, TWIN_LIMIT, Overlap
from kvscout_blocks.index.copies import Counts, Place, add_copy, copies_of
from kvscout_common.hashing import extend_sequence, sequence_hashes
from kvscout_common.worker import CopyMode

Chain = tuple[int | None, Sequence[int], Sequence[int]]
"""Blocks of an event: engine hash of the parent, engine hashes, local hashes."""


class WindowGroups:
    """The window groups of one worker rank.

    Args:
        block_size: Tokens of the index's blocks.
        groups: Those that are known.
    """

    def __init__(self, block_size: int, groups: Iterable[WindowGroup] = ()) -> None:
        self._block_size = block_size
        self.groups: dict[int, WindowGroup] = {group.number: group for group in groups}
        self._blocks: dict[int, tuple[int, Counts]] = {}
        """Engine hash → sequence hash, copies; never none."""
        self._held: dict[int, Counter[Place]] = {}
        """Sequence hash → places, and how many of its engine hashes have a copy there."""
        self._names: dict[int, set[int]] = {}
        """Sequence hash → its engine hashes."""
        self._unplaced: dict[int, Counts] = {}
        """Stored by the batch that is being applied: their prefixes are not known yet."""

    def emptied(self) -> WindowGroups:
        """The same groups without blocks."""
        return WindowGroups(self._block_size, self.groups.values())

    def __len__(self) -> int:
        return len(self._blocks) + len(self._unplaced)

    def is_whole(self, block_size: int) -> bool:
        """Whether blocks of so many tokens consist of the index's own."""
        return block_size > 0 and block_size % self._block_size == 0

    def learn(self, event: Stored) -> bool:
        """Notes a group's window the first time it is told; whether it has one that can be judged."""
        if event.group not in self.groups:
            if not event.window or not self.is_whole(event.block_size):
                return False
            self.groups[event.group] = WindowGroup(event.group, event.window, event.block_size)
        return True

    def store(self, event: Stored, mode: CopyMode, limit: int) -> int:
        """Adds a copy of each block; how many there was no room for."""
        at = event.group, event.tier
        refused = 0
        for engine_hash in event.engine_hashes:
            if engine_hash in self._blocks:
                sequence_hash, counts = self._blocks[engine_hash]
                if at not in counts:
                    self._held[sequence_hash][at] += 1
                add_copy(counts, at, mode)
            elif engine_hash in self._unplaced or len(self) < limit:
                add_copy(self._unplaced.setdefault(engine_hash, {}), at, mode)
            else:
                refused += 1
        return refused

    def remove(self, event: Removed) -> int:
        """Drops a copy of each block; how many had none like it."""
        at = event.group, event.tier
        unknown = 0
        for engine_hash in event.engine_hashes:
            sequence_hash, counts = self._blocks.get(engine_hash) or (None, self._unplaced.get(engine_hash, {}))
            if at not in counts:
                unknown += 1
                continue
            counts[at] -= 1
            if counts[at]:
                continue
            del counts[at]
            if sequence_hash is None:
                if not counts:
                    del self._unplaced[engine_hash]
                continue
            self._held[sequence_hash] -= Counter([at])
            if not counts:
                del self._blocks[engine_hash]
                self._names[sequence_hash].discard(engine_hash)
                if not self._names[sequence_hash]:
                    del self._names[sequence_hash], self._held[sequence_hash]
        return unknown

    def settle(self, sequence_hash_of: Callable[[int], int | None], chains: Callable[[], Iterable[Chain]]) -> int:
        """Binds what the batch stored to prefixes; how many blocks have none that is known, and are dropped.

        Args:
            sequence_hash_of: Of an engine hash that full-attention groups hold.
            chains: What the batch's events tell of blocks in window groups.
        """
        unplaced, self._unplaced = self._unplaced, {}
        keys = {engine_hash: sequence_hash_of(engine_hash) for engine_hash in unplaced}
        if None in keys.values():
            self._add_chains(keys, sequence_hash_of, chains())
        unknown = 0
        for engine_hash, counts in unplaced.items():
            key = keys[engine_hash]
            unknown += key is None or not self.place(engine_hash, key, counts)
        return unknown

    def _add_chains(
        self, keys: dict[int, int | None], sequence_hash_of: Callable[[int], int | None], chains: Iterable[Chain]
    ) -> None:
        for parent, engine_hashes, local_hashes in chains:
            above = None
            if parent is not None:
                above = keys.get(parent)
                if above is None:
                    above = self._blocks[parent][0] if parent in self._blocks else sequence_hash_of(parent)
                if above is None:
                    continue
            for engine_hash, local in zip(engine_hashes, local_hashes, strict=True):
                above = extend_sequence(above, local)
                if keys.get(engine_hash) is None:
                    keys[engine_hash] = above

    def place(self, engine_hash: int, sequence_hash: int, counts: Counts) -> bool:
        """Binds copies to a prefix; the engine hash has none yet. False: the prefix has too many engine hashes."""
        names = self._names.setdefault(sequence_hash, set())
        if len(names) >= TWIN_LIMIT:
            return False
        names.add(engine_hash)
        self._blocks[engine_hash] = sequence_hash, counts
        self._held.setdefault(sequence_hash, Counter()).update(counts.keys())
        return True

    def dump(self) -> tuple[DumpedWindowBlock, ...]:
        """What is held, by engine hash."""
        return tuple(
            DumpedWindowBlock(engine_hash, sequence_hash, copies_of(counts))
            for engine_hash, (sequence_hash, counts) in sorted(self._blocks.items())
        )

    def longest(self, sequence_hashes: Sequence[int], most: int, usable: int, tier: Tier) -> int:
        """The longest prefix that all groups serve, of at most `most` blocks.

        Args:
            sequence_hashes: Of the prompt's prefixes.
            most: What full attention has.
            usable: Blocks that an engine takes from its cache at most: above it nothing may be less than there.
            tier: Copies there or on a faster one count.
        """
        longest = self._longest(sequence_hashes, most, tier)
        if longest > usable:
            shorter = self._longest(sequence_hashes, usable, tier)
            return shorter if shorter < usable else longest
        return longest

    def _longest(self, sequence_hashes: Sequence[int], most: int, tier: Tier) -> int:
        ratios = {number: group.block_size // self._block_size for number, group in self.groups.items()}
        alignment = lcm(*ratios.values())
        end = most - most % alignment
        while end and not all(
            self._serves(group, ratios[group.number], sequence_hashes, end, tier) for group in self.groups.values()
        ):
            end -= alignment
        return end

    def _serves(self, group: WindowGroup, ratio: int, sequence_hashes: Sequence[int], end: int, tier: Tier) -> bool:
        needed = max(-(-(group.window - 1) // group.block_size), 1)
        blocks = range(max(end // ratio - needed, 0), end // ratio)
        return all(self._holds(sequence_hashes[(block + 1) * ratio - 1], group.number, tier) for block in blocks)

    def _holds(self, sequence_hash: int, group: int, tier: Tier) -> bool:
        held = self._held.get(sequence_hash, Counter())
        return any((group, Tier(at)) in held for at in range(tier + 1))

    def check(self) -> None:
        """Verifies what is counted against what is held.

        Raises:
            AssertionError: Naming the first violation.
        """
        held: dict[int, Counter[Place]] = {}
        names: dict[int, set[int]] = {}
        for engine_hash, (sequence_hash, counts) in self._blocks.items():
            assert counts, "a block of a window group has a copy"
            assert all(0 < number <= MAX_COPIES for number in counts.values()), "copies are in range"
            assert all(group in self.groups for group, _ in counts), "copies are in window groups"
            held.setdefault(sequence_hash, Counter()).update(counts.keys())
            names.setdefault(sequence_hash, set()).add(engine_hash)
        assert held == self._held, "prefixes know their places"
        assert names == self._names, "prefixes know their engine hashes"
        assert not self._unplaced, "all is placed between batches"


def cut_rows(
    rows: dict[int, Overlap],
    windows: Mapping[int, tuple[WindowGroups, bool]],
    local_hashes: Sequence[int],
    usable: int,
) -> None:
    """Cuts the rows of workers with window groups down to what all their groups serve.

    Args:
        rows: By slot; gets those of workers whose windows alone decide.
        windows: By slot, and whether they have no full-attention group, so that the windows alone decide.
        local_hashes: The prompt.
        usable: See `WindowGroups.longest`.
    """
    keys = sequence_hashes(local_hashes) if windows else []
    for slot, (groups, alone) in windows.items():
        full = rows.get(slot, Overlap(0, 0, 0, 0, 0))
        tiers = [len(keys)] * len(Tier) if alone else full[:-1]
        device, host, disk, external = (
            groups.longest(keys, most, usable, tier) for tier, most in zip(Tier, tiers, strict=True)
        )
        # What is predicted beyond what is held will come with its windows.
        predicted = full.predicted if full.predicted > full.device else 0
        rows[slot] = Overlap(device, host, disk, external, max(predicted, device))
