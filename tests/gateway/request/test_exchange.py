"""Exchanges: attempts are tried, charged and freed, however they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, cast

import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client import CollectorRegistry
from support.scripted_engine import Script, answer, begin, drop, hang, refuse, scripted_engine, send_tokens

from kvscout.v1 import gateway_pb2
from kvscout_common.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.http.dialect import Usage
from kvscout_common.http.factory import connect
from kvscout_common.http.http import HttpAnswer, Sink, SinkGone
from kvscout_common.worker import EngineKind, Role, WorkerRank, WorkerSpec
from kvscout_gateway.engines.engine_call import Engines
from kvscout_gateway.engines.faults import EngineFailed, Fault, failure_behind
from kvscout_gateway.engines.health import WorkerHealth
from kvscout_gateway.engines.observation import Observations
from kvscout_gateway.engines.timeouts import EngineTimeouts
from kvscout_gateway.engines.vllm import VllmAdapter
from kvscout_gateway.fronts.refusals import status_of
from kvscout_gateway.request.attempt import Attempt, AttemptContext, Reply
from kvscout_gateway.request.exchange import MAX_UNREACHABLE, Exchange, Exchanges
from kvscout_gateway.request.failures import FailureLog
from kvscout_gateway.request.metrics import GatewayMetrics
from kvscout_gateway.request.plan import Aggregated, Plan
from kvscout_gateway.request.recent import RecentRequests
from kvscout_gateway.request.recording import Recording
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.prompt import Geometry, Prompt
from kvscout_gateway.values.request import Request, RequestBody, TokenBody

GONE = "http://127.0.0.1:9"
"""Nobody listens there."""
REQUEST = Request(model="m", tenant="default", prompt=Prompt(isl_tokens=2, token_ids=bytes(8)), request_id="r")


def body() -> TokenBody:
    return TokenBody({"max_tokens": 2})


class Upstreams:
    """A scheduler that places on the workers in turn, and notes what is booked and freed."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.log: list[str] = []
        self.output_tokens: list[int] = []
        """Of what was freed."""
        self.open: set[int] = set()

    def spec(self, index: int) -> WorkerSpec:
        return WorkerSpec(worker_id=f"w{index}", model="m", block_size=16, http_endpoint=self.urls[index])

    async def place(self, request: Request) -> Decision:
        for index in range(len(self.urls)):
            if f"w{index}" not in request.excluded:
                break
        else:
            raise Unavailable("nobody is left")
        await asyncio.sleep(0)
        self.log.append(f"book {request.role} w{index}")
        return Decision(
            "default",
            "m",
            WorkerRank(f"w{index}", 0),
            Geometry(16, eagle=False),
            b"",
            endpoint=self.urls[index],
            spec=self.spec(index),
            booking=Booking("default", "m", request.role, request.request_id, request.attempt_id),
        )

    def unroutable(self, request: Request) -> tuple[str, ...]:
        return ()

    def candidates(self, request: Request) -> list[WorkerSpec]:
        return [self.spec(index) for index in range(len(self.urls))]

    def dispatched(self, decision: Decision) -> None:
        self.log.append(f"send {decision.worker.worker_id}")

    def failed(self, decision: Decision) -> None:
        self.log.append(f"withdraw {decision.worker.worker_id}")

    def hold(self, booking: Booking) -> None:
        self.open.add(booking.attempt_id)

    def prefill_complete(self, booking: Booking) -> None:
        self.log.append("prefilled")

    def free(self, booking: Booking, output_tokens: int) -> None:
        self.output_tokens.append(output_tokens)
        self.open.remove(booking.attempt_id)


class Client:
    """A reply that keeps what it is given."""

    def __init__(self, gone_after: int | None = None) -> None:
        self.decisions: list[str] = []
        self.bodies: list[bytes] = []
        self._gone_after = gone_after

    async def placed(self, decision: Decision) -> None:
        self.decisions.append(decision.worker.worker_id)

    async def begin(self, answer: HttpAnswer) -> Sink:
        return self

    async def write(self, data: bytes) -> None:
        if len(self.bodies) == self._gone_after:
            raise SinkGone
        self.bodies.append(data)

    @property
    def token_ids(self) -> list[int]:
        return [token for body in self.bodies for token in gateway_pb2.GenerateResponse.FromString(body).token_ids]


