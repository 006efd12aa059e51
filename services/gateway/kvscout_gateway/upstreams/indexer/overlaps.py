"""The union of the overlaps that several indexers answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.rank_sets import MODULUS, RankSet
from kvscout_common.shards import shard_of
from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.overlaps import Columns, Others, Rows, row_of


class AnsweredRows:
    """See `Rows`: what the indexers of every shard answered.

    Args:
        answers: By shard; None = it did not answer.
    """

    def __init__(self, answers: Sequence[indexer_pb2.FindMatchesResponse | None]) -> None:
        self._answers = answers
        self.message = unite(answer.overlaps for answer in answers if answer is not None)

    @property
    def columns(self) -> Columns:
        """See `Rows`."""
        return columns_of(self.message)

    @property
    def others(self) -> Others | None:
        """See `Rows`."""
        return _levels(self.message.others) if self.message.HasField("others") else None

    def confirmed(self, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        """See `Rows`."""
        answer = self._answers[shard_of(tenant, worker.worker_id, len(self._answers))]
        if answer is None:
            return None
        others = answer.overlaps.others
        if not (
            answer.lower_bound or answer.overlaps.predicted_blocks or others.predicted_blocks > others.device_blocks
        ):
            return overlap_blocks  # the usual case: no need to look for the row
        row = row_of(columns_of(answer.overlaps), worker)
        if row is None:
            # Ranks of which not all is known have a row, unless nothing is known.
            return others.device_blocks or (None if answer.lower_bound else 0)
        return None if row in answer.incomplete_rows else answer.overlaps.device_blocks[row]


def columns_of(message: types_pb2.Overlaps) -> Columns:
    """Return the columns of a message."""
    return (
        message.worker_ids,
        message.dp_ranks,
        message.device_blocks,
        message.host_blocks,
        message.disk_blocks,
        message.external_blocks,
        message.predicted_blocks,
    )


def message_of(rows: Rows) -> types_pb2.Overlaps:
    """Return the message of overlaps."""
    if isinstance(rows, AnsweredRows):
        return rows.message
    ids, ranks, device, host, disk, external, predicted = rows.columns
    return types_pb2.Overlaps(
        others=_common(rows.others) if rows.others else None,
        worker_ids=ids,
        dp_ranks=ranks,
        device_blocks=device,
        host_blocks=host,
        disk_blocks=disk,
        external_blocks=external,
        predicted_blocks=predicted,
    )


def hold_for(answers: Sequence[indexer_pb2.FindMatchesResponse | None], ranks: RankSet) -> bool:
    """Return whether what answers say of ranks without a row holds for all of some ranks.

    Args:
        answers: By shard; None = it did not answer.
        ranks: The worker ranks that are known here.
    """
    parts = [answer.overlaps for answer in answers if answer is not None]
    common = [part.others for part in parts if part.HasField("others")]
    if not common:
        return True
    if len(common) < len(answers) or not all(others.exact for others in common):
        return False
    answered = sum(len(part.worker_ids) + part.others.ranks for part in parts)
    digest = sum(others.ranks_digest for others in common) % MODULUS
    return RankSet(answered, digest) == ranks and len(set(map(_levels, common))) == 1


def _levels(others: types_pb2.CommonOverlap) -> Others:
    return (
        others.device_blocks,
        others.host_blocks,
        others.disk_blocks,
        others.external_blocks,
        others.predicted_blocks,
    )


def _common(levels: Others, ranks: int = 0) -> types_pb2.CommonOverlap:
    device, host, disk, external, predicted = levels
    return types_pb2.CommonOverlap(
        ranks=ranks,
        exact=True,
        device_blocks=device,
        host_blocks=host,
        disk_blocks=disk,
        external_blocks=external,
        predicted_blocks=predicted,
    )


def unite(shards: Iterable[types_pb2.Overlaps]) -> types_pb2.Overlaps:
    """Unite the rows of several answers, columns that are left out filled in where another answer has them.

    What they say of ranks without a row is the same (`hold_for`).
    """
    parts = [part for part in shards if part.worker_ids or part.HasField("others")]
    if len(parts) < 2:
        return parts[0] if parts else types_pb2.Overlaps()
    united = types_pb2.Overlaps()
    if parts[0].HasField("others"):
        united.others.CopyFrom(_common(_levels(parts[0].others), sum(part.others.ranks for part in parts)))
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
