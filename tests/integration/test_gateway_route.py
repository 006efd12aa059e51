"""Route and what follows it, over real indexer, scheduler, gateway and mockers."""

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from support.gateway_stack import CALL_SECONDS, MODEL, GatewayClient, Stack, fresh_prompt, mocker_worker, running_stack
from support.mocker_process import running_mocker
from support.processes import eventually

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common import errors
from kvscout_common.hashing import block_hashes
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    async with running_stack(mockers=(("--lora", "poet"), ("--lora", "poet"))) as started:
        for index, mocker in enumerate(started.mockers):
            worker = mocker_worker(f"w{index}", mocker, adapters=[workers_pb2.Adapter(name="poet")])
            worker.labels["zone"] = "ab"[index]
            await started.client.register(worker)
        yield started


@pytest.fixture
def client(stack: Stack) -> GatewayClient:
    return stack.client


async def test_a_query_books_nothing(client: GatewayClient) -> None:
    answer = await client.route(fresh_prompt(100))
    assert answer.worker.worker_id in ("w0", "w1")
    assert (answer.num_blocks, answer.block_size, answer.overlap_blocks) == (6, 16, 0)
    assert not answer.degraded
    assert answer.http_endpoint.startswith("http://127.0.0.1:")
    assert not await client.active()


async def test_a_request_id_books_until_it_is_freed(client: GatewayClient) -> None:
    routed = await client.route(fresh_prompt(100), request_id="booked", pinned_worker_id="w1")
    assert routed.worker.worker_id == "w1"
    [active] = await client.active()
    assert (active.request.request_id, active.worker.worker_id, active.uncached_tokens) == ("booked", "w1", 100)
    assert sorted(await client.loads()) == [(0, 0, 0), (1, 100, 7)]

    mark = scheduler_pb2.MarkPrefillCompleteRequest(model=MODEL, request_id="booked")
    free = scheduler_pb2.FreeRequest(model=MODEL, request_id="booked")
    assert (await call(client.stub.MarkPrefillComplete, mark, timeout=CALL_SECONDS)).changed
    assert not (await call(client.stub.MarkPrefillComplete, mark, timeout=CALL_SECONDS)).changed
    assert sorted(await client.loads()) == [(0, 0, 0), (1, 0, 7)]
    freed = [(await call(client.stub.Free, free, timeout=CALL_SECONDS)).outcome for _ in range(2)]
    assert freed == [scheduler_pb2.FREE_OUTCOME_FREED, scheduler_pb2.FREE_OUTCOME_ALREADY_FREED]
    await client.until_idle()
    with pytest.raises(errors.NotFound):
        await call(client.stub.MarkPrefillComplete, mark, timeout=CALL_SECONDS)


async def test_bookings_are_listed_and_renewed_wherever_they_are(client: GatewayClient) -> None:
    await client.route(fresh_prompt(100), request_id="long", model="poet", pinned_worker_id="w0", lease_seconds=20)
    long, gone = (scheduler_pb2.RequestRef(model="poet", request_id=name) for name in ("long", "gone"))
    renewal = scheduler_pb2.RenewRequest(requests=[gone, long], lease_seconds=100)
    assert (await call(client.stub.Renew, renewal, timeout=CALL_SECONDS)).unknown == [0]
    listed = await call(client.stub.ListActiveRequests, scheduler_pb2.ListActiveRequestsRequest(worker_id="w0"))
    [active] = listed.requests
    assert (active.request.request_id, active.phase) == ("long", scheduler_pb2.REQUEST_PHASE_PREFILL)
    assert active.lease_remaining_seconds > 50
    with pytest.raises(errors.InvalidArgument, match="requests: names no request"):
        await call(client.stub.Renew, scheduler_pb2.RenewRequest(), timeout=CALL_SECONDS)
    with pytest.raises(errors.FailedPrecondition, match="track"):
        output = scheduler_pb2.AddOutputRequest(model="poet", request_id="long", blocks=2)
        await call(client.stub.AddOutput, output, timeout=CALL_SECONDS)
    with pytest.raises(errors.InvalidArgument, match="request_id"):
        await call(client.stub.AddOutput, scheduler_pb2.AddOutputRequest(blocks=2), timeout=CALL_SECONDS)
    await call(client.stub.Free, scheduler_pb2.FreeRequest(model="poet", request_id="long"), timeout=CALL_SECONDS)
    await client.until_idle()


