"""Dynamo's methods and shapes, over a gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from support.fake_gateway import FakeGateway, fake_gateway

from kvscout.v1 import events_pb2, gateway_pb2, types_pb2
from kvscout_client import KvPushRouter, Router
from kvscout_common.errors import InvalidArgument


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as gateway:
        yield gateway


@pytest.fixture
async def router(gateway: FakeGateway) -> AsyncIterator[KvPushRouter]:
    async with Router(gateway.address, timeout_seconds=10) as router:
        yield KvPushRouter(router, model="m")


async def test_generate_takes_and_yields_dictionaries(router: KvPushRouter, gateway: FakeGateway) -> None:
    gateway.chunks = [
        gateway_pb2.GenerateResponse(route=gateway_pb2.RouteResponse(worker=types_pb2.WorkerRank(worker_id="7"))),
        gateway_pb2.GenerateResponse(token_ids=[5, 6], text="a"),
        gateway_pb2.GenerateResponse(
            token_ids=[7],
            finish_reason=gateway_pb2.FINISH_REASON_LENGTH,
            usage=gateway_pb2.Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1),
        ),
    ]
    pieces = await router.generate(
        [1, 2],
        "other",
        stop_conditions={"max_tokens": 3, "stop_token_ids": [9]},
        sampling_options={"temperature": 0.5, "top_p": None},
        router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.0},
        worker_id=7,
        dp_rank=1,
    )
    assert [piece async for piece in pieces] == [
        {"token_ids": [5, 6], "text": "a"},
        {
            "token_ids": [7],
            "finish_reason": "length",
            "usage": {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 1},
        },
    ]
    asked = gateway.last
    assert (asked.model, asked.pinned_worker_id, asked.pinned_dp_rank) == ("other", "7", 1)
    assert (asked.stop_conditions.max_tokens, list(asked.stop_conditions.stop_token_ids)) == (3, [9])
    assert asked.sampling_options.temperature == 0.5
    assert not asked.sampling_options.HasField("top_p")
    assert asked.router_config_override.overlap_score_weight == 2.0


async def test_an_option_that_is_not_known_is_named(router: KvPushRouter) -> None:
    with pytest.raises(InvalidArgument, match=r"knows no best_of; it has .*temperature") as refused:
        await router.generate([1], sampling_options={"best_of": 2})
    assert refused.value.field == "sampling_options"


async def test_the_best_worker_is_asked_for_or_booked_and_freed(router: KvPushRouter, gateway: FakeGateway) -> None:
    assert await router.best_worker([1, 2]) == ("w0", 1, 3)
    assert await router.best_worker_id([1, 2], {"router_temperature": 1.0}) == ("w0", 3)
    assert gateway.last.request_id == ""
    assert await router.best_worker([1, 2], request_id="r") == ("w0", 1, 3)
    await router.mark_prefill_complete("r")
    await router.free("r")
    assert [type(one).__name__ for one in gateway.requests[-3:]] == [
        "RouteRequest",
        "MarkPrefillCompleteRequest",
        "FreeRequest",
    ]
    assert {one.request_id for one in gateway.requests[-3:]} == {"r"}
    assert {one.model for one in gateway.requests} == {"m"}


async def test_loads_are_dictionaries(router: KvPushRouter) -> None:
    [load] = await router.get_potential_loads([1, 2])
    assert load == {"worker_id": "w0", "dp_rank": 0, "potential_prefill_tokens": 64, "potential_decode_blocks": 0}


async def test_a_dump_is_the_events_that_make_the_index(
    router: KvPushRouter, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        events_pb2.StateRun(local_hashes=[1, 2], engine_hashes=[11, 12]),
        events_pb2.StateRun(parent_position=0, local_hashes=[3, 4, 5], engine_hashes=[13, 0, 15], copies=[1, 0, 1]),
        events_pb2.StateRun(parent_position=4, local_hashes=[6], engine_hashes=[16]),
        events_pb2.StateRun(parent_position=1, local_hashes=[7], engine_hashes=[17]),
    ]

    async def dump(self: FakeGateway, request: object, context: object) -> AsyncIterator[events_pb2.KvEventBatch]:
        for index, part in enumerate((runs[:2], runs[2:])):
            chunk = events_pb2.StateChunk(index=index, last=index == 1, runs=part)
            yield events_pb2.KvEventBatch(worker_id="42", dp_rank=1, events=[events_pb2.KvEvent(state=chunk)])

    monkeypatch.setattr(FakeGateway, "DumpEvents", dump)
    async with fake_gateway() as other, Router(other.address, model="m") as direct:
        dumped = json.loads(await KvPushRouter(direct).dump_events())
    assert [(one["worker_id"], one["event"]["dp_rank"], one["event"]["event_id"]) for one in dumped] == [
        (42, 1, number) for number in range(3)
    ]
    assert [one["event"]["data"]["stored"] for one in dumped] == [
        {"parent_hash": None, "blocks": [{"block_hash": 11, "tokens_hash": 1}, {"block_hash": 12, "tokens_hash": 2}]},
        {"parent_hash": 11, "blocks": [{"block_hash": 13, "tokens_hash": 3}]},
        {"parent_hash": 12, "blocks": [{"block_hash": 17, "tokens_hash": 7}]},
    ]
