"""RecordRouting over a real gRPC server, and the modes of the indexer that it goes with."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.engine_events import batch, chain, prompt, stored
from support.grpc_server import serving
from support.indexer_client import BLOCK_SIZE, MODEL, IndexerClient, local_indexer
from support.recorded_engine import recorded_engine

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_common import errors
from kvscout_common.hashing import block_hashes
from kvscout_common.rpc.channel import call
from kvscout_common.shards import Shard
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.rpc.metrics import IndexerCollector
from kvscout_indexer.rpc.servicer import IndexerServicer

WITHOUT_EVENTS = IndexerConfig(kv_events=False)
BESIDE_EVENTS = IndexerConfig(router_predicted_ttl_seconds=60.0)


@asynccontextmanager
async def indexer(config: IndexerConfig) -> AsyncIterator[IndexerClient]:
    """A client of a served indexer, answering from bytes where that is built."""
    async with local_indexer(config) as (_, core):
        async with serving(IndexerServicer(core, core.queries).add_to) as channel:
            stub = indexer_pb2_grpc.IndexerStub(channel)

            async def rpc(name: str, request: Any) -> Any:
                return await call(getattr(stub, name), request, timeout=10)

            yield IndexerClient(rpc)


class SilentEngine:
    """Registered at an address where nobody publishes: the discard port."""

    endpoint = "tcp://127.0.0.1:9"
    replay_endpoint = ""


def routed(blocks: int, worker_id: str = "w", dp_rank: int = 0, **fields: Any) -> indexer_pb2.RoutedPrompt:
    return indexer_pb2.RoutedPrompt(
        worker=types_pb2.WorkerRank(worker_id=worker_id, dp_rank=dp_rank),
        block_hashes=block_hashes(prompt(blocks), BLOCK_SIZE),
        **fields,
    )


async def record(client: IndexerClient, *prompts: indexer_pb2.RoutedPrompt, model: str = MODEL) -> Any:
    return await client.rpc("RecordRouting", indexer_pb2.RecordRoutingRequest(model=model, prompts=prompts))


async def predicted(client: IndexerClient, blocks: int) -> dict[tuple[str, int], tuple[int, int]]:
    """(confirmed, predicted) blocks of a prompt by worker rank."""
    rows = (await client.matches(prompt(blocks))).overlaps
    ranks = rows.dp_ranks or [0] * len(rows.worker_ids)
    columns = zip(rows.worker_ids, ranks, rows.device_blocks, rows.predicted_blocks or rows.device_blocks, strict=True)
    return {(worker, rank): (device, predicted) for worker, rank, device, predicted in columns}


async def test_without_events_no_socket_is_opened_and_what_was_routed_is_what_is_known() -> None:
    async with indexer(WITHOUT_EVENTS) as client, recorded_engine() as engine:
        engine.lose(*chain(3))  # would be replayed
        await client.register(engine, engine, dp_size=2)
        assert (await record(client, routed(4), routed(2, dp_rank=1))).predicted_blocks == 6
        assert await predicted(client, 5) == {("w", 0): (0, 4), ("w", 1): (0, 2)}
        answer = await client.matches(prompt(5))
        assert answer.lower_bound  # nothing is confirmed of anybody
        assert sorted(answer.incomplete_rows) == [0, 1]
        assert (await client.matches([900_000] * 40)).lower_bound
        for rank in (0, 1):
            status = await client.status(dp_rank=rank)
            assert status.state == indexer_pb2.SOURCE_STATE_NONE
            assert "--no-kv-events" in status.reason
            assert not status.HasField("last_event_id")

        await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w"))
        await client.register(engine)
        assert await predicted(client, 5) == {}


async def test_a_worker_that_only_changes_keeps_its_predictions_and_lost_ranks_lose_theirs() -> None:
    async with indexer(WITHOUT_EVENTS) as client:
        await client.register(dp_size=2)
        await record(client, routed(4), routed(2, dp_rank=1))
        await client.rpc("DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="w"))
        await client.register(update=True, dp_size=2, total_kv_blocks=100)
        assert await predicted(client, 5) == {("w", 0): (0, 4), ("w", 1): (0, 2)}
        await client.register(update=True, dp_size=1)
        assert await predicted(client, 5) == {("w", 0): (0, 4)}


async def test_beside_events_both_are_distinguished_and_an_event_ends_what_it_names() -> None:
    async with indexer(BESIDE_EVENTS) as client, recorded_engine() as engine:
        engine.lose(*chain(2))
        await client.register(engine)
        await client.until_applied(1)
        assert (await record(client, routed(4))).predicted_blocks == 2
        assert await predicted(client, 5) == {("w", 0): (2, 4)}
        assert not (await client.matches(prompt(5))).lower_bound
        await engine.publish(batch(stored([3], prompt(3)[-BLOCK_SIZE:], parent=2)))
        await client.until_applied(2)
        assert await predicted(client, 5) == {("w", 0): (3, 4)}
        status: indexer_pb2.IndexerGetStatusResponse = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
        assert [index.predictions for index in status.indexes] == [1]


async def test_what_is_not_requested_is_refused() -> None:
    async with indexer(IndexerConfig()) as client:
        await client.register()
        with pytest.raises(errors.FailedPrecondition, match="predictions are off"):
            await record(client, routed(2))


def served(worker_id: str = "w", dp_rank: int = 0) -> indexer_pb2.RoutedPrompt:
    """That a worker has served a request."""
    return indexer_pb2.RoutedPrompt(worker=types_pb2.WorkerRank(worker_id=worker_id, dp_rank=dp_rank))


@pytest.mark.parametrize("config", [IndexerConfig(), BESIDE_EVENTS], ids=["predictions off", "beside events"])
async def test_who_served_and_was_never_heard_is_blind_until_its_first_event(config: IndexerConfig) -> None:
    async with indexer(config) as client, recorded_engine(has_replay=False) as engine, recorded_engine() as second:
        await client.register(engine, second, dp_size=2)
        waiting = await client.status()
        assert waiting.state == indexer_pb2.SOURCE_STATE_WAITING
        assert waiting.reason == f"no event has arrived yet at {engine.endpoint}"
        assert (await record(client, served())).predicted_blocks == 0
        once = await client.status()
        assert once.state == indexer_pb2.SOURCE_STATE_BLIND
        assert once.reason.startswith("1 request was served and no event ever came")
        assert once.open_seconds >= waiting.open_seconds >= 0.0
        await record(client, *[served()] * 11)
        blind = await client.status()
        assert blind.state == indexer_pb2.SOURCE_STATE_BLIND
        assert blind.reason == (
            f"12 requests were served and no event ever came: are KV events switched on at {engine.endpoint}?"
        )
        other = await client.until(lambda s: s.state != indexer_pb2.SOURCE_STATE_REPLAYING, dp_rank=1)
        assert other.state == indexer_pb2.SOURCE_STATE_WAITING

        await engine.subscribed()
        await engine.publish(*chain(1))
        live = await client.until_applied(0)
        assert (live.state, live.reason) == (indexer_pb2.SOURCE_STATE_LIVE, "")
        await record(client, served())
        assert (await client.status()).state == indexer_pb2.SOURCE_STATE_LIVE
        # What is dropped on request was heard once: it is not blind for being empty.
        await client.rpc("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w", dp_rank=0))
        assert (await client.status()).state != indexer_pb2.SOURCE_STATE_BLIND


async def test_prompts_with_hashes_say_nothing_of_who_served() -> None:
    async with indexer(BESIDE_EVENTS) as client:
        await client.register(SilentEngine())
        assert (await record(client, *[routed(2)] * 3)).predicted_blocks == 2
        assert (await client.status()).state != indexer_pb2.SOURCE_STATE_BLIND
    async with indexer(IndexerConfig()) as client:
        await client.register(SilentEngine())
        with pytest.raises(errors.FailedPrecondition, match="predictions are off"):
            await record(client, routed(2), routed(2))
        assert (await client.status()).state != indexer_pb2.SOURCE_STATE_BLIND
        # Among others each stands for itself.
        answer = await record(client, routed(2), served(), served("nobody"), served(dp_rank=1))
        assert (answer.predicted_blocks, list(answer.not_recorded)) == (0, [0, 2, 3])
        assert (await client.status()).reason.startswith("1 request was served")
        with pytest.raises(errors.NotFound):
            await record(client, served("nobody"))


async def test_who_is_not_read_is_not_blind() -> None:
    async with indexer(WITHOUT_EVENTS) as client:
        await client.register(SilentEngine())
        assert not list((await record(client, served())).not_recorded)
        status = await client.status()
        assert status.state == indexer_pb2.SOURCE_STATE_NONE
        assert not status.HasField("open_seconds")
    async with indexer(IndexerConfig(shard=Shard(0, 2))) as client:
        await client.register(SilentEngine(), worker_id="w1")  # of shard 1
        with pytest.raises(errors.FailedPrecondition, match="not of shard 0/2"):
            await record(client, served("w1"))
        assert (await client.status("w1")).state == indexer_pb2.SOURCE_STATE_NONE


async def test_blindness_is_said_before_what_is_missing_and_metrics_have_it() -> None:
    async with local_indexer() as (client, core):
        await client.register(SilentEngine())
        [(_, _, source)] = core.sources("default")
        assert source is not None
        source.sequence.history_incomplete = True  # as after a publisher that never answered
        assert (await client.status()).state == indexer_pb2.SOURCE_STATE_INCOMPLETE
        for count in (0.0, 1.0):
            blind = next(m for m in IndexerCollector(core).collect() if m.name == "kvscout_source_blind")
            assert [sample.value for sample in blind.samples] == [count]
            await record(client, served())
            assert (await client.status()).state == indexer_pb2.SOURCE_STATE_BLIND


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("model", {"prompts": [routed(1)]}),
        ("prompts", {"model": MODEL}),
        ("prompts.worker.worker_id", {"model": MODEL, "prompts": [indexer_pb2.RoutedPrompt(block_hashes=[1])]}),
        ("prompts.block_size", {"model": MODEL, "prompts": [routed(1, block_size=0)]}),
    ],
)
async def test_a_missing_field_is_named(field: str, request_fields: dict[str, Any]) -> None:
    async with indexer(BESIDE_EVENTS) as client:
        await client.register()
        with pytest.raises(errors.InvalidArgument) as refused:
            await client.rpc("RecordRouting", indexer_pb2.RecordRoutingRequest(**request_fields))
        assert refused.value.field == field


async def test_what_cannot_be_recorded_is_named_and_an_unknown_worker_is_not_found() -> None:
    async with indexer(BESIDE_EVENTS) as client:
        await client.register()
        answer = await record(client, routed(2, "nobody"), routed(3), routed(1, block_size=BLOCK_SIZE + 1))
        assert (answer.predicted_blocks, list(answer.not_recorded)) == (3, [0, 2])
        with pytest.raises(errors.NotFound):
            await record(client, routed(2, "nobody"))
        with pytest.raises(errors.NotFound):
            await record(client, routed(2), model="another")


async def test_a_worker_of_another_shard_is_known_and_never_read() -> None:
    # "w0" belongs to shard 0 of 2, "w1" to shard 1.
    async with (
        indexer(IndexerConfig(shard=Shard(1, 2))) as client,
        recorded_engine() as own,
        recorded_engine() as other,
    ):
        for worker_id, engine in (("w0", other), ("w1", own)):
            engine.lose(*chain(3))
            await client.register(engine, worker_id=worker_id)
        await client.until_applied(2, "w1")
        assert await client.overlaps(prompt(3)) == {("w1", 0): 3}
        status = await client.status("w0")
        assert status.state == indexer_pb2.SOURCE_STATE_NONE
        assert status.reason == "the worker belongs to shard 0/2, this indexer has 1/2"
        whole: indexer_pb2.IndexerGetStatusResponse = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
        assert (whole.shard_index, whole.shard_count) == (1, 2)
        await client.register(other, worker_id="w0", update=True, total_kv_blocks=7)
        await client.rpc("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w0"))
        assert await client.overlaps(prompt(3)) == {("w1", 0): 3}
        await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w1"))
        # The model is served elsewhere: nothing is found, which is no error.
        assert await client.overlaps(prompt(3)) == {}
        await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w0"))


async def test_a_flag_without_effect_is_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvscout.indexer"):
        async with local_indexer(IndexerConfig(kv_events=False, router_predicted_ttl_seconds=5.0)):
            pass
    assert [record.message for record in caplog.records] == [
        "--router-predicted-ttl has no effect with --no-kv-events: predictions last --router-ttl"
    ]


async def test_evidence_without_a_known_finding_is_refused_by_name() -> None:
    async with indexer(BESIDE_EVENTS) as client:
        await client.register(SilentEngine())
        with pytest.raises(errors.InvalidArgument, match=r"prompts\.evidence\.finding"):
            await record(client, routed(2, evidence=indexer_pb2.CacheEvidence(cached_blocks=1)))
