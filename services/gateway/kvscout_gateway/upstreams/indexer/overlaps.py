"""The union of the overlaps that several indexers answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvscout.v1 import types_pb2


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
