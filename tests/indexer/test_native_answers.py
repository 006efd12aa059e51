"""What the extension answers without Python, in the order in which it was asked, and what it leaves to Python."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from support.grpc_server import serving
from support.indexer_client import local_indexer

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc
from kvscout_blocks.bytes.events import EventBatch, Stored
from kvscout_common.hashing import native_available
from kvscout_common.identity.identity import AccessRole, Identity, TokenTable
from kvscout_common.observability.rpc_metrics import BUCKETS, RpcTimes
from kvscout_common.worker import Transport, WorkerSpec
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.servicer import IndexerServicer

pytestmark = pytest.mark.skipif(not native_available(), reason="the extension is not built: Python answers all")

NOT_FOUND = grpc.StatusCode.NOT_FOUND
TENANT = (("authorization", "Bearer secret"),)


class Watched(IndexerServicer):
    """Counts what comes to Python."""

    def __init__(self, indexer: Indexer) -> None:
        super().__init__(indexer, indexer.queries)
        self.asked = 0

    def find_matches(self, request: bytes) -> bytes:
        self.asked += 1
        return super().find_matches(request)

    def find_many(self, request: bytes) -> bytes:
        self.asked += 1
        return super().find_many(request)


@asynccontextmanager
async def watched(tokens: TokenTable | None = None) -> AsyncIterator[tuple[Watched, Any]]:
    """An indexer whose workers w and t hold two blocks, each of its tenant, and a stub of it over the extension."""
    async with local_indexer() as (_, indexer):
        for worker_id, tenant in (("w", "default"), ("t", "t")):
            spec = WorkerSpec(worker_id, "m", 4, tenant=tenant, transport=Transport.NONE)
            indexer.registry.register(spec)
            stored = Stored((1, 2), local_hashes=(1, 2))
            indexer.pools.of(spec).apply(spec.ranks[0], EventBatch((stored,)), event_id=0)
        queries = Watched(indexer)
        async with serving(queries.add_to, tokens=tokens, native=True) as channel:
            yield queries, indexer_pb2_grpc.IndexerStub(channel)


def asking(number: int = 0, *, model: str = "m", tenant: str = "", hashes: tuple[int, ...] = (1, 2)) -> Any:
    return indexer_pb2.FindMatchesRequest(model=model, tenant=tenant, id=number, block_hashes=hashes)


def message(number: int, *, model: str = "m", tenant: str = "") -> Any:
    return indexer_pb2.StreamFindMatchesRequest(tenant=tenant, requests=[asking(number, model=model)])


async def test_what_is_usual_never_comes_to_python_and_errors_do() -> None:
    async with watched() as (queries, stub):
        for _ in range(3):
            found = await stub.FindMatches(asking())
            assert (list(found.overlaps.worker_ids), list(found.overlaps.device_blocks)) == (["w"], [2])
        assert queries.asked == 0
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.FindMatches(asking(model="gone"))
        assert (refused.value.code(), queries.asked) == (NOT_FOUND, 1)
        assert "gone" in str(refused.value.details())
        assert (await stub.FindMatches(asking())).num_blocks == 2
        assert queries.asked == 1


async def test_a_stream_is_answered_in_order_whoever_answers_and_however_late_the_answers_are_read() -> None:
    count, each = 4_000, 97
    async with watched() as (queries, stub):
        running = stub.StreamFindMatches()

        async def write() -> None:
            for number in range(count):
                await running.write(message(number, model="m" if number % each else "gone"))
            await running.done_writing()

        writing = asyncio.create_task(write())
        await asyncio.sleep(0.5)
        for number in range(count):
            [result] = (await running.read()).results
            assert result.id == number
            assert result.code == (0 if number % each else NOT_FOUND.value[0])
        assert await running.read() is grpc.aio.EOF
        await writing
        assert await running.code() is grpc.StatusCode.OK
        # Those that the extension declines, and what came behind them, or when there was no room, in one turn.
        assert queries.asked >= count // each


async def test_a_stream_whose_answers_are_read_never_comes_to_python() -> None:
    async with watched() as (queries, stub):
        running = stub.StreamFindMatches()
        for number in range(0, 500, 5):
            for more in range(5):
                await running.write(message(number + more))
            for more in range(5):
                [result] = (await running.read()).results
                assert (result.id, list(result.response.overlaps.device_blocks)) == (number + more, [2])
        # Those that came with the call itself.
        assert queries.asked <= 5
        running.cancel()


async def test_a_message_that_cannot_be_read_ends_its_stream_behind_the_answers_before_it() -> None:
    async with watched() as (_, stub):
        running = stub.StreamFindMatches()
        for number in range(3):
            await running.write(message(number))
        for number in range(3):
            assert (await running.read()).results[0].id == number
        await running.write(indexer_pb2.StreamFindMatchesRequest(requests=[asking()] * 1025))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_with_tokens_calls_are_admitted_and_streams_answered_as_of_who_opened_them() -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    tokens = TokenTable({digest: Identity(AccessRole.CLIENT, "t")})
    async with watched(tokens) as (queries, stub):
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.FindMatches(asking())
        assert unknown.value.code() is grpc.StatusCode.UNAUTHENTICATED
        found = await stub.FindMatches(asking(tenant="t"), metadata=TENANT)
        assert list(found.overlaps.worker_ids) == ["t"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.FindMatches(asking(tenant="default"), metadata=TENANT)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        queries.asked = 0
        running = stub.StreamFindMatches(metadata=TENANT)
        await running.initial_metadata()
        for number in range(3):
            await running.write(message(number, tenant="t"))
            [result] = (await running.read()).results
            assert list(result.response.overlaps.worker_ids) == ["t"]
        assert queries.asked == 0
        await running.write(message(3, tenant="default"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await running.read()
        assert (refused.value.code(), queries.asked) == (grpc.StatusCode.PERMISSION_DENIED, 1)


def test_a_call_that_ends_while_others_are_counted_takes_none_of_them_away() -> None:
    method = RpcTimes().method("/p.S/M")

    class Late(float):
        def __radd__(self, other: float) -> float:
            method.ended(grpc.StatusCode.OK, started=0.0)
            return other + float(self)

    method.count_with(lambda: ([4] + [0] * len(BUCKETS), Late(0.5)))
    assert method.totals()[0] == {grpc.StatusCode.OK: 4}
    assert method.totals()[0] == {grpc.StatusCode.OK: 5}


def test_calls_that_were_answered_elsewhere_count_as_ok() -> None:
    times = RpcTimes()
    method = times.method("/p.S/M")
    method.ended(grpc.StatusCode.NOT_FOUND, started=0.0)
    method.count_with(lambda: ([3, 1] + [0] * (len(BUCKETS) - 1), 0.5))
    handled, seconds = times.collect()
    assert {sample.labels["grpc_code"]: sample.value for sample in handled.samples} == {"OK": 4, "NOT_FOUND": 1}
    by_bound = {sample.labels["le"]: sample.value for sample in seconds.samples if "le" in sample.labels}
    assert [by_bound[str(BUCKETS[0])], by_bound[str(BUCKETS[1])], by_bound["+Inf"]] == [3, 4, 5]
