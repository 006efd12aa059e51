"""Physical copies of a block, counted by where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvscout_blocks.bytes.dump import Copies
from kvscout_blocks.bytes.events import Tier
from kvscout_blocks.index.block_index import MAX_COPIES
from kvscout_common.worker import CopyMode

Place = tuple[int, Tier]
"""Cache group and tier: where a copy lies."""

Counts = dict[Place, int]
"""Copies of a block in each place; never 0."""


def add_copy(counts: Counts, at: Place, mode: CopyMode) -> bool:
    """Adds one copy; whether the count rose."""
    number = counts.get(at, 0)
    if number and (mode is CopyMode.SET or number >= MAX_COPIES):
        return False
    counts[at] = number + 1
    return True


def copies_of(counts: Mapping[Place, int]) -> tuple[Copies, ...]:
    """Counts in the form of a dump."""
    return tuple(Copies(group, tier, number) for (group, tier), number in sorted(counts.items()))


def counts_of(copies: Iterable[Copies]) -> Counts:
    """Counts from the form of a dump."""
    return {(group, Tier(tier)): number for group, tier, number in copies}