class World:
    """Exchanges between helpers and engines of this process."""

    def __init__(self, upstreams: Upstreams, engines: Engines) -> None:
        self.upstreams = upstreams
        self.reported: list[tuple[str, Fault]] = []
        self.plan: Plan = Aggregated()
        fake = cast(Any, upstreams)
        self.recording = Recording(time.perf_counter)
        self.recent = RecentRequests(time.perf_counter)
        self.context = AttemptContext(
            routing=fake,
            scheduler=fake,
            engines=engines,
            adapters={EngineKind.VLLM: VllmAdapter()},
            observations=Observations(lambda tenant, worker_id: "m"),
            health=WorkerHealth(),
            metrics=GatewayMetrics(CollectorRegistry()),
            recording=self.recording,
            recent=self.recent,
        )
        self.exchanges = Exchanges(
            self.context,
            plan=lambda request: self.plan,
            report_failure=lambda tenant, decision, error, seconds: self.reported.append(
                (decision.worker.worker_id, error.fault)
            ),
            failure_log=FailureLog(status_of),
            draw_attempt=lambda: 256,
            migration_limit=1,
            max_in_flight=2,
            lease_seconds=300,
        )

    async def run(self, client: Client | None = None, body_sent: RequestBody | None = None, **fields: Any) -> Client:
        client = client or Client()
        with self.exchanges.begin(
            replace(REQUEST, **{"prompt": replace(REQUEST.prompt), "body": body_sent or body(), **fields})
        ) as exchange:
            await exchange.run(client)
        return client

    def assert_over(self) -> None:
        assert not self.upstreams.open
        assert self.exchanges.in_flight == 0
        assert self.exchanges.idle.is_set()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    engines = Engines(connect(), EngineTimeouts(), client_write_seconds=5.0)
    made = World(Upstreams(), engines)
    try:
        yield made
    finally:
        await engines.close()
        made.assert_over()


@pytest_asyncio.fixture
async def serve(world: World) -> AsyncIterator[Callable[..., Any]]:
    """Makes the workers w0, w1, …, one a script."""
    async with AsyncExitStack() as stack:

        async def start(*scripts: Script) -> None:
            for script in scripts:
                world.upstreams.urls.append((await stack.enter_async_context(scripted_engine(script))).url)

        yield start


