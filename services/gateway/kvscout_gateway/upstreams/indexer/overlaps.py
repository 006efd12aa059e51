"""The union of the overlaps that several indexers answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.shards import shard_of
from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.overlaps import Columns, Rows, row_of


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

    def confirmed(self, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        """See `Rows`."""
        answer = self._answers[shard_of(tenant, worker.worker_id, len(self._answers))]
        if answer is None:
            return None
        if not answer.lower_bound and not answer.overlaps.predicted_blocks:
            return overlap_blocks  # the usual case: no need to look for the row
        row = row_of(columns_of(answer.overlaps), worker)
        if row is None:
            return None if answer.lower_bound else 0
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
        worker_ids=ids,
        dp_ranks=ranks,
        device_blocks=device,
        host_blocks=host,
        disk_blocks=disk,
        external_blocks=external,
        predicted_blocks=predicted,
    )


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
