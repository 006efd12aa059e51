"""The `max_blocks` bound of the reference index: what goes when there is too much."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from kvscout_blocks.holdings import Holdings

_SLACK = 64
"""1/64 of the bound goes at once beside the surplus, so that the search for victims is paid rarely."""


def enforce(everyone: Sequence[Holdings], max_blocks: int) -> int:
    """Drops entries of the largest worker until the bound is kept.

    Orphans go first, since no query sees them; then the blocks that were not used since the clock last went
    round, the deepest before their parents, so that what stays are whole prefixes. Dropped blocks become
    ghosts.

    Args:
        everyone: The content of all workers.
        max_blocks: Entries that may stay.

    Returns:
        Entries dropped.
    """
    entries = total = sum(holdings.entries for holdings in everyone)
    while entries > max_blocks:
        surplus = entries - max_blocks + max_blocks // _SLACK
        largest = max(everyone, key=lambda holdings: holdings.entries)
        orphans = list(largest.orphans)[:surplus]
        for engine_hash in orphans:
            largest.evict_orphan(engine_hash)
        victims = nsmallest(
            surplus - len(orphans),
            largest.blocks.values(),
            key=lambda block: (block.node.touched, -block.node.depth),
        )
        went_round = any(block.node.touched for block in victims)
        for block in victims:
            largest.unbind(block)
        if went_round:
            for node in largest.nodes:
                node.touched = False
        entries -= len(orphans) + len(victims)
    return total - entries
