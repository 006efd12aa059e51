"""The `max_blocks` bound of the reference index: what goes when there is too much."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest

from kvscout_blocks.index.block_index import SLICE
from kvscout_blocks.index.holdings import Holdings, twins
from kvscout_blocks.index.prefix_tree import Node

_ROUNDS = 64
"""Rounds of the clock in which as many blocks are stored as may be."""


def round_length(max_blocks: int) -> int:
    """Blocks that are stored in one round of the clock that tells what was used longest ago."""
    return max(max_blocks // _ROUNDS, 1)


def slack(max_blocks: int) -> int:
    """What goes beside the surplus, so that victims are not looked for again at once."""
    return min(max_blocks // _ROUNDS, SLICE)


def enforce(everyone: Sequence[Holdings], max_blocks: int) -> int:
    """Drops what is above the bound and a little more, if there are more entries than that, and ghosts above it.

    First what no query can match, of the largest worker first: orphans, then what is below a hole or lacks a
    group. So a block that an engine stores under an evicted one takes the place of its like, never that of a
    rooted block. Then rooted blocks of the largest worker, those that were used longest ago, the deepest
    before their parents, so that what stays are whole prefixes. Dropped blocks become ghosts.

    Args:
        everyone: The content of all workers.
        max_blocks: Entries that may stay, and ghosts that may.

    Returns:
        Entries dropped; a block goes with all its engine hashes, which may be more than were to go.
    """
    entries = sum(holdings.entries for holdings in everyone)
    surplus = left = entries - max_blocks + slack(max_blocks) if entries > max_blocks else 0
    for holdings in sorted(everyone, key=_entries, reverse=True):
        if left > 0:
            left -= _drop_unmatchable(holdings, left)
    while left > 0:
        largest = max(everyone, key=_entries)
        left -= _drop_idle(largest, largest.nodes, left)
    for _ in range(sum(len(holdings.gone) for holdings in everyone) - max_blocks):
        max(everyone, key=_ghosts).forget_oldest_ghost()
    return surplus - left


def _entries(holdings: Holdings) -> int:
    return holdings.entries


def _ghosts(holdings: Holdings) -> int:
    return len(holdings.gone)


def _drop_unmatchable(holdings: Holdings, surplus: int) -> int:
    """Drops orphans, then bound blocks that are not rooted; how many entries that were."""
    orphans = list(holdings.orphans)[:surplus]
    for engine_hash in orphans:
        holdings.evict_orphan(engine_hash)
    left = surplus - len(orphans)
    if not left or (holdings.held == len(holdings.blocks) and not holdings.hidden()):
        return len(orphans)
    rooted = holdings.rooted()
    return len(orphans) + _drop_idle(holdings, (node for node in holdings.nodes if node not in rooted), left)


def _drop_idle(holdings: Holdings, nodes: Iterable[Node], surplus: int) -> int:
    """Drops the blocks of the nodes used longest ago, of these the deepest; how many entries that were.

    An ancestor was never used longer ago than a block below it, so it goes later.
    """
    left = surplus
    for node in nsmallest(surplus, nodes, key=lambda node: (node.used, -node.depth)):
        if left <= 0:
            break
        for block in list(twins(holdings.nodes[node])):
            holdings.unbind(block)
            left -= 1
    holdings.names_gone.clear()
    return surplus - left
