"""What is picked for a request that names no model: any worker that answers clients, and well ones first. And what is
told of one that does: a first chunk is a first token only where output comes in chunks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.openai_stack import MODEL, front, scheduler_of, spec
from support.processes import eventually

from kvscout.v1 import indexer_pb2, types_pb2
from kvscout_common.errors import Unavailable
from kvscout_common.http.json_fields import Fields
from kvscout_common.worker import DEFAULT_TENANT, Role, WorkerRank, WorkerSpec
from kvscout_gateway.engines.health import MIN_FAILURES
from kvscout_gateway.fronts.endpoint_picker import wire
from kvscout_gateway.fronts.endpoint_picker.config import EndpointPickerConfig
from kvscout_gateway.fronts.endpoint_picker.exchange_picker import ExchangePicker, PickerMetrics
from kvscout_gateway.fronts.endpoint_picker.pick_request import PickRequest
from kvscout_gateway.fronts.sessions import Sessions
from kvscout_gateway.gateway import Gateway
from kvscout_gateway.request.failures import FailureFilter
from kvscout_gateway.upstreams.indexer.overlaps import AnsweredRows
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.decision import Choice
from kvscout_gateway.values.output import Output
from kvscout_gateway.values.overlaps import Overlaps
from kvscout_gateway.values.request import Request

PICKS = 40


def worker(number: int, **fields: Any) -> WorkerSpec:
    return spec(f"w{number}", f"http://10.0.0.{number}:8000", **fields)


def address(number: int) -> str:
    return f"10.0.0.{number}:8000"


@asynccontextmanager
async def picker(*workers: WorkerSpec, fallbacks: int = 2) -> AsyncIterator[tuple[ExchangePicker, Gateway]]:
    config = EndpointPickerConfig(0, tenant=DEFAULT_TENANT, fallbacks=fallbacks)
    async with front(*workers) as served:
        counts = PickerMetrics(CollectorRegistry())
        yield ExchangePicker(served.gateway.front_context, config, counts, draw=random.Random()), served.gateway


async def picked(one: ExchangePicker, subset: tuple[str, ...] | None = None) -> list[str]:
    """The endpoints that a request without a model gets, in order of preference."""
    pick = await one.pick(PickRequest("", "/v1/models", subset=subset))
    return pick.headers[wire.DESTINATION].split(",")


async def test_what_names_no_model_goes_to_workers_that_answer_clients_only() -> None:
    apart = (worker(1, role=Role.PREFILL), worker(2, role=Role.DECODE))
    async with picker(*apart, worker(3), worker(4, model="other")) as (one, _):
        seen = [await picked(one) for _ in range(PICKS)]
        assert {endpoint for endpoints in seen for endpoint in endpoints} == {address(3), address(4)}
        assert {endpoints[0] for endpoints in seen} == {address(3), address(4)}
        with pytest.raises(Unavailable):
            await picked(one, (address(1),))
    async with picker(*apart) as (one, _):
        assert [await picked(one) for _ in range(PICKS)] == [[address(2)]] * PICKS
    async with picker(apart[0]) as (one, _):
        with pytest.raises(Unavailable):
            await picked(one)


async def test_what_names_no_model_goes_to_a_failing_worker_last() -> None:
    workers = [worker(1), worker(2), worker(3)]
    async with picker(*workers) as (one, gateway):
        for _ in range(MIN_FAILURES):
            gateway.health.failed((DEFAULT_TENANT, WorkerRank("w1", 0)), workers)
        seen = [await picked(one) for _ in range(PICKS)]
        assert {endpoints[-1] for endpoints in seen} == {address(1)}
        assert {endpoints[0] for endpoints in seen} == {address(2), address(3)}
        # Where the proxy allows no other, it is asked all the same.
        assert await picked(one, (address(1),)) == [address(1)]


async def test_a_worker_s_address_is_named_once_and_no_more_than_are_wanted() -> None:
    workers = [worker(1), worker(2), worker(3), spec("same", "http://10.0.0.1:8000")]
    async with picker(*workers, fallbacks=1) as (one, _):
        for _ in range(PICKS):
            endpoints = await picked(one)
            assert len(endpoints) == len(set(endpoints)) == 2


def generation(*, stream: bool, shows_output: bool = True) -> PickRequest:
    """A completion, as a proxy shows it."""
    body = {"model": MODEL, "prompt": [1] * 40, "max_tokens": 4096, "stream": stream}
    fields = Fields.scanned(json.dumps(body).encode())
    headers = {"x-session-id": "s"}.items()
    return PickRequest(MODEL, "/v1/completions", fields, size=100, headers=headers, shows_output=shows_output)


def booked(gateway: Gateway) -> Booking:
    (one,) = scheduler_of(gateway).bookings.in_flight()
    return one


@pytest.mark.parametrize(
    ("streams", "in_chunks", "seen"),
    [(True, True, True), (False, False, False), (True, None, True), (False, None, False), (True, False, False)],
)
async def test_the_first_piece_of_an_answer_that_comes_whole_is_no_first_token(
    streams: bool, in_chunks: bool | None, seen: bool
) -> None:
    async with picker(worker(1)) as (one, gateway):
        pick = await one.pick(generation(stream=streams))
        booking = booked(gateway)
        assert (booking.output.max_tokens, booking.output.expected_tokens) == (4096, 0)
        assert (booking.output.output_class, booking.output.unseen) == ("completions", not streams)
        assert booking.session_id == Sessions().named(DEFAULT_TENANT, "s").session_id
        pick.answering(200, "", in_chunks)
        pick.first_output(b"")
        assert booking.prefilled is seen
        pick.ended({})
        assert not scheduler_of(gateway).bookings.in_flight()


async def test_of_what_is_left_to_its_proxy_nobody_claims_to_have_seen_a_first_token() -> None:
    async with picker(worker(1)) as (one, gateway):
        one.prefill_seconds = lambda attempt: 0.0  # type: ignore[method-assign]
        pick = await one.pick(generation(stream=True, shows_output=False))
        booking = booked(gateway)
        assert booking.output.unseen
        pick.left()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not booking.prefilled
        one.forget()


async def test_the_proxy_names_the_engine_to_fetch_blocks_from() -> None:
    here, there = (worker(number, labels={"kv_source": f"10.0.0.{number}:5710"}) for number in (1, 2))
    async with picker(here, there) as (one, gateway):

        async def chosen(request: Request, overlaps: Overlaps, *_: Any, **__: Any) -> tuple[Choice, Overlaps]:
            message = types_pb2.Overlaps(worker_ids=["w2"], device_blocks=[2])
            rows = AnsweredRows([indexer_pb2.FindMatchesResponse(overlaps=message)])
            found = replace(overlaps, rows=dict.fromkeys(overlaps.hashes, rows))
            return Choice(WorkerRank("w1", 0), f"http://{address(1)}", 16, 0, 0.0, 40, 0.0, None), found

        gateway.scheduler.reserve = chosen  # type: ignore[method-assign]
        pick = await one.pick(generation(stream=True))
        assert pick.headers["x-kv-cache-source-host-port"] == "10.0.0.2:5710"
        pick.over()


async def test_what_runs_where_the_proxy_sent_it_is_booked_as_what_runs() -> None:
    async with picker(worker(1), worker(2)) as (one, gateway):
        reserved: list[tuple[Request, Booking | None]] = []

        async def chosen(
            request: Request, overlaps: Overlaps, booking: Booking | None, **_: Any
        ) -> tuple[Choice, Overlaps]:
            reserved.append((request, booking))
            worker_id = request.pinned or "w1"
            endpoint = f"http://{address(int(worker_id[1:]))}"
            return Choice(WorkerRank(worker_id, 0), endpoint, 16, 0, 0.0, 24, 0.0, None), overlaps

        gateway.scheduler.reserve = chosen  # type: ignore[method-assign]
        pick = await one.pick(generation(stream=True))
        first = booked(gateway)
        pick.answering(200, address(2), True)
        pick.first_output(b"")

        async def moved() -> bool:
            return [one.worker for one in scheduler_of(gateway).bookings.in_flight()] == [WorkerRank("w2", 0)]

        await eventually(moved, what="a booking where it runs")
        (_, wanted), (request, found) = reserved
        assert wanted is not None
        assert (request.pinned, found) == ("w2", None), "a place is only looked up"
        again = booked(gateway)
        # No scheduler has it: it is booked there as what `attachment` finds running.
        assert again.scheduler is None
        message = again.reserve_request()
        assert (message.request_id, message.running, message.prefill_complete) == (first.request_id, True, True)
        assert message.attempt_id != first.attempt_id
        assert (message.isl_tokens, message.cached_tokens, message.max_output_tokens) == (40, 16, 4096)
        pick.ended({})
        assert not scheduler_of(gateway).bookings.in_flight()


async def test_an_embedding_ends_with_what_would_be_its_first_token() -> None:
    async with picker(worker(1)) as (one, gateway):
        for account, output_tokens in (({"prompt_tokens": 3, "total_tokens": 3}, 1), ({}, 0), (None, 0)):
            fields = Fields.scanned(json.dumps({"model": MODEL, "input": "hello"}).encode())
            pick = await one.pick(PickRequest(MODEL, "/v1/embeddings", fields, size=100))
            booking = booked(gateway)
            assert booking.output == Output(1, 1, "embeddings", unseen=True)
            pick.ended(account)
            assert booking.output_tokens == output_tokens


@pytest.mark.parametrize(
    ("account", "output_tokens"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 7}, 7),
        ({"input_tokens": 3, "output_tokens": 9}, 9),
        ({"output_tokens": -1}, 0),
        ({}, 0),
        (None, 0),
    ],
)
async def test_the_length_of_an_output_is_told_whatever_is_known_of_its_prompt(
    account: dict[str, Any] | None, output_tokens: int
) -> None:
    async with picker(worker(1)) as (one, gateway):
        fields = Fields.scanned(json.dumps({"model": MODEL, "input": "hello", "max_output_tokens": 50}).encode())
        pick = await one.pick(PickRequest(MODEL, "/v1/responses", fields, size=100))
        booking = booked(gateway)
        assert booking.output == Output(0, 50, "responses", unseen=True)
        pick.ended(account)
        assert booking.output_tokens == output_tokens


@pytest.mark.parametrize("shows_output", [True, False])
async def test_the_end_of_a_prefill_leg_is_its_first_token_unless_nobody_tells_of_it(shows_output: bool) -> None:
    async with picker(worker(1, role=Role.PREFILL), worker(2, role=Role.DECODE)) as (one, gateway):
        pick = await one.pick(generation(stream=True, shows_output=shows_output))
        by_worker = {held.worker.worker_id: held.output for held in scheduler_of(gateway).bookings.in_flight()}
        assert by_worker == {
            "w1": Output(1, 1, "", unseen=not shows_output),
            "w2": Output(0, 4096, "completions", unseen=not shows_output),
        }
        pick.aborted()
        assert not scheduler_of(gateway).bookings.in_flight()


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens"])
async def test_what_counts_tokens_goes_to_any_worker_of_the_model_that_answers_and_is_not_booked(path: str) -> None:
    workers = (worker(1, role=Role.PREFILL), worker(2), worker(3), worker(4, model="other"))
    async with picker(*workers) as (one, gateway):
        seen = set()
        for _ in range(PICKS):
            pick = await one.pick(PickRequest(MODEL, path, size=100, method="POST"))
            seen.add(pick.headers[wire.DESTINATION].split(",")[0])
            assert not scheduler_of(gateway).bookings.in_flight()
            pick.ended({})
        assert seen == {address(2), address(3)}


def continuing(response_id: str, subset: tuple[str, ...] | None = None) -> PickRequest:
    """A request for a response that continues another one."""
    body = {"model": MODEL, "input": "hello", "previous_response_id": response_id}
    return PickRequest(MODEL, "/v1/responses", Fields.scanned(json.dumps(body).encode()), size=100, subset=subset)


async def test_a_response_is_continued_and_read_where_it_was_seen_to_be_made() -> None:
    async with picker(worker(1), worker(2), worker(3)) as (one, gateway):
        for number in range(6):
            body = Fields.scanned(json.dumps({"model": MODEL, "input": "hello", "stream": True}).encode())
            pick = await one.pick(PickRequest(MODEL, "/v1/responses", body, size=100))
            made_at = pick.headers[wire.DESTINATION].split(",")[0]
            pick.answering(200, made_at, True)
            name = f"resp_{number}"
            pick.first_output(b'event: response.created\ndata: {"response": {"id": "%s"}}\n\n' % name.encode())
            pick.ended({})
            again = await one.pick(continuing(name))
            assert again.headers[wire.DESTINATION] == made_at
            again.ended({})
            for method, below in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
                read = await one.pick(PickRequest("", f"/v1/responses/{name}{below}", method=method))
                assert read.headers == {wire.DESTINATION: made_at}
        assert not scheduler_of(gateway).bookings.in_flight()


async def test_what_continues_a_response_that_a_picker_saw_is_of_its_session() -> None:
    async with picker(worker(1), worker(2)) as (one, gateway):
        body = Fields.scanned(json.dumps({"model": MODEL, "input": "hello", "stream": True, "user": "u"}).encode())
        first = await one.pick(PickRequest(MODEL, "/v1/responses", body, size=100))
        first.first_output(b'event: response.created\ndata: {"response": {"id": "resp_1"}}\n\n')
        first.ended({})
        again = await one.pick(continuing("resp_1"))
        sessions = [booking.session_id for booking in scheduler_of(gateway).bookings.in_flight()]
        assert sessions == [gateway.front_context.sessions.of(DEFAULT_TENANT, (), body).session_id]
        again.ended({})


async def test_a_response_is_nowhere_else_whatever_the_proxy_allows() -> None:
    async with picker(worker(1), worker(2)) as (one, gateway):
        gateway.front_context.stored.learn(DEFAULT_TENANT, "resp_1", "w1")
        with pytest.raises(Unavailable, match="the proxy does not allow"):
            await one.pick(continuing("resp_1", (address(2),)))
        assert not scheduler_of(gateway).bookings.in_flight()


def listed(gateway: Gateway, *, answered: bool = False) -> list[tuple[str, str, tuple[str, ...], str]]:
    found, _ = gateway.failure_log.listed(FailureFilter(answered=answered), 10)
    return [(one.kind.cause, one.asked.front, one.worker_ids, one.status) for one in found]


async def test_what_an_engine_answered_through_the_proxy_is_its_failure() -> None:
    async with picker(worker(1)) as (one, gateway):
        for status, cause in ((503, "refused"), (422, "request")):
            pick = await one.pick(generation(stream=True))
            pick.answering(status, address(1), None)
            pick.ended(None)
            assert listed(gateway)[0] == (cause, "/v1/completions", ("w1",), str(status))
        found, _ = gateway.failure_log.listed(FailureFilter(), 10)
        assert all("10.0.0.1" not in each.message and "10.0.0.1" in each.detail for each in found)


async def test_a_request_that_the_proxy_sent_elsewhere_is_listed_as_answered() -> None:
    async with picker(worker(1), worker(2)) as (one, gateway):
        pick = await one.pick(generation(stream=True))
        first = pick.headers[wire.DESTINATION].partition(",")[0]
        (other,) = {address(1), address(2)} - {first}
        pick.answering(200, other, True)
        pick.ended(None)

        async def moved() -> bool:
            return any(cause == "worker" for cause, *_ in listed(gateway, answered=True))

        await eventually(moved, what="a request that the proxy moved")
        assert listed(gateway) == []


async def test_a_pick_that_cannot_be_made_is_a_failure_once() -> None:
    async with picker(worker(1)) as (one, gateway):
        with pytest.raises(Unavailable):
            await picked(one, (address(2),))
        assert listed(gateway) == [("unserved", "/v1/models", (), "503")]


async def test_a_pick_whose_time_is_over_is_no_client_that_went_away() -> None:
    async with picker(worker(1)) as (one, gateway):
        scheduler = scheduler_of(gateway)
        asked = asyncio.Event()

        async def hangs(*_: Any, **__: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        scheduler.reserve = hangs  # type: ignore[method-assign]
        picking = asyncio.create_task(one.pick(generation(stream=True)))
        await asked.wait()
        picking.cancel()
        await asyncio.wait([picking])
        assert listed(gateway) == []
        pick = await one.pick(generation(stream=True), without_upstreams=True)
        pick.aborted()
        assert [row[0] for row in listed(gateway)] == ["gone"]