async def test_an_active_request_id_is_refused_to_another_attempt_only(client: GatewayClient) -> None:
    prompt = fresh_prompt(64)
    first = await client.route(prompt, request_id="twice", attempt_id=1)
    again = await client.route(prompt, request_id="twice", attempt_id=1)
    assert again.worker.worker_id == first.worker.worker_id
    assert len(await client.active()) == 1
    with pytest.raises(errors.AlreadyExists):
        await client.route(prompt, request_id="twice", attempt_id=2)
    free = scheduler_pb2.FreeRequest(model=MODEL, request_id="twice", attempt_id=1)
    await call(client.stub.Free, free, timeout=CALL_SECONDS)
    await client.until_idle()


async def test_a_booking_ends_with_the_lease_that_its_caller_chose(client: GatewayClient) -> None:
    await client.route(fresh_prompt(64), request_id="short", lease_seconds=3)
    assert len(await client.active()) == 1
    await client.until_idle()


async def test_the_worker_that_holds_the_prompt_is_chosen_and_explained(client: GatewayClient) -> None:
    prompt = fresh_prompt(160)
    await client.generate(prompt, pinned_worker_id="w1")
    await client.until_indexed(prompt, 10)
    await client.until_idle()
    answer = await client.route(prompt, explain=True)
    assert (answer.worker.worker_id, answer.overlap_blocks, answer.effective_overlap_blocks) == ("w1", 10, 10.0)
    candidates = {c.worker.worker_id: c for c in answer.explanation.candidates}
    assert (candidates["w0"].device_blocks, candidates["w1"].device_blocks) == (0, 10)
    assert candidates["w1"].cost < candidates["w0"].cost
    assert answer.explanation.reason
    ignored = types_pb2.RouterConfigOverride(overlap_score_weight=0)
    assert (await client.route(prompt, router_config_override=ignored)).overlap_blocks == 0


async def test_block_hashes_do_as_well_as_tokens(client: GatewayClient) -> None:
    prompt = fresh_prompt(160)
    await client.generate(prompt, pinned_worker_id="w0")
    await client.until_indexed(prompt, 10)
    await client.until_idle()
    hashes = block_hashes(prompt.tobytes(), 16)
    answer = await client.route(block_hashes=hashes, block_size=16, isl_tokens=165)
    assert (answer.worker.worker_id, answer.overlap_blocks, answer.num_blocks) == ("w0", 10, 10)
    with pytest.raises(errors.FailedPrecondition, match="block_size is 32, the model's workers have 16"):
        await client.route(block_hashes=hashes, block_size=32)


async def test_pins_allow_lists_and_labels_limit_the_choice(client: GatewayClient) -> None:
    prompt = fresh_prompt(64)
    for worker_id, zone in (("w0", "a"), ("w1", "b")):
        assert (await client.route(prompt, pinned_worker_id=worker_id)).worker.worker_id == worker_id
        assert (await client.route(prompt, allowed_worker_ids=[worker_id])).worker.worker_id == worker_id
        assert (await client.route(prompt, required_labels={"zone": zone})).worker.worker_id == worker_id
    for code, fields in (
        (errors.NotFound, {"pinned_worker_id": "w9"}),
        (errors.NotFound, {"pinned_worker_id": "w0", "pinned_dp_rank": 3}),
        (errors.Unavailable, {"allowed_worker_ids": ["w9"]}),
        (errors.FailedPrecondition, {"required_labels": {"zone": "c"}}),
        (errors.FailedPrecondition, {"lora_name": "unknown"}),
    ):
        with pytest.raises(code):
            await client.route(prompt, **fields)


async def test_an_adapter_is_a_model_with_a_cache_of_its_own(client: GatewayClient) -> None:
    prompt = fresh_prompt(160)
    await client.generate(prompt, model="poet", pinned_worker_id="w0")
    await client.until_indexed(prompt, 10, lora_name="poet")
    assert (await client.route(prompt, model="poet")).overlap_blocks == 10
    assert (await client.route(prompt, lora_name="poet")).overlap_blocks == 10
    assert (await client.route(prompt)).overlap_blocks == 0
    with pytest.raises(errors.InvalidArgument, match="lora_name"):
        await client.route(prompt, model="poet", lora_name="another")

    await client.route(prompt, model="poet", request_id="by adapter")
    free = scheduler_pb2.FreeRequest(model="poet", request_id="by adapter")
    assert (await call(client.stub.Free, free, timeout=CALL_SECONDS)).outcome == scheduler_pb2.FREE_OUTCOME_FREED


