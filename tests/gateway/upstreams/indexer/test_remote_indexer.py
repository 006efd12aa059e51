"""Where a prompt is cached, as the indexers of one or several shards answer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from support.grpc_server import serving

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_common.rank_sets import RankSet, rank_set
from kvscout_common.worker import WorkerRank
from kvscout_gateway.upstreams.failover import Member
from kvscout_gateway.upstreams.indexer.link import IndexerLink
from kvscout_gateway.upstreams.indexer.overlaps import message_of
from kvscout_gateway.upstreams.indexer.remote import RemoteIndexer
from kvscout_gateway.values.cache_reports import CacheReports
from kvscout_gateway.values.overlaps import FEW_ROWS_FROM
from kvscout_gateway.values.prompt import Geometry

POOL = Geometry(16, eagle=False)
TWO = bytes(16)
"""The hashes of two blocks."""


def columns(overlaps: types_pb2.Overlaps) -> dict[str, list[Any]]:
    return {field.name: list(values) for field, values in overlaps.ListFields()}


class Answering(indexer_pb2_grpc.IndexerServicer):
    """Answers FindMatches with one row."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.known = True
        self.hangs = False
        self.ranks = RankSet()
        """That it has; those without a row have a block each."""
        self.few: list[bool] = []
        """Whether a request wanted few rows."""

    async def StreamFindMatches(
        self, requests: AsyncIterator[indexer_pb2.StreamFindMatchesRequest], context: Any
    ) -> AsyncIterator[indexer_pb2.StreamFindMatchesResponse]:
        async for message in requests:
            if self.hangs:
                await asyncio.Event().wait()
            answer = indexer_pb2.StreamFindMatchesResponse()
            for request in message.requests:
                rows = types_pb2.Overlaps(worker_ids=[self.worker], device_blocks=[len(request.block_hashes)])
                self.few.append(bool(request.top_k))
                if request.top_k:
                    rows.others.ranks, rows.others.ranks_digest = self.ranks.ranks - 1, self.ranks.digest
                    rows.others.exact, rows.others.device_blocks = True, 1
                found = indexer_pb2.FindMatchesResponse(overlaps=rows)
                if self.known:
                    answer.results.add(id=request.id, response=found)
                else:
                    answer.results.add(id=request.id, code=5, message="model was never registered")
            yield answer


@asynccontextmanager
async def asking(
    shards: int, timeout_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[tuple[RemoteIndexer, list[Answering]]]:
    """Shards of one replica each, in this process."""
    indexer = RemoteIndexer(
        [[] for _ in range(shards)],
        PLAINTEXT,
        timeout_seconds=timeout_seconds,
        served=lambda key: (),
        reports=lambda tenant, worker_id: True,
        caches=CacheReports(),
        resync=lambda member: None,
        clock=clock,
    )
    servicers = [Answering(f"of {index}") for index in range(shards)]  # type: ignore[abstract]
    async with AsyncExitStack() as stack:
        for servicer, shard in zip(servicers, indexer.shards, strict=True):

            def add(server: grpc.aio.Server, servicer: Answering = servicer) -> None:
                indexer_pb2_grpc.add_IndexerServicer_to_server(servicer, server)

            channel = await stack.enter_async_context(serving(add))
            shard.members.append(Member("indexer", servicer.worker, channel, IndexerLink(channel)))
        yield indexer, servicers
        await indexer.close()


async def test_every_shard_is_asked_and_the_rows_are_united_for_each_geometry() -> None:
    async with asking(3) as (indexer, _):
        other = Geometry(32, eagle=True)
        found = await indexer.match("m", "default", {POOL: TWO, other: TWO[:8], Geometry(64, eagle=False): b""})
        assert not found.problems
        assert {pool: columns(message_of(rows)) for pool, rows in found.rows.items()} == {
            POOL: {"worker_ids": ["of 0", "of 1", "of 2"], "device_blocks": [2, 2, 2]},
            other: {"worker_ids": ["of 0", "of 1", "of 2"], "device_blocks": [1, 1, 1]},
        }


async def test_a_shard_that_hangs_or_fails_costs_its_own_rows_only() -> None:
    async with asking(3, timeout_seconds=3.0) as (indexer, servicers):
        await indexer.match("m", "default", {POOL: TWO})
        servicers[0].hangs = True
        servicers[2].known = False
        found = await indexer.match("m", "default", {POOL: TWO})
        assert columns(message_of(found.rows[POOL])) == {"worker_ids": ["of 1"], "device_blocks": [2]}
        assert set(found.problems) == {"indexer 0/3", "indexer 2/3"}
        assert found.problems["indexer 2/3"] == "indexer 2/3: model was never registered"
        servicers[1].hangs = True
        assert not (await indexer.match("m", "default", {POOL: TWO})).rows


async def test_few_rows_are_requested_of_many_ranks_and_all_again_where_the_indexer_has_others() -> None:
    now = 100.0
    known = rank_set(WorkerRank("w", rank) for rank in range(FEW_ROWS_FROM))
    async with asking(1, clock=lambda: now) as (indexer, (servicer,)):

        async def wanted(ranks: RankSet) -> list[bool]:
            servicer.few.clear()
            found = await indexer.match("m", "default", {POOL: TWO}, ranks={POOL: ranks})
            assert not found.problems
            assert (found.rows[POOL].others is not None) == servicer.few[-1]
            return list(servicer.few)

        servicer.ranks = known
        assert await wanted(rank_set([WorkerRank("w", 0)])) == [False]
        assert await wanted(known) == [True]
        # One that only the gateway knows yet.
        more = rank_set(WorkerRank("w", rank) for rank in range(FEW_ROWS_FROM + 1))
        assert await wanted(more) == [True, False]
        assert await wanted(more) == [False], "for a while no second request is made"
        servicer.ranks = more
        now += 1.0
        assert await wanted(more) == [True]


async def test_all_rows_are_requested_where_a_shard_is_away() -> None:
    known = rank_set(WorkerRank("w", rank) for rank in range(FEW_ROWS_FROM))
    async with asking(2, timeout_seconds=3.0) as (indexer, servicers):
        await indexer.match("m", "default", {POOL: TWO})
        servicers[0].ranks, servicers[1].hangs = known, True
        found = await indexer.match("m", "default", {POOL: TWO}, ranks={POOL: known})
        assert columns(message_of(found.rows[POOL])) == {"worker_ids": ["of 0"], "device_blocks": [2]}
        assert set(found.problems) == {"indexer 1/2"}
