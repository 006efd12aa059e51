"""Where a prompt is cached, as the indexers of one or several shards tell."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from support.grpc_server import serving

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2
from kvscout_common import errors
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.failover import Member
from kvscout_gateway.upstreams.indexer.indexers import IndexerLink, Indexers
from kvscout_gateway.upstreams.indexer.overlaps import Found, OverlapQuery, unite
from kvscout_gateway.values.prompt import Geometry

POOL = Geometry(16, eagle=False)
TWO = bytes(16)
"""The hashes of two blocks."""


def columns(overlaps: types_pb2.Overlaps) -> dict[str, list[Any]]:
    return {field.name: list(values) for field, values in overlaps.ListFields()}


def test_one_answer_is_taken_as_it_is() -> None:
    only = types_pb2.Overlaps(worker_ids=["a"], device_blocks=[1])
    assert unite([types_pb2.Overlaps(), only]) is only
    assert unite([]) == types_pb2.Overlaps()


def test_columns_that_one_answer_leaves_out_are_filled_in() -> None:
    plain = types_pb2.Overlaps(worker_ids=["a", "b"], device_blocks=[1, 2])
    tiers = types_pb2.Overlaps(worker_ids=["c"], dp_ranks=[3], device_blocks=[4], disk_blocks=[6])
    predicted = types_pb2.Overlaps(worker_ids=["d"], device_blocks=[0], host_blocks=[5], predicted_blocks=[7])
    assert columns(unite([plain, tiers, predicted])) == {
        "worker_ids": ["a", "b", "c", "d"],
        "dp_ranks": [0, 0, 3, 0],
        "device_blocks": [1, 2, 4, 0],
        "host_blocks": [1, 2, 4, 5],
        "disk_blocks": [1, 2, 6, 5],
        "predicted_blocks": [1, 2, 4, 7],
    }
    assert columns(unite([plain, plain])) == {"worker_ids": ["a", "b"] * 2, "device_blocks": [1, 2] * 2}


# w0 belongs to shard 0 of 2, w1 to shard 1.
@pytest.mark.parametrize(
    ("answer", "worker", "confirmed"),
    [
        ({"device_blocks": [5]}, WorkerRank("w0", 0), 5),
        ({"device_blocks": [2], "predicted_blocks": [5]}, WorkerRank("w0", 0), 2),
        ({"device_blocks": [2], "predicted_blocks": [5]}, WorkerRank("w0", 1), 0),
        ({"device_blocks": [2], "predicted_blocks": [5], "dp_ranks": [1]}, WorkerRank("w0", 1), 2),
        ({"device_blocks": [2], "lower_bound": True}, WorkerRank("w0", 0), 2),
        ({"device_blocks": [2], "lower_bound": True, "incomplete_rows": [0]}, WorkerRank("w0", 0), None),
        ({"device_blocks": [2], "lower_bound": True}, WorkerRank("w4", 0), None),  # 0, or nothing is known of it
        ({"device_blocks": [5]}, WorkerRank("w1", 0), None),  # its shard did not answer
    ],
)
def test_what_events_confirm_of_an_overlap(answer: dict[str, Any], worker: WorkerRank, confirmed: int | None) -> None:
    flags = {name: answer.pop(name) for name in ("lower_bound", "incomplete_rows") if name in answer}
    rows = types_pb2.Overlaps(worker_ids=["w0"] * len(answer["device_blocks"]), **answer)
    first = indexer_pb2.FindMatchesResponse(overlaps=rows, **flags)
    found = Found({POOL: rows}, {}, {POOL: (first, None)})
    assert found.confirmed(POOL, "default", worker, overlap_blocks=5) == confirmed


def test_nothing_is_confirmed_where_nobody_was_asked() -> None:
    assert Found().confirmed(POOL, "default", WorkerRank("w0", 0), overlap_blocks=0) is None


class Answering(indexer_pb2_grpc.IndexerServicer):
    """Answers FindMatches with one row."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.error: Exception | None = None
        self.hangs = False

    async def FindMatches(
        self, request: indexer_pb2.FindMatchesRequest, context: Any
    ) -> indexer_pb2.FindMatchesResponse:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return indexer_pb2.FindMatchesResponse(
            overlaps=types_pb2.Overlaps(worker_ids=[self.worker], device_blocks=[len(request.block_hashes)])
        )


@asynccontextmanager
async def asking(shards: int, timeout_seconds: float = 10.0) -> AsyncIterator[tuple[OverlapQuery, list[Answering]]]:
    """Shards of one replica each, in this process."""
    indexers = Indexers([[] for _ in range(shards)], PLAINTEXT)
    servicers = [Answering(f"of {index}") for index in range(shards)]  # type: ignore[abstract]
    async with AsyncExitStack() as stack:
        for servicer, shard in zip(servicers, indexers.shards, strict=True):

            def add(server: grpc.aio.Server, servicer: Answering = servicer) -> None:
                indexer_pb2_grpc.add_IndexerServicer_to_server(servicer, server)

            channel = await stack.enter_async_context(serving(add))
            shard.members.append(Member("indexer", servicer.worker, channel, IndexerLink(channel)))
        yield OverlapQuery(indexers, timeout_seconds=timeout_seconds, resync=lambda member: None), servicers
        await indexers.close()


async def test_every_shard_is_asked_and_the_rows_are_united_for_each_geometry() -> None:
    async with asking(3) as (query, _):
        other = Geometry(32, eagle=True)
        found = await query.find("m", "default", {POOL: TWO, other: TWO[:8], Geometry(64, eagle=False): b""})
        assert not found.problems
        assert {pool: columns(rows) for pool, rows in found.overlaps.items()} == {
            POOL: {"worker_ids": ["of 0", "of 1", "of 2"], "device_blocks": [2, 2, 2]},
            other: {"worker_ids": ["of 0", "of 1", "of 2"], "device_blocks": [1, 1, 1]},
        }


async def test_a_shard_that_hangs_or_fails_costs_its_own_rows_only() -> None:
    async with asking(3, timeout_seconds=0.2) as (query, servicers):
        servicers[0].hangs = True
        servicers[2].error = errors.NotFound("model was never registered")
        found = await query.find("m", "default", {POOL: TWO})
        assert columns(found.overlaps[POOL]) == {"worker_ids": ["of 1"], "device_blocks": [2]}
        assert set(found.problems) == {"indexer 0/3", "indexer 2/3"}
        assert found.problems["indexer 2/3"] == "indexer 2/3: model was never registered"
        servicers[1].hangs = True
        assert not (await query.find("m", "default", {POOL: TWO})).overlaps
