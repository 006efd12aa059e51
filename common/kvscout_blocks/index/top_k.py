"""Few rows for many workers: what most have alike is said once.

With a system prompt that all share, every worker rank has a row in an answer. A caller that asks for few of them gets
the ranks that differ from the most common row, and that row for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvscout_blocks.index.block_index import Overlap, Overlaps
from kvscout_common.rank_sets import rank_set
from kvscout_common.worker import WorkerRank

_NONE = Overlap(0, 0, 0, 0, 0)


class Common(NamedTuple):
    """Overlap of every worker rank without a row."""

    ranks: int
    exact: bool
    """True = each has exactly this; False = at least this."""
    overlap: Overlap
    digest: int
    """Of all worker ranks, as in a `RankSet`."""


def top_k(
    overlaps: Overlaps, most: int, everyone: Sequence[WorkerRank], incomplete: Collection[WorkerRank] = ()
) -> tuple[Overlaps, Common]:
    """Return the rows that differ from what most ranks have, and that for the others.

    Args:
        overlaps: One row a worker rank with any overlap.
        most: Rows, at least 1. If more differ, the longest are returned, and the least that the others have.
        everyone: Every worker rank of the index, sorted.
        incomplete: Ranks that may have more than their rows say: they keep them, if there is room.
    """
    rows, digest = overlaps.by_worker(), rank_set(everyone).digest
    alike = Counter(rows.values())
    alike[_NONE] = len(everyone) - len(rows)
    usual = max(alike, key=lambda overlap: (alike[overlap], overlap))
    if len(everyone) - alike[usual] <= most:
        shown = {worker: row for worker, row in rows.items() if row != usual}
        if usual != _NONE:
            shown |= {worker: _NONE for worker in everyone if worker not in rows}
        kept = {worker: row for worker, row in rows.items() if row == usual and worker in incomplete}
        if len(shown) + len(kept) <= most:
            shown |= kept
        return _columns(shown), Common(len(everyone) - len(shown), True, usual, digest)
    longest = sorted(rows, key=lambda worker: rows[worker], reverse=True)
    rest = [rows[worker] for worker in longest[most:]] + [_NONE] * (len(everyone) > len(rows))
    least = Overlap(*map(min, zip(*rest, strict=True)))
    return _columns({worker: rows[worker] for worker in longest[:most]}), Common(
        len(everyone) - most, False, least, digest
    )


def _columns(rows: dict[WorkerRank, Overlap]) -> Overlaps:
    return Overlaps(tuple(rows), *zip(*rows.values(), strict=True)) if rows else Overlaps()
