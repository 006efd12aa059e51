"""Overlaps of one prompt with every cache. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.shards import shard_of
from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.prompt import Geometry

Answers: TypeAlias = "tuple[indexer_pb2.FindMatchesResponse | None, ...]"
"""Answers by shard; None = it did not answer."""


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Block hashes of one prompt, and their overlap with every cache."""

    hashes: Mapping[Geometry, bytes] = field(default_factory=dict)
    """Local hashes of the prompt by geometry, little-endian u64s."""
    rows: Mapping[Geometry, types_pb2.Overlaps] = field(default_factory=dict)
    """Overlaps by geometry; one that is missing was not requested, or no shard answered."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why the answer is not complete, by the upstream that is missed, such as "indexer 0/2"; empty = it is."""
    answers: Mapping[Geometry, Answers] = field(default_factory=dict)
    """Answers that the rows were united from, by geometry."""

    def confirmed(self, pool: Geometry, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        """Return how much of an overlap the worker's events confirm, in blocks; None = they do not show it.

        Args:
            pool: The worker's geometry.
            tenant: The worker's.
            worker: Its rank.
            overlap_blocks: What was counted for it, confirmed or predicted.
        """
        answers = self.answers.get(pool)
        answer = answers[shard_of(tenant, worker.worker_id, len(answers))] if answers else None
        if answer is None:
            return None
        if not answer.lower_bound and not answer.overlaps.predicted_blocks:
            return overlap_blocks  # the usual case: no need to look for the row
        row = _row(answer.overlaps, worker)
        if row is None:
            return None if answer.lower_bound else 0
        return None if row in answer.incomplete_rows else answer.overlaps.device_blocks[row]


def _row(overlaps: types_pb2.Overlaps, worker: WorkerRank) -> int | None:
    """Return the row of a worker rank; None = it has none."""
    ids, ranks = list(overlaps.worker_ids), overlaps.dp_ranks
    row = -1
    while True:
        try:
            row = ids.index(worker.worker_id, row + 1)
        except ValueError:
            return None
        if (ranks[row] if ranks else 0) == worker.dp_rank:
            return row