@pytest.mark.parametrize(
    ("field", "request_fields"),
    [
        ("model", {"model": ""}),
        ("token_ids", {"token_ids": []}),
        ("token_ids", {"block_hashes": [1], "block_size": 16}),
        ("block_size", {"token_ids": [], "block_hashes": [1]}),
        ("block_size", {"token_ids": [], "block_hashes": [1], "block_size": 0}),
        ("block_size", {"block_size": 0}),
        ("block_size", {"block_size": 16}),
        ("isl_tokens", {"isl_tokens": 5}),
        ("isl_tokens", {"token_ids": [], "block_hashes": [1], "block_size": 16, "isl_tokens": 15}),
        ("cache_salt", {"token_ids": [], "block_hashes": [1], "block_size": 16, "cache_salt": "s"}),
        ("pinned_dp_rank", {"pinned_dp_rank": 1}),
        ("pinned_worker_id", {"pinned_worker_id": "w0", "allowed_worker_ids": ["w1"]}),
        ("policy", {"router_config_override": types_pb2.RouterConfigOverride(policy="no-such")}),
        ("router_temperature", {"router_config_override": types_pb2.RouterConfigOverride(router_temperature=-1)}),
        (
            "router_temperature",
            {"router_config_override": types_pb2.RouterConfigOverride(router_temperature=float("nan"))},
        ),
        ("overlap_score_weight", {"router_config_override": types_pb2.RouterConfigOverride(overlap_score_weight=-1)}),
        ("lease_seconds", {"request_id": "r", "lease_seconds": 1_000_000}),
        ("role", {"role": 77}),
    ],
)
async def test_bad_input_is_refused_by_the_name_of_its_field(
    client: GatewayClient, field: str, request_fields: dict[str, Any]
) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        await client.route(**{"token_ids": [1, 2, 3], **request_fields})
    named = refused.value.field or ""
    assert field in (named, named.rpartition(".")[2]) or field in str(refused.value), str(refused.value)


async def test_an_unknown_model_is_not_found(client: GatewayClient) -> None:
    for ask in (
        client.route([1], model="nobody"),
        client.generate([1], model="nobody"),
        call(client.stub.GetPotentialLoads, gateway_pb2.GatewayGetPotentialLoadsRequest(model="nobody")),
        call(client.stub.GetStatus, types_pb2.GetStatusRequest(model="nobody")),
    ):
        with pytest.raises((errors.NotFound, grpc.aio.AioRpcError)) as refused:
            await ask
        error = refused.value
        assert isinstance(error, errors.NotFound) or error.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


async def test_all_busy_is_resource_exhausted_until_the_threshold_is_cleared(client: GatewayClient) -> None:
    thresholds = types_pb2.SetBusyThresholdsRequest(model=MODEL, active_prefill_tokens_threshold=50)
    assert (await call(client.stub.SetBusyThresholds, thresholds)).thresholds.active_prefill_tokens_threshold == 50
    try:
        for worker in ("w0", "w1"):
            await client.route(fresh_prompt(100), request_id=f"busy {worker}", pinned_worker_id=worker)
        with pytest.raises(errors.ResourceExhausted, match="busy"):
            await client.route(fresh_prompt(10))
        with pytest.raises(errors.ResourceExhausted, match="pinned"):
            await client.route(fresh_prompt(10), pinned_worker_id="w0")
        listed = await call(client.stub.ListBusyThresholds, types_pb2.ListBusyThresholdsRequest())
        assert [t.model for t in listed.thresholds] == [MODEL]
    finally:
        cleared = types_pb2.SetBusyThresholdsRequest(model=MODEL, clear=["active_prefill_tokens_threshold"])
        await call(client.stub.SetBusyThresholds, cleared)
    kept = await call(client.stub.GetBusyThresholds, types_pb2.GetBusyThresholdsRequest(model=MODEL))
    assert not kept.thresholds.HasField("active_prefill_tokens_threshold")
    await client.route(fresh_prompt(10))
    for worker in ("w0", "w1"):
        free = scheduler_pb2.FreeRequest(model=MODEL, request_id=f"busy {worker}")
        await call(client.stub.Free, free, timeout=CALL_SECONDS)


