"""Where a prompt is cached, as the indexers of one or several shards answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from support.grpc_server import serving

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_gateway.upstreams.failover import Member
from kvscout_gateway.upstreams.indexer.link import IndexerLink
from kvscout_gateway.upstreams.indexer.overlaps import message_of
from kvscout_gateway.upstreams.indexer.remote import RemoteIndexer
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

    async def StreamFindMatches(
        self, requests: AsyncIterator[indexer_pb2.StreamFindMatchesRequest], context: Any
    ) -> AsyncIterator[indexer_pb2.StreamFindMatchesResponse]:
        async for message in requests:
            if self.hangs:
                await asyncio.Event().wait()
            answer = indexer_pb2.StreamFindMatchesResponse()
            for request in message.requests:
                rows = types_pb2.Overlaps(worker_ids=[self.worker], device_blocks=[len(request.block_hashes)])
                found = indexer_pb2.FindMatchesResponse(overlaps=rows)
                if self.known:
                    answer.results.add(id=request.id, response=found)
                else:
                    answer.results.add(id=request.id, code=5, message="model was never registered")
            yield answer


@asynccontextmanager
async def asking(shards: int, timeout_seconds: float = 10.0) -> AsyncIterator[tuple[RemoteIndexer, list[Answering]]]:
    """Shards of one replica each, in this process."""
    indexer = RemoteIndexer(
        [[] for _ in range(shards)],
        PLAINTEXT,
        timeout_seconds=timeout_seconds,
        served=lambda key: (),
        reports=lambda tenant, worker_id: True,
        resync=lambda member: None,
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
    async with asking(3, timeout_seconds=0.2) as (indexer, servicers):
        servicers[0].hangs = True
        servicers[2].known = False
        found = await indexer.match("m", "default", {POOL: TWO})
        assert columns(message_of(found.rows[POOL])) == {"worker_ids": ["of 1"], "device_blocks": [2]}
        assert set(found.problems) == {"indexer 0/3", "indexer 2/3"}
        assert found.problems["indexer 2/3"] == "indexer 2/3: model was never registered"
        servicers[1].hangs = True
        assert not (await indexer.match("m", "default", {POOL: TWO})).rows
