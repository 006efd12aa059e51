"""The Indexer service over a real gRPC server: answers, refusals by field and status, workers that come and go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.engine_events import batch, chain, prompt, stored
from support.grpc_server import serving
from support.indexer_client import BLOCK_SIZE, MODEL, IndexerClient, local_indexer
from support.recorded_engine import RecordedEngine, recorded_engine

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, types_pb2, workers_pb2
from kvscout_blocks.index.block_index import Overlaps
from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError, NotFound
from kvscout_common.hashing import block_hashes
from kvscout_common.rpc.channel import call, stream
from kvscout_common.worker import WorkerRank
from kvscout_indexer.rpc.servicer import IndexerServicer, overlaps_to_proto


@pytest.fixture
async def stub() -> AsyncIterator[indexer_pb2_grpc.IndexerStub]:
    async with local_indexer() as (_, indexer):
        async with serving(IndexerServicer(indexer, None).add_to) as channel:
            yield indexer_pb2_grpc.IndexerStub(channel)


@pytest.fixture
def client(stub: indexer_pb2_grpc.IndexerStub) -> IndexerClient:
    async def rpc(name: str, request: Any) -> Any:
        return await stub_call(getattr(stub, name), request)

    return IndexerClient(rpc)


@pytest.fixture
async def engine() -> AsyncIterator[RecordedEngine]:
    async with recorded_engine() as started:
        yield started


async def holding(client: IndexerClient, engine: RecordedEngine, payloads: list[bytes], **fields: Any) -> None:
    """Registers a worker whose first rank has published payloads."""
    engine.lose(*payloads)
    await client.register(engine, **fields)
    await client.until_applied(len(payloads) - 1, fields.get("worker_id", "w"))


async def test_token_ids_and_their_block_hashes_find_the_same(client: IndexerClient, engine: RecordedEngine) -> None:
    await holding(client, engine, chain(3))
    by_tokens = await client.matches([*prompt(4), 999])
    hashes = block_hashes([*prompt(4), 999], BLOCK_SIZE)
    by_hashes = await client.rpc("FindMatches", indexer_pb2.FindMatchesRequest(model=MODEL, block_hashes=hashes))
    assert by_tokens == by_hashes
    assert (by_tokens.num_blocks, by_tokens.block_size, by_tokens.lower_bound) == (4, BLOCK_SIZE, False)
    assert list(by_tokens.overlaps.worker_ids) == ["w"]
    assert list(by_tokens.overlaps.device_blocks) == [3]


async def test_lora_and_salt_name_different_blocks(client: IndexerClient, engine: RecordedEngine) -> None:
    await holding(
        client,
        engine,
        [
            batch(stored([1], prompt(1))),
            batch(stored([2], prompt(1), lora_id=1, lora_name="x", extra_keys=["x"])),
            batch(stored([3, 4], prompt(2), extra_keys=[["s"], None])),
        ],
    )
    assert await client.overlap(prompt(2)) == 1
    assert await client.overlap(prompt(2), lora_name="x") == 1
    assert await client.overlap(prompt(2), cache_salt="s") == 2
    assert await client.overlap(prompt(2), lora_name="x", cache_salt="s") == 0
    assert await client.overlap(prompt(2), lora_name="y") == 0


async def test_a_multimodal_item_names_the_blocks_that_it_touches(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await holding(client, engine, [batch(stored([1, 2], prompt(2), extra_keys=[None, [["cat", 1]]]))])
    item = types_pb2.MultimodalItem(id="cat", offset=5)
    assert await client.overlap(prompt(2)) == 1
    assert await client.overlap(prompt(2), mm_items=[item]) == 2


async def test_a_request_without_a_prompt_or_shorter_than_a_block_matches_nothing(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await holding(client, engine, chain(1))
    for tokens in ([], [1, 2, 3]):
        found = await client.matches(tokens)
        assert (found.num_blocks, list(found.overlaps.worker_ids)) == (0, [])


async def test_early_exit_says_that_its_answer_is_a_lower_bound(client: IndexerClient, engine: RecordedEngine) -> None:
    await holding(client, engine, chain(3))
    found = await client.matches(prompt(3), early_exit=True)
    assert found.lower_bound
    assert 1 <= found.overlaps.device_blocks[0] <= 3


@pytest.mark.parametrize(
    ("request_fields", "kind", "says"),
    [
        ({"model": ""}, InvalidArgument, "model"),
        ({"token_ids": [1], "block_hashes": [2]}, InvalidArgument, "token_ids"),
        ({"block_size": 0, "token_ids": [1]}, InvalidArgument, "block_size"),
        ({"block_hashes": [1], "lora_name": "x"}, InvalidArgument, "lora_name"),
        ({"block_hashes": [1], "cache_salt": "x"}, InvalidArgument, "cache_salt"),
        ({"block_hashes": [1], "mm_items": [types_pb2.MultimodalItem(id="x")]}, InvalidArgument, "mm_items"),
        ({"model": "other", "token_ids": [1]}, NotFound, "'other'"),
        ({"tenant": "other", "token_ids": [1]}, NotFound, "'other'"),
        ({"block_size": 8, "token_ids": [1]}, FailedPrecondition, "block size 8"),
        ({"eagle": True, "token_ids": [1]}, FailedPrecondition, "eagle"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
async def test_bad_input_names_the_field(
    client: IndexerClient, request_fields: dict[str, Any], kind: type[KvscoutError], says: str
) -> None:
    await client.register()
    with pytest.raises(kind) as refused:
        await client.rpc("FindMatches", indexer_pb2.FindMatchesRequest(**{"model": MODEL, **request_fields}))
    if kind is InvalidArgument:
        assert refused.value.field == says
    else:
        assert says in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"model": ""}, "model"),
        ({"block_size": 0}, "block_size"),
        ({"dp_size": 2000}, "dp_size"),
        ({"http_endpoint": "10.0.0.5"}, "http_endpoint"),
        ({"event_endpoints": [workers_pb2.EventEndpoint(endpoint="10.0.0.5:5557")]}, "event_endpoints[0].endpoint"),
        (
            {"event_endpoints": [workers_pb2.EventEndpoint(endpoint="tcp://h:1", dp_rank=1)]},
            "event_endpoints[0].dp_rank",
        ),
        (
            {"event_endpoints": [workers_pb2.EventEndpoint(endpoint="tcp://h:1", bind=True)]},
            "event_endpoints[0].endpoint",
        ),
        ({"event_endpoints": [workers_pb2.EventEndpoint(endpoint="ipc:///tmp/x")]}, "event_endpoints[0].endpoint"),
        (
            {"event_endpoints": [workers_pb2.EventEndpoint(endpoint="tcp://h:1", replay_endpoint="tcp://*:5657")]},
            "event_endpoints[0].replay_endpoint",
        ),
        ({"transport": 77}, "transport"),
        ({"engine": 77}, "engine"),
        ({"copies": 77}, "copies"),
    ],
)
async def test_a_registration_that_is_wrong_names_the_field(
    client: IndexerClient, fields: dict[str, Any], field: str
) -> None:
    worker = workers_pb2.Worker(**{"worker_id": "w", "model": MODEL, "block_size": 4, **fields})
    with pytest.raises(InvalidArgument) as refused:
        await client.rpc("RegisterWorker", workers_pb2.RegisterWorkerRequest(worker=worker))
    assert refused.value.field == field


async def test_unknown_workers_and_models_are_not_found(client: IndexerClient) -> None:
    await client.register()
    unknown = workers_pb2.Worker(worker_id="x", model=MODEL, block_size=4)
    for name, request in (
        ("UpdateWorker", workers_pb2.UpdateWorkerRequest(worker=unknown)),
        ("DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="x")),
        ("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="x")),
        ("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="x")),
        ("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w", dp_rank=1)),
        ("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w", tenant="t")),
        ("GetStatus", types_pb2.GetStatusRequest(model="other")),
        ("GetStatus", types_pb2.GetStatusRequest(model="other", tenant="*")),
    ):
        with pytest.raises(NotFound):
            await client.rpc(name, request)


async def test_requests_that_name_nobody_are_refused(client: IndexerClient) -> None:
    for name, request, field in (
        ("DrainWorker", workers_pb2.DrainWorkerRequest(), "worker_id"),
        ("RemoveWorker", workers_pb2.RemoveWorkerRequest(), "worker_id"),
        ("ResetWorker", indexer_pb2.ResetWorkerRequest(), "worker_id"),
        ("KeepAlive", workers_pb2.KeepAliveRequest(), "worker_ids"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            await client.rpc(name, request)
        assert refused.value.field == field


async def stub_call(method: Any, request: Any) -> Any:
    return await call(method, request)


async def test_a_dump_is_a_consistent_cut_of_each_source(
    client: IndexerClient, stub: indexer_pb2_grpc.IndexerStub, engine: RecordedEngine
) -> None:
    await holding(client, engine, chain(3))
    await client.register(worker_id="empty")

    async def dumped(**fields: Any) -> dict[str, tuple[int | None, int]]:
        batches = [message async for message in stream(stub.Dump, indexer_pb2.DumpRequest(**fields))]
        return {
            message.worker_id: (
                message.event_id if message.HasField("event_id") else None,
                sum(len(run.local_hashes) for event in message.events for run in event.state.runs),
            )
            for message in batches
        }

    assert await dumped() == {"w": (2, 3), "empty": (None, 0)}
    assert await dumped(model=MODEL, worker_id="w", dp_rank=0) == {"w": (2, 3)}
    assert await dumped(tenant="t") == {}
    for fields, kind in (
        ({"model": "other"}, NotFound),
        ({"worker_id": "other"}, NotFound),
        ({"dp_rank": 0}, InvalidArgument),
    ):
        with pytest.raises(kind):
            await dumped(**fields)


async def test_two_ranks_of_a_worker_have_rows_of_their_own(client: IndexerClient, engine: RecordedEngine) -> None:
    async with recorded_engine() as second:
        engine.lose(*chain(2))
        second.lose(batch(stored([1], prompt(1)), rank=1))
        await client.register(engine, second)
        await client.until_applied(1, dp_rank=0)
        await client.until_applied(0, dp_rank=1)
        assert await client.overlaps(prompt(2)) == {("w", 0): 2, ("w", 1): 1}
        answer = await client.rpc("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w"))
        assert answer.ranks == 2


async def test_ranks_count_from_the_workers_first_one(client: IndexerClient, engine: RecordedEngine) -> None:
    engine.lose(batch(stored([1], prompt(1)), rank=4))
    await client.register(engine, dp_start_rank=4)
    await client.until_applied(0, dp_rank=4)
    assert await client.overlaps(prompt(1)) == {("w", 4): 1}


async def test_a_removed_worker_leaves_nothing_behind_and_comes_back_empty(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await holding(client, engine, chain(2))
    async with recorded_engine() as other:
        await holding(client, other, chain(1), worker_id="other")
        await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w"))
        assert await client.overlaps(prompt(2)) == {("other", 0): 1}
        engine.forget()
        await client.register(engine)
        await client.until_applied(-1)
        assert await client.overlaps(prompt(2)) == {("other", 0): 1}
        await engine.subscribed()
        await engine.publish(*chain(2))
        await client.until_applied(1)
        assert await client.overlaps(prompt(2)) == {("other", 0): 1, ("w", 0): 2}


async def test_without_its_last_worker_a_model_matches_nothing(client: IndexerClient) -> None:
    await client.register()
    await client.rpc("RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w"))
    assert await client.overlaps(prompt(1)) == {}
    status = await client.rpc("GetStatus", types_pb2.GetStatusRequest(model=MODEL))
    assert (list(status.indexes), list(status.sources)) == ([], [])


async def test_an_update_that_leaves_the_endpoint_alone_keeps_blocks_and_cursor(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await holding(client, engine, chain(2))
    await client.register(engine, update=True, labels={"zone": "a"}, draining=True)
    assert await client.overlap(prompt(2)) == 2
    await engine.subscribed()
    await engine.publish(batch(stored([3], prompt(1, first=9), parent=2)))
    await client.until_applied(2)
    assert await client.overlap(prompt(3)) == 3
    assert len(engine.replays_asked) == 1


async def test_a_worker_that_publishes_elsewhere_now_starts_anew(client: IndexerClient, engine: RecordedEngine) -> None:
    await holding(client, engine, chain(2))
    async with recorded_engine() as successor:
        successor.lose(batch(stored([1], prompt(1))))
        await client.register(successor, update=True)
        await client.until_applied(0)
        assert await client.overlap(prompt(2)) == 1


async def test_a_worker_that_publishes_no_more_holds_nothing(client: IndexerClient, engine: RecordedEngine) -> None:
    await holding(client, engine, chain(2))
    await client.register(update=True)
    status = await client.status()
    assert status.state == indexer_pb2.SOURCE_STATE_NONE
    assert await client.overlaps(prompt(2)) == {}


async def test_ranks_that_come_and_go_with_an_update(client: IndexerClient, engine: RecordedEngine) -> None:
    async with recorded_engine() as second:
        engine.lose(*chain(2))
        second.lose(batch(stored([1], prompt(1)), rank=1))
        await client.register(engine)
        await client.until_applied(1)
        await client.register(engine, second, update=True)
        await client.until_applied(0, dp_rank=1)
        assert await client.overlaps(prompt(2)) == {("w", 0): 2, ("w", 1): 1}
        await client.register(second, update=True, dp_start_rank=1)
        assert await client.overlaps(prompt(2)) == {("w", 1): 1}


async def test_another_block_size_is_another_index(client: IndexerClient, engine: RecordedEngine) -> None:
    await holding(client, engine, chain(2))
    engine.forget()
    engine.lose(batch(stored([1], prompt(2), block_size=8)))
    await client.register(engine, update=True, block_size=8)
    await client.until_applied(0)
    found = await client.matches(prompt(2))
    assert (found.block_size, list(found.overlaps.device_blocks)) == (8, [1])


async def test_tenants_do_not_see_each_other(client: IndexerClient, engine: RecordedEngine) -> None:
    await holding(client, engine, chain(1))
    await client.register(tenant="t", worker_id="theirs")
    assert await client.overlaps(prompt(1), tenant="t") == {}
    seen = {}
    for tenant in ("", "t", "*"):
        status = await client.rpc("GetStatus", types_pb2.GetStatusRequest(tenant=tenant))
        seen[tenant] = [s.worker.worker_id for s in status.sources]
        workers = await client.rpc("ListWorkers", workers_pb2.ListWorkersRequest(tenant=tenant))
        assert [entry.worker.worker_id for entry in workers.workers] == seen[tenant]
    assert seen == {"": ["w"], "t": ["theirs"], "*": ["w", "theirs"]}
    only = await client.rpc("GetStatus", types_pb2.GetStatusRequest(tenant="*", model=MODEL))
    assert len(only.sources) == len(only.indexes) == 2


async def test_the_status_shows_indexes_and_workers_that_publish_nothing(
    client: IndexerClient, engine: RecordedEngine
) -> None:
    await holding(client, engine, chain(3))
    await client.register(worker_id="silent")
    await client.register(worker_id="forgotten", transport=workers_pb2.EVENT_TRANSPORT_ZMQ)
    await client.overlaps(prompt(1))
    status = await client.rpc("GetStatus", types_pb2.GetStatusRequest())
    (index,) = status.indexes
    assert (index.model, index.block_size, index.blocks, index.memberships) == (MODEL, BLOCK_SIZE, 3, 3)
    assert (index.queries, index.worker_ranks) == (1, 1)
    assert index.bytes > 0
    states = {s.worker.worker_id: (s.state, s.reason) for s in status.sources}
    assert states["w"] == (indexer_pb2.SOURCE_STATE_LIVE, "")
    assert states["silent"][0] == indexer_pb2.SOURCE_STATE_NONE
    assert states["forgotten"] == (
        indexer_pb2.SOURCE_STATE_MISCONFIGURED,
        "no event endpoint is registered for this rank",
    )
    assert status.service.version
    assert not status.service.draining


async def test_a_reset_of_a_worker_without_events_is_allowed(client: IndexerClient) -> None:
    await client.register()
    answer = await client.rpc("ResetWorker", indexer_pb2.ResetWorkerRequest(worker_id="w", dp_rank=0))
    assert answer.ranks == 1


def test_columns_that_say_nothing_new_are_left_out() -> None:
    row = (WorkerRank("w", 0),)
    short = overlaps_to_proto(Overlaps(row, (2,), (2,), (2,), (2,), (2,)))
    assert short == types_pb2.Overlaps(worker_ids=["w"], device_blocks=[2])
    full = overlaps_to_proto(Overlaps((WorkerRank("w", 1),), (1,), (2,), (3,), (4,), (5,)))
    assert full == types_pb2.Overlaps(
        worker_ids=["w"],
        dp_ranks=[1],
        device_blocks=[1],
        host_blocks=[2],
        disk_blocks=[3],
        external_blocks=[4],
        predicted_blocks=[5],
    )
