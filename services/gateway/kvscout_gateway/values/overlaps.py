"""Overlaps of one prompt with every cache. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.prompt import Geometry

Columns: TypeAlias = tuple[
    Sequence[str], Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]
]
"""Worker ids, ranks, and leading blocks on device, host, disk, external, and with predictions; a column that says
nothing new is empty."""


Others: TypeAlias = tuple[int, int, int, int, int]
"""Leading blocks that each worker rank without a row has: on device, host, disk, external, and with predictions."""

FEW_ROWS_FROM: Final = 256
"""Worker ranks from which on indexers are asked for few rows: those that differ from what most ranks have."""
ALL_THAT_DIFFER: Final = 2**32 - 1
"""Most of these rows: all, so that nothing is left out, and never more than there are without."""


class Rows(Protocol):
    """Overlaps with the caches of one geometry, one row a worker rank, or few and what the others have."""

    @property
    def columns(self) -> Columns:
        """Return them as columns."""

    @property
    def others(self) -> Others | None:
        """Return what ranks without a row have; None = nothing."""

    def confirmed(self, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        """Return how much of an overlap the worker's events confirm, in blocks; None = they do not show it.

        Args:
            tenant: The worker's.
            worker: Its rank.
            overlap_blocks: What was counted for it, confirmed or predicted.
        """


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Block hashes of one prompt, and their overlap with every cache."""

    hashes: Mapping[Geometry, bytes] = field(default_factory=dict)
    """Local hashes of the prompt by geometry, little-endian u64s."""
    rows: Mapping[Geometry, Rows] = field(default_factory=dict)
    """Overlaps by geometry; one that is missing was not requested, or no indexer answered."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why the answer is not complete, by the upstream that is missed, such as "indexer 0/2"; empty = it is."""

    @property
    def unknown(self) -> bool:
        """Return whether nobody could say where the prompt is cached: it has no hashes, or no indexer answered."""
        return not self.rows and (bool(self.problems) or not any(self.hashes.values()))


def longest(rows: Rows) -> int:
    """Return the longest overlap of any worker, confirmed or predicted, in blocks."""
    columns, others = rows.columns, rows.others
    return max(max(columns[2], default=0), max(columns[6], default=0), others[4] if others else 0)


def row_of(columns: Columns, worker: WorkerRank) -> int | None:
    """Return the row of a worker rank; None = it has none."""
    ids, ranks = list(columns[0]), columns[1]
    row = -1
    while True:
        try:
            row = ids.index(worker.worker_id, row + 1)
        except ValueError:
            return None
        if (ranks[row] if ranks else 0) == worker.dp_rank:
            return row
