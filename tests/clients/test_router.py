"""The client against a gateway in this process: every call, every error, nothing left booked."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
import trustme
from support.fake_gateway import FakeGateway, fake_gateway

from kvscout.v1 import gateway_pb2, types_pb2
from kvscout_client import (
    ClientSecurity,
    FaultOwner,
    FinishReason,
    FreeOutcome,
    MmItem,
    RequestPhase,
    Router,
    RouterOverride,
    SamplingOptions,
    StopConditions,
)
from kvscout_common import errors
from kvscout_common.identity.identity import TokenTable
from kvscout_common.worker import EventEndpoint, Role, WorkerRank, WorkerSpec


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as gateway:
        yield gateway


@pytest.fixture
async def router(gateway: FakeGateway) -> AsyncIterator[Router]:
    async with Router(gateway.address, model="m", tenant="t", timeout_seconds=10) as router:
        yield router


async def test_route_asks_with_everything_given_and_books_nothing(router: Router, gateway: FakeGateway) -> None:
    decision = await router.route(
        array("I", [1, 2, 3]),
        lora_name="l",
        cache_salt="s",
        mm_items=[MmItem("image-1", 1, 2)],
        role=Role.DECODE,
        pinned_worker_id="w0",
        pinned_dp_rank=0,
        allowed_worker_ids=["w0"],
        required_labels={"zone": "a"},
        override=RouterOverride(overlap_score_weight=0.0, policy="random", seed=9),
        priority=-2,
        explain=True,
    )
    asked = gateway.last
    assert list(asked.token_ids) == [1, 2, 3]
    assert (asked.model, asked.tenant, asked.request_id, asked.role) == ("m", "t", "", types_pb2.ROLE_DECODE)
    assert (asked.lora_name, asked.cache_salt, asked.pinned_worker_id, asked.priority) == ("l", "s", "w0", -2)
    assert [(item.id, item.offset, item.length) for item in asked.mm_items] == [("image-1", 1, 2)]
    assert asked.HasField("pinned_dp_rank")
    assert asked.router_config_override.HasField("overlap_score_weight")
    assert not asked.router_config_override.HasField("router_temperature")
    assert decision.worker == WorkerRank("w0", 1)
    assert (decision.overlap_blocks, decision.num_blocks, decision.block_size) == (3, 4, 16)
    assert decision.degraded_reasons == ("indexer",)
    assert decision.explanation is not None
    assert decision.explanation.candidates[0].worker == WorkerRank("w0", 1)


async def test_generate_takes_multimodal_items_and_the_engines_own_fields(router: Router, gateway: FakeGateway) -> None:
    items = (MmItem(name, offset, 1) for offset, name in enumerate(("a", "b")))
    async for _ in router.generate([1, 2], mm_items=items, engine_fields={"multi_modal_data": {"image": ["u"]}}):
        pass
    asked = gateway.last
    assert [(item.id, item.offset) for item in asked.mm_items] == [("a", 0), ("b", 1)]
    assert json.loads(asked.engine_fields) == {"multi_modal_data": {"image": ["u"]}}
    for no_json in (float("nan"), object()):
        with pytest.raises(errors.InvalidArgument) as refused:
            await anext(router.generate([1], engine_fields={"x": no_json}))
        assert refused.value.field == "engine_fields"


async def test_unset_fields_stay_unset_on_the_wire(router: Router, gateway: FakeGateway) -> None:
    decision = await router.route([1], model="other")
    assert gateway.last.model == "other"
    assert not gateway.last.HasField("pinned_dp_rank")
    assert not gateway.last.HasField("router_config_override")
    assert decision.explanation is None


async def test_what_is_known_of_an_output_is_told(router: Router, gateway: FakeGateway) -> None:
    await router.route(
        [1],
        expected_output_tokens=7,
        max_output_tokens=9,
        output_class="summary",
        estimate_prefill_complete=True,
        session="chat 1",
    )
    last = gateway.last
    assert (last.expected_output_tokens, last.max_output_tokens, last.output_class) == (7, 9, "summary")
    assert (last.estimate_prefill_complete, last.session) == (True, "chat 1")


async def test_failures_are_typed(router: Router, gateway: FakeGateway) -> None:
    [failure] = await router.failures(worker_id="w0", owner=FaultOwner.ENGINE, answered=True, after=3, limit=5)
    assert (failure.number, failure.request_id, failure.owner, failure.cause) == (4, "r", FaultOwner.ENGINE, "worker")
    assert (failure.worker_ids, failure.answered, failure.status) == (("w0", "w1"), False, "UNAVAILABLE")
    asked = gateway.last
    assert (asked.worker_id, asked.owner, asked.answered) == ("w0", gateway_pb2.FAULT_OWNER_ENGINE, True)
    assert (asked.after_number, asked.page_size) == (3, 5)


async def test_a_booking_is_freed_when_its_block_ends(router: Router, gateway: FakeGateway) -> None:
    async with await router.route([1], request_id="r", attempt_id=3) as booking:
        assert booking.decision.worker.worker_id == "w0"
        assert await booking.prefill_complete() is True
    free = gateway.last
    assert (free.model, free.tenant, free.request_id, free.attempt_id) == ("m", "t", "r", 3)
    assert await booking.free() is FreeOutcome.ALREADY_FREED
    asked = [type(request).__name__ for request in gateway.requests]
    assert asked == ["RouteRequest", "MarkPrefillCompleteRequest", "FreeRequest"]


async def test_a_booking_that_is_freed_says_how_long_its_output_was(router: Router, gateway: FakeGateway) -> None:
    async with await router.route([1], request_id="r") as booking:
        await booking.free(output_tokens=123)
    assert gateway.last.output_tokens == 123
    assert [type(request).__name__ for request in gateway.requests] == ["RouteRequest", "FreeRequest"]


async def test_a_booking_is_named_by_the_role_it_was_made_for(router: Router, gateway: FakeGateway) -> None:
    gateway.booked = True
    async with await router.route([1], request_id="r", role=Role.DECODE) as booking:
        await booking.prefill_complete()
        await booking.renew()
        await booking.add_output(1)
    mark, renew, output, free = gateway.requests[1:]
    assert {one.role for one in (mark, output, free, *renew.requests)} == {types_pb2.ROLE_DECODE}


async def test_a_prompt_that_is_hashed_already_is_routed_by_its_hashes(router: Router, gateway: FakeGateway) -> None:
    await router.route(block_hashes=[1, 2**64 - 1], block_size=16, isl_tokens=40)
    asked = gateway.last
    assert (list(asked.block_hashes), asked.block_size, asked.isl_tokens) == ([1, 2**64 - 1], 16, 40)
    assert not asked.token_ids
    with pytest.raises(errors.InvalidArgument, match="block_hashes"):
        await router.route(block_hashes=[-1], block_size=16)


async def test_a_booking_is_renewed_and_grows(router: Router, gateway: FakeGateway) -> None:
    gateway.booked = True
    async with await router.route([1], request_id="r", attempt_id=3) as booking:
        assert await booking.renew(60) is True
        assert (gateway.last.lease_seconds, gateway.last.requests[0].attempt_id) == (60, 3)
        assert await booking.add_output(2) == 3
        assert (gateway.last.tenant, gateway.last.request_id) == ("t", "r")
    assert await router.renew(["gone", "r"]) == ["gone"]


async def test_active_requests_are_typed(router: Router, gateway: FakeGateway) -> None:
    [active] = await router.active_requests(worker_id="w0", limit=5)
    assert (active.request_id, active.role, active.worker) == ("r", Role.DECODE, WorkerRank("w0", 1))
    assert (active.phase, active.blocks, active.age_seconds) == (RequestPhase.DECODE, 7, 1.5)
    assert (gateway.last.worker_id, gateway.last.page_size) == ("w0", 5)


async def test_a_booking_is_freed_when_its_block_fails_or_is_cancelled(router: Router, gateway: FakeGateway) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await router.route([1], request_id="a"):
            raise ZeroDivisionError
    assert gateway.last.request_id == "a"

    entered = asyncio.Event()

    async def hold() -> None:
        async with await router.route([1], request_id="b"):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gateway.last.request_id == "b"


async def test_an_error_inside_a_booking_is_kept_when_the_free_fails_too(router: Router, gateway: FakeGateway) -> None:
    gateway.errors["Free"] = errors.Unavailable("no scheduler")
    with pytest.raises(ZeroDivisionError) as caught:
        async with await router.route([1], request_id="a"):
            raise ZeroDivisionError
    assert "no scheduler" in caught.value.__notes__[0]


async def test_work_that_succeeded_does_not_fail_because_its_free_does(
    router: Router, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.errors["Free"] = errors.Unavailable("no scheduler")
    async with await router.route([1], request_id="b") as booking:
        assert booking.decision.booked, "a gateway that does not say has booked"
    assert gateway.last.request_id == "b"
    assert "request 'b' could not be freed: no scheduler" in caplog.text


async def test_what_was_not_booked_is_neither_reported_nor_freed(router: Router, gateway: FakeGateway) -> None:
    gateway.booked = False
    async with await router.route([1], request_id="b") as booking:
        assert not booking.decision.booked
        assert await booking.prefill_complete() is False
        assert await booking.renew() is False
        assert await booking.add_output(1) == 0
    assert await booking.free() is FreeOutcome.UNKNOWN
    assert [type(request).__name__ for request in gateway.requests] == ["RouteRequest"]


async def test_a_query_is_not_booked(router: Router, gateway: FakeGateway) -> None:
    assert not (await router.route([1])).booked


async def test_an_empty_request_id_is_refused_before_anything_is_sent(router: Router, gateway: FakeGateway) -> None:
    with pytest.raises(errors.InvalidArgument, match="request_id"):
        await router.route([1], request_id="")
    assert gateway.requests == []


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["x"]])
async def test_ids_that_are_no_u32_are_refused_by_name(router: Router, tokens: list[int]) -> None:
    with pytest.raises(errors.InvalidArgument) as caught:
        await router.route(tokens)
    assert caught.value.field == "token_ids"


async def test_generate_streams_typed_pieces(router: Router, gateway: FakeGateway) -> None:
    gateway.chunks = [
        gateway_pb2.GenerateResponse(
            token_ids=[5],
            text="a",
            request_id="r",
            route=gateway_pb2.RouteResponse(worker=types_pb2.WorkerRank(worker_id="w0")),
        ),
        gateway_pb2.GenerateResponse(token_ids=[6, 7], finish_reason=gateway_pb2.FINISH_REASON_LENGTH),
        gateway_pb2.GenerateResponse(
            usage=gateway_pb2.Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=0),
        ),
    ]
    chunks = [
        chunk
        async for chunk in router.generate(
            b"\x01\0\0\0\x02\0\0\0",
            stop=StopConditions(max_tokens=3, ignore_eos=True, stop_token_ids=(2,)),
            sampling=SamplingOptions(temperature=0.0),
        )
    ]
    asked = gateway.last
    assert list(asked.token_ids) == [1, 2]
    assert (asked.stop_conditions.max_tokens, asked.stop_conditions.ignore_eos) == (3, True)
    assert asked.sampling_options.HasField("temperature")
    assert not asked.sampling_options.HasField("top_p")
    first, second, last = chunks
    assert (first.token_ids, first.text, first.request_id) == ((5,), "a", "r")
    assert first.decision is not None
    assert first.decision.worker.worker_id == "w0"
    assert (second.token_ids, second.finish_reason, second.decision) == ((6, 7), FinishReason.LENGTH, None)
    assert last.usage is not None
    assert last.usage.cached_tokens == 0


async def test_cached_tokens_that_the_engine_did_not_report_are_none(router: Router, gateway: FakeGateway) -> None:
    gateway.chunks = [gateway_pb2.GenerateResponse(usage=gateway_pb2.Usage(prompt_tokens=10))]
    (chunk,) = [chunk async for chunk in router.generate([1])]
    assert chunk.usage is not None
    assert chunk.usage.cached_tokens is None


async def test_leaving_a_generation_early_cancels_it_at_the_gateway(router: Router, gateway: FakeGateway) -> None:
    gateway.chunks = [gateway_pb2.GenerateResponse(token_ids=[5])]
    gateway.hang_after_chunks = True
    async with aclosing(router.generate([1])) as chunks:
        await anext(chunks)
    async with asyncio.timeout(30):
        await gateway.cancelled.wait()


async def test_an_error_after_the_first_token_comes_after_what_was_generated(
    router: Router, gateway: FakeGateway
) -> None:
    gateway.chunks = [gateway_pb2.GenerateResponse(token_ids=[5])]
    gateway.errors["Generate.end"] = errors.InternalError("the engine failed")
    received = []
    with pytest.raises(errors.InternalError, match="the engine failed"):
        async for chunk in router.generate([1]):
            received.append(chunk.token_ids)
    assert received == [(5,)]


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgument("out of range", field="router_temperature"),
        errors.NotFound("no such model"),
        errors.FailedPrecondition("block size"),
        errors.ResourceExhausted("all busy", retry_after_seconds=2.5),
        errors.Unavailable("none registered"),
        errors.AlreadyExists("taken"),
        errors.PermissionDenied("not yours"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_come_back_as_what_they_were(
    router: Router, gateway: FakeGateway, error: errors.KvscoutError
) -> None:
    gateway.errors["Route"] = gateway.errors["Generate"] = error
    with pytest.raises(type(error)) as caught:
        await router.route([1])
    assert (caught.value.message, caught.value.field) == (error.message, error.field)
    assert caught.value.retry_after_seconds == error.retry_after_seconds
    with pytest.raises(type(error)):
        await anext(router.generate([1]))


async def test_a_gateway_that_is_not_there_is_unavailable() -> None:
    async with Router("127.0.0.1:1", timeout_seconds=10) as router:
        with pytest.raises(errors.Unavailable):
            await router.status()


async def test_a_deadline_ends_a_generation(router: Router, gateway: FakeGateway) -> None:
    gateway.hang_after_chunks = True
    with pytest.raises(errors.DeadlineExceeded):
        await anext(router.generate([1], timeout_seconds=0.05))


async def test_workers_are_registered_listed_drained_kept_and_removed(router: Router, gateway: FakeGateway) -> None:
    spec = WorkerSpec(
        worker_id="w9",
        model="m",
        tenant="t",
        block_size=32,
        role=Role.PREFILL,
        event_endpoints=(EventEndpoint(0, "tcp://h:1", "tcp://h:2"),),
        labels={"zone": "a"},
    )
    registered = await router.register_worker(spec, lease_seconds=30)
    assert (registered.spec, registered.created) == (spec, True)
    assert (gateway.last.lease_seconds, gateway.last.tenant) == (30, "t")
    assert await router.update_worker(spec) == spec
    assert await router.drain_worker("w9") == 2
    assert await router.drain_worker("w9", undo=True) == 2
    assert gateway.last.undo is True
    assert await router.keep_alive(["w9", "gone"]) == ("gone",)
    await router.remove_worker("w9")
    assert (gateway.last.worker_id, gateway.last.tenant) == ("w9", "t")
    records = await router.list_workers()
    assert [(r.spec.worker_id, r.source, r.lease_remaining_seconds) for r in records] == [
        ("w0", "file", None),
        ("w1", "rpc", 7.5),
    ]


async def test_loads_and_status_are_typed(router: Router, gateway: FakeGateway) -> None:
    (load,) = await router.potential_loads([1, 2], role=Role.DECODE)
    assert (load.worker, load.potential_prefill_tokens, load.busy) == (WorkerRank("w0", 0), 64, True)
    assert list(gateway.last.token_ids) == [1, 2]
    status = await router.status()
    assert (status.version, status.warnings, dict(status.degraded)) == ("1.2.3", ("look here",), {"indexer": 2})
    assert status.helpers[0].last_error == "late"
    assert status.workers[0].requests == 4


async def test_thresholds_are_set_cleared_or_left_alone(router: Router, gateway: FakeGateway) -> None:
    answer = await router.set_busy_thresholds(active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=None)
    assert (answer.active_decode_blocks_threshold, answer.active_prefill_tokens_threshold) == (0.5, None)
    assert list(gateway.last.clear) == ["active_prefill_tokens_threshold"]
    await router.set_busy_thresholds(active_prefill_tokens_threshold=0)
    assert gateway.last.HasField("active_prefill_tokens_threshold")
    assert not gateway.last.HasField("active_decode_blocks_threshold")
    assert not gateway.last.clear
    read = await router.busy_thresholds()
    assert (read.active_decode_blocks_threshold, read.active_prefill_tokens_threshold) == (None, 0)
    assert [entry.model for entry in await router.list_busy_thresholds()] == ["m"]


async def test_a_token_file_proves_who_calls(tmp_path: Path) -> None:
    table = tmp_path / "tokens.yaml"
    table.write_text("tokens:\n  - {token: secret-secret-secret, role: admin, tenant: '*'}\n")
    mine = tmp_path / "token"
    mine.write_text("secret-secret-secret\n")
    async with fake_gateway(tokens=TokenTable.load(table)) as gateway:
        async with Router(gateway.address, timeout_seconds=10) as anonymous:
            with pytest.raises(errors.Unauthenticated):
                await anonymous.status()
        async with Router(gateway.address, security=ClientSecurity(token_file=mine), timeout_seconds=10) as known:
            assert (await known.status()).version == "1.2.3"


async def test_tls_checks_the_gateways_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
    credentials = grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)])
    async with (
        fake_gateway(add_port=lambda server: server.add_secure_port("127.0.0.1:0", credentials)) as gateway,
        Router(gateway.address, security=ClientSecurity(ca=ca), timeout_seconds=10) as router,
    ):
        assert (await router.status()).version == "1.2.3"