async def test_potential_loads_know_what_a_prompt_would_add(client: GatewayClient) -> None:
    prompt = fresh_prompt(160)
    await client.generate(prompt, pinned_worker_id="w0")
    await client.until_indexed(prompt, 10)
    await client.until_idle()
    request = gateway_pb2.GatewayGetPotentialLoadsRequest(model=MODEL, token_ids=prompt)
    loads = (await call(client.stub.GetPotentialLoads, request, timeout=CALL_SECONDS)).loads
    assert [(w.worker.worker_id, w.potential_prefill_tokens, w.potential_decode_blocks) for w in loads] == [
        ("w0", 0, 10),
        ("w1", 160, 10),
    ]


async def test_potential_loads_count_the_prompt_in_the_blocks_of_each_worker(client: GatewayClient) -> None:
    prompt = fresh_prompt(64)
    for worker_id, block_size in (("small", 4), ("large", 32)):
        worker = workers_pb2.Worker(worker_id=worker_id, model="two sizes", block_size=block_size)
        await client.register(worker)
    request = gateway_pb2.GatewayGetPotentialLoadsRequest(model="two sizes", token_ids=prompt)
    loads = (await call(client.stub.GetPotentialLoads, request, timeout=CALL_SECONDS)).loads
    assert {w.worker.worker_id: w.potential_decode_blocks for w in loads} == {"small": 16, "large": 2}


async def test_a_prompt_that_no_cache_can_hold_is_refused_before_it_is_hashed(client: GatewayClient) -> None:
    await client.register(workers_pb2.Worker(worker_id="s", model="small cache", block_size=4, total_kv_blocks=5))
    assert (await client.route(fresh_prompt(20), model="small cache")).worker.worker_id == "s"
    with pytest.raises(errors.InvalidArgument, match="maximum context length is 20 tokens") as refused:
        await client.route(fresh_prompt(21), model="small cache")
    assert refused.value.field == "token_ids"


@pytest.mark.parametrize("attempt_id", [0, 1])
async def test_a_route_whose_caller_is_gone_books_nothing(stack: Stack, attempt_id: int) -> None:
    client = stack.client
    stack.scheduler.process.send_signal(signal.SIGSTOP)
    try:
        requests = [
            gateway_pb2.RouteRequest(model=MODEL, token_ids=[1] * 64, request_id=f"gone {n}", attempt_id=attempt_id)
            for n in range(20)
        ]
        asked = await asyncio.gather(
            *(call(client.stub.Route, request, timeout=0.3) for request in requests), return_exceptions=True
        )
        assert {type(error) for error in asked} == {errors.DeadlineExceeded}
    finally:
        stack.scheduler.process.send_signal(signal.SIGCONT)
    await client.until_idle()


async def test_workers_of_two_block_sizes_are_compared_by_one_request(client: GatewayClient) -> None:
    async with running_mocker("--model", "two") as small, running_mocker("--model", "two", "--block-size", "32") as big:
        await asyncio.gather(
            client.register(mocker_worker("small", small, model="two")),
            client.register(mocker_worker("big", big, model="two", block_size=32)),
        )
        for worker_id, block_size, blocks in (("small", 16, 20), ("big", 32, 10)):
            prompt = fresh_prompt(320)
            await client.generate(prompt, model="two", pinned_worker_id=worker_id)
            await client.until_indexed(prompt, blocks, model="two", block_size=block_size)
            await client.until_idle("two")
            chosen = await client.route(prompt, model="two")
            assert (chosen.worker.worker_id, chosen.overlap_blocks) == (worker_id, blocks)
            assert (chosen.block_size, chosen.num_blocks) == (block_size, blocks)
            given = block_hashes(prompt.tobytes(), block_size)
            by_hashes = await client.route(model="two", block_hashes=given, block_size=block_size)
            assert (by_hashes.worker.worker_id, by_hashes.overlap_blocks) == (worker_id, blocks)
        for worker_id in ("small", "big"):
            await call(client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id=worker_id))

    async def unknown() -> bool:
        try:
            await client.route([1], model="two")
        except errors.Unavailable:
            return True  # seen, no worker now
        return False

    await eventually(unknown)
