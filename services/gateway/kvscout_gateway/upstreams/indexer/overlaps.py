"""Overlaps of one prompt, and the union of those that several indexers answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.shards import shard_of
from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.prompt import Geometry

Answers: TypeAlias = "tuple[indexer_pb2.FindMatchesResponse | None, ...]"
"""By shard; None = it did not answer."""


@dataclass(frozen=True, slots=True)
class Found:
    """The overlaps of one prompt with every cache."""

    overlaps: Mapping[Geometry, types_pb2.Overlaps] = field(default_factory=dict)
    """By geometry; one that is missing was not asked for, or no shard answered."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why the answer is not complete, by the upstream that is missed, such as "indexer 0/2"; empty = it is."""
    answers: Mapping[Geometry, Answers] = field(default_factory=dict)
    """The answers that the overlaps were united from."""

    def confirmed(self, pool: Geometry, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        """Return how much of an overlap the worker's events confirm, in blocks; None = they do not tell.

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


NOTHING_FOUND = Found()


def unite(shards: Iterable[types_pb2.Overlaps]) -> types_pb2.Overlaps:
    """Unite the rows of several answers, columns that are left out filled in where another answer has them."""
    parts = [part for part in shards if part.worker_ids]
    if len(parts) < 2:
        return parts[0] if parts else types_pb2.Overlaps()
    united = types_pb2.Overlaps()
    ranked = any(part.dp_ranks for part in parts)
    for part in parts:
        united.worker_ids.extend(part.worker_ids)
        united.device_blocks.extend(part.device_blocks)
        if ranked:
            united.dp_ranks.extend(part.dp_ranks or [0] * len(part.worker_ids))
    faster: list[Sequence[int]] = [part.device_blocks for part in parts]
    for column in ("host_blocks", "disk_blocks", "external_blocks"):
        faster = _fill(united, column, parts, faster)
    _fill(united, "predicted_blocks", parts, [part.device_blocks for part in parts])
    return united


def _fill(
    united: types_pb2.Overlaps, column: str, parts: Sequence[types_pb2.Overlaps], instead: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Unite one column; return it by part, as it is meant where it is left out."""
    meant = [getattr(part, column) or other for part, other in zip(parts, instead, strict=True)]
    if any(getattr(part, column) for part in parts):
        for values in meant:
            getattr(united, column).extend(values)
    return meant


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