async def one_token_then_drop(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = await begin(request)
    await send_tokens(response, 7)
    return await drop(request, body)


async def test_a_leg_is_booked_sent_told_of_its_first_token_and_freed(world: World, serve: Any) -> None:
    await serve(answer)
    client = await world.run()
    assert client.token_ids == [1, 2]
    assert world.upstreams.log == ["book aggregated w0", "send w0", "prefilled"]
    assert world.upstreams.output_tokens == [2]


async def test_what_fails_before_the_client_has_a_byte_is_tried_elsewhere(world: World, serve: Any) -> None:
    await serve(drop, answer)
    client = await world.run()
    assert (client.decisions, client.token_ids) == (["w0", "w1"], [1, 2])
    assert world.upstreams.log[:3] == ["book aggregated w0", "send w0", "withdraw w0"]
    assert world.reported == [("w0", Fault.WORKER)]


async def test_workers_that_die_in_turns_cost_no_request_as_long_as_one_lives(world: World, serve: Any) -> None:
    lives = 1

    def mortal(index: int) -> Script:
        async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await (answer if index == lives else drop)(request, body)

        return script

    await serve(mortal(0), mortal(1))
    for lives in (1, 0, 1, 0):
        for _ in range(8):
            client = await world.run()
            assert (client.token_ids, client.decisions[-1]) == ([1, 2], f"w{lives}")


async def test_engines_that_cannot_be_reached_cost_no_request_its_other_try(world: World, serve: Any) -> None:
    world.upstreams.urls += [GONE] * 3
    await serve(drop, answer)
    client = await world.run()
    assert (client.decisions, client.token_ids) == ([f"w{index}" for index in range(5)], [1, 2])
    assert world.reported == [(f"w{index}", Fault.WORKER) for index in range(4)]


@pytest.mark.parametrize(("limit", "pinned", "tries"), [(1, False, 2 + MAX_UNREACHABLE), (0, False, 1), (1, True, 1)])
async def test_a_request_meets_only_so_many_engines_that_cannot_be_reached(
    world: World, limit: int, pinned: str, tries: int
) -> None:
    world.exchanges.migration_limit = limit
    world.upstreams.urls += [GONE] * (MAX_UNREACHABLE + 5)
    client = Client()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await world.run(client, pinned=pinned)
    assert len(client.decisions) == tries


async def test_what_was_asked_is_kept_until_the_client_has_output_and_no_longer(world: World, serve: Any) -> None:
    kept: list[bytes] = []
    prompt = replace(REQUEST.prompt)

    class Looks(Client):
        async def placed(self, decision: Decision) -> None:
            kept.append(prompt.token_ids)

        async def write(self, data: bytes) -> None:
            kept.append(prompt.token_ids)

    await serve(drop, answer)
    await world.run(Looks(), prompt=prompt)
    assert kept[:3] == [bytes(8), bytes(8), b""]
    assert prompt.isl_tokens == 2


async def test_what_fails_after_that_is_not(world: World, serve: Any) -> None:
    await serve(one_token_then_drop, answer)
    client = Client()
    with pytest.raises(InternalError, match="after its first token") as failed:
        await world.run(client)
    assert client.decisions == ["w0"]
    behind = failure_behind(failed.value)
    assert behind is not None
    assert behind.fault is Fault.WORKER


async def test_a_client_learns_what_the_engine_answered(world: World, serve: Any) -> None:
    await serve(refuse(400, "too long"), answer)
    with pytest.raises(InvalidArgument, match="too long") as failed:
        await world.run()
    behind = failure_behind(failed.value)
    assert behind is not None
    assert behind.answer is not None
    assert (behind.answer[0], b"too long" in behind.answer[2]) == (400, True)
    assert not world.reported


async def test_a_client_that_goes_is_no_failure_of_anybody(world: World, serve: Any) -> None:
    await serve(answer)
    with pytest.raises(SinkGone):
        await world.run(Client(gone_after=0))
    assert (world.reported, world.exchanges.failures) == ([], 0)


async def test_an_answer_that_comes_at_once_can_break_off_and_be_had_elsewhere(world: World, serve: Any) -> None:
    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"usage": ')
        return await drop(request, body)

    async def whole(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        usage = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
        return web.json_response({"choices": [], "usage": usage})

    await serve(half, whole)
    client = await world.run(body_sent=replace(body(), whole_answer=True))
    assert client.decisions == ["w0", "w1"]
    assert len(client.bodies) == 1
    assert world.context.observations.of("default", WorkerRank("w1", 0)).reports.cached_tokens == 1


async def test_an_answer_that_takes_too_long_as_a_whole_ends_there_and_is_nobodys_failure(
    world: World, serve: Any
) -> None:
    world.context.engines.timeouts = EngineTimeouts(answer_seconds=0.1)
    await serve(hang, answer)
    client = Client()
    with pytest.raises(DeadlineExceeded, match="not complete after"):
        await world.run(client, body_sent=replace(body(), whole_answer=True))
    assert client.decisions == ["w0"], "another engine needs as long"
    assert not world.reported
    assert world.context.observations.of("default", WorkerRank("w0", 0)).failures == 0


@pytest.mark.parametrize("whole_answer", [True, False])
async def test_what_waits_for_an_engine_that_is_lost_is_had_elsewhere(
    world: World, serve: Any, whole_answer: bool
) -> None:
    liveness = world.context.observations.of("default", WorkerRank("w0", 0)).liveness

    async def lost(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        liveness.lose("does not answer", asyncio.get_running_loop().time())
        return await hang(request, body)

    async def whole(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": []}) if whole_answer else await answer(request, body)

    await serve(lost, whole)
    client = await world.run(body_sent=replace(body(), whole_answer=whole_answer))
    assert client.decisions == ["w0", "w1"]
    assert world.reported == [("w0", Fault.WORKER)]


async def test_a_front_that_sends_a_leg_itself_tells_what_happens(world: World, serve: Any) -> None:
    await serve(answer, answer)
    with world.exchanges.begin(REQUEST) as exchange:
        attempt = await exchange.place()
        attempt.sent()
        attempt.first_output()
        attempt.first_output()
        attempt.ended(Usage(2, 0))
        assert len(world.upstreams.open) == 1
        attempt.free()
        attempt.free()
        again = await exchange.place(replace(exchange.request, excluded=("w0",)))
        again.sent()
        exchange.failed(again, EngineFailed("gone"), is_answer=False)
    assert world.upstreams.log.count("prefilled") == 1
    assert (world.reported, again.decision.worker.worker_id) == ([("w1", Fault.WORKER)], "w1")


class PrefillFirst:
    """A plan of two attempts: what the first one answers goes with the second."""

    async def run(self, exchange: Exchange, reply: Reply) -> None:
        async def prefill(attempt: Attempt) -> None:
            async for _ in (await attempt.send()).chunks():
                pass

        async def decode(attempt: Attempt) -> None:
            await exchange.run_attempts(replace(exchange.request, role=Role.PREFILL), prefill)
            await attempt.relay(await attempt.send(), reply)

        await exchange.run_attempts(replace(exchange.request, role=Role.DECODE), decode)

    async def place(self, exchange: Exchange) -> tuple[Attempt, Attempt | None]:
        raise NotImplementedError


async def test_legs_nest_and_each_has_its_own_tries(world: World, serve: Any) -> None:
    world.plan = PrefillFirst()
    times = iter(range(100))

    async def every_other(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (answer if next(times) % 2 else drop)(request, body)

    await serve(every_other, answer)
    client = await world.run()
    assert client.token_ids == [1, 2]
    booked = [line for line in world.upstreams.log if line.startswith("book")]
    assert booked == ["book decode w0", "book prefill w0", "book prefill w1"]


async def test_what_an_inner_leg_gives_up_on_is_not_the_outer_workers_failure(world: World, serve: Any) -> None:
    world.plan = PrefillFirst()
    await serve(drop, drop)
    with pytest.raises(Unavailable):
        await world.run()
    assert sorted(world.reported) == [("w0", Fault.WORKER), ("w1", Fault.WORKER)]


async def test_more_than_may_run_are_refused_as_is_everything_while_draining(world: World) -> None:
    with world.exchanges.begin(REQUEST), world.exchanges.begin(REQUEST):
        with pytest.raises(ResourceExhausted), world.exchanges.begin(REQUEST):
            pass
    world.exchanges.draining = True
    with pytest.raises(Draining), world.exchanges.begin(REQUEST):
        pass


async def test_whoever_names_no_request_id_gets_one(world: World) -> None:
    ids = {world.exchanges.begin(replace(REQUEST, request_id="")).request_id for _ in range(10)}
    assert len(ids) == 10
