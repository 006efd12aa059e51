"""Asking the indexers where a prompt is cached. Whatever goes wrong there costs knowledge, never the request.

Every shard of the workers is asked at the same time, each with the whole deadline: one that does not answer costs the
overlaps of its own workers. The answers are united row by row, which is exact because the overlap of a worker depends
on that worker alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound
from kvscout_common.observability import tracing
from kvscout_common.shards import shard_of
from kvscout_common.transport.wire_fields import bytes_field
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.failover import Member, UpstreamDown
from kvscout_gateway.upstreams.indexer.indexers import Indexers, Replicas
from kvscout_gateway.values.prompt import HASH_BYTES, Geometry

Answers: TypeAlias = "tuple[indexer_pb2.FindMatchesResponse | None, ...]"
"""By shard; None = it did not answer."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the indexers know of one prompt."""

    overlaps: Mapping[Geometry, types_pb2.Overlaps] = field(default_factory=dict)
    """By geometry; one that is missing was not asked for, or no shard answered."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why the answer is not complete, by the helper that is missed, such as "indexer 0/2"; empty = it is."""
    answers: Mapping[Geometry, Answers] = field(default_factory=dict)
    """What the overlaps were united from."""

    def confirmed(self, pool: Geometry, tenant: str, worker: WorkerRank, overlap_blocks: int) -> int | None:
        """How much of an overlap the worker's events confirm, in blocks; None = they do not tell.

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


class OverlapQuery:
    """FindMatches, once a geometry and shard, all within one deadline."""

    def __init__(self, indexers: Indexers, *, timeout_seconds: float, resync: Callable[[Member[Any]], object]) -> None:
        """Asks these indexers.

        Args:
            indexers: By shard, each in order of preference.
            timeout_seconds: Longest wait for an answer.
            resync: Told of an indexer that does not know workers which this gateway knows.
        """
        self._indexers = indexers
        self._timeout = timeout_seconds
        self._resync = resync

    async def find(self, model: str, tenant: str, hashes: Mapping[Geometry, bytes], *, prompt_tokens: int = 0) -> Found:
        """The overlaps of a prompt with every cache; nothing is asked for a prompt without a complete block.

        Args:
            model: Whose caches.
            tenant: Whose they are.
            hashes: The prompt's local hashes, packed, for each geometry.
            prompt_tokens: Its length, which tells what an engine with sliding windows can use; 0 = not known.
        """
        pools = [pool for pool in hashes if hashes[pool]]
        shards = self._indexers.shards
        if not pools or not shards:
            return NOTHING_FOUND
        problems: dict[str, str] = {}
        requests = [
            indexer_pb2.FindMatchesRequest(
                model=model,
                tenant=tenant,
                block_size=pool.block_size,
                eagle=pool.eagle,
                # Who sends hashes may have told any length.
                prompt_tokens=prompt_tokens if prompt_tokens >= _tokens_in(hashes[pool], pool) else 0,
                traceparent=tracing.traceparent(),
            ).SerializeToString()
            + bytes_field(indexer_pb2.FindMatchesRequest.BLOCK_HASHES_FIELD_NUMBER, hashes[pool])
            for pool in pools
        ]
        calls = [self._ask(shard, request, problems) for request in requests for shard in shards]
        # Nearly always there is one call: no need for a task of its own.
        answered = [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)
        answers = {
            pool: tuple(answered[start : start + len(shards)])
            for pool, start in zip(pools, range(0, len(answered), len(shards)), strict=True)
        }
        overlaps = {pool: unite(a.overlaps for a in of if a is not None) for pool, of in answers.items() if any(of)}
        return Found(overlaps, problems, answers)

    async def _ask(
        self, shard: Replicas, request: bytes, problems: dict[str, str]
    ) -> indexer_pb2.FindMatchesResponse | None:
        try:
            answer, _ = await shard.call(
                lambda stub: stub.find_matches, request, timeout_seconds=self._timeout, is_stale=self._is_stale
            )
        except UpstreamDown as error:
            problems[shard.name] = str(error)
        except KvscoutError as error:
            problems[shard.name] = f"{shard.name}: {error}"
        else:
            return answer
        return None

    def _is_stale(self, member: Member[Any], error: KvscoutError) -> bool:
        """It may have restarted, with the workers that this gateway knows still under way to it."""
        if not isinstance(error, (NotFound, FailedPrecondition)):
            return False
        self._resync(member)
        return True


def unite(shards: Iterable[types_pb2.Overlaps]) -> types_pb2.Overlaps:
    """The rows of several answers as one, columns that are left out filled in where another answer has them."""
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


def _tokens_in(hashes: bytes, pool: Geometry) -> int:
    """Tokens of a prompt's complete blocks."""
    return len(hashes) // HASH_BYTES * pool.block_size


def _fill(
    united: types_pb2.Overlaps, column: str, parts: Sequence[types_pb2.Overlaps], instead: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Unites one column; returns it by part, as it is meant where it is left out."""
    meant = [getattr(part, column) or other for part, other in zip(parts, instead, strict=True)]
    if any(getattr(part, column) for part in parts):
        for values in meant:
            getattr(united, column).extend(values)
    return meant


def _row(overlaps: types_pb2.Overlaps, worker: WorkerRank) -> int | None:
    """The row of a worker rank; None = it has none."""
    ids, ranks = list(overlaps.worker_ids), overlaps.dp_ranks
    row = -1
    while True:
        try:
            row = ids.index(worker.worker_id, row + 1)
        except ValueError:
            return None
        if (ranks[row] if ranks else 0) == worker.dp_rank:
            return row
