"""Generate over the real stack: what clients get, and that nothing stays booked whatever happens."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio
from aiohttp import web
from support.gateway_stack import (
    MODEL,
    Answer,
    GatewayClient,
    Stack,
    connected,
    fresh_prompt,
    mocker_worker,
    running_stack,
)
from support.grpc_relay import Relay
from support.mocker_process import MockerProcess
from support.processes import Running, eventually, running
from support.scripted_engine import (
    Script,
    ScriptedEngine,
    answer,
    begin,
    drop,
    hang,
    refuse,
    scripted_engine,
    send,
    send_tokens,
)
from support.seeds import test_seed

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.errors import Unavailable
from kvscout_common.rpc.channel import call, to_error

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLOW = ("--model", "slow", "--speedup", "1", "--step-base-ms", "150")
"""A step takes long enough to do something before the first token, and between two."""
_names = iter(f"scripted-{number}" for number in range(10_000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(each_mode: None) -> AsyncIterator[Stack]:
    mockers = (("--lora", "poet"), (), SLOW, ("--model", "ranks", "--dp-size", "2"))
    timeouts = ("--engine-idle-seconds", "2", "--engine-first-output-seconds", "2")
    async with running_stack(*timeouts, mockers=mockers, relay=True) as started:
        poet, _, slow, ranks = started.mockers
        register = started.client.register
        await register(mocker_worker("w0", poet, adapters=[workers_pb2.Adapter(name="poet")]))
        await register(mocker_worker("w2", slow, model="slow"))
        await register(mocker_worker("w3", ranks, model="ranks"))
        yield started


@pytest.fixture
def client(stack: Stack) -> GatewayClient:
    return stack.client


@pytest.fixture
def relay(stack: Stack) -> Relay | None:
    if stack.relay is not None:
        stack.relay.requests.clear()
    return stack.relay


@pytest.fixture
def slow(stack: Stack) -> MockerProcess:
    return stack.mockers[2]


async def cooling(client: GatewayClient, model: str) -> list[bool]:
    """Which worker ranks the scheduler leaves out."""
    loads = await call(client.scheduler.GetPotentialLoads, scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=model))
    return [load.cooldown_seconds > 0 for load in loads.loads]


async def failures(client: GatewayClient, model: str) -> list[int]:
    """What the gateway holds against each worker."""
    seen = {w.worker.worker_id: w.failures for w in (await client.status()).workers}
    return [seen.get(f"{model}/{index}", 0) for index in (0, 1)]


def frees(relay: Relay) -> Counter[tuple[str, int]]:
    """Free calls by request and attempt."""
    refs = [scheduler_pb2.FreeRequest.FromString(raw) for name, raw in relay.requests if name == "Free"]
    return Counter((ref.request_id, ref.attempt_id) for ref in refs)


def bookings(relay: Relay) -> Counter[tuple[str, int]]:
    """SelectAndReserve calls by request and attempt."""
    asked = [scheduler_pb2.SelectRequest.FromString(raw) for name, raw in relay.requests if name == "SelectAndReserve"]
    return Counter((request.request_id, request.attempt_id) for request in asked)


async def until_freed_once(client: GatewayClient, relay: Relay | None, note: str = "") -> None:
    """Waits until every booking that was asked for was freed, which may be after its client has gone.

    One that was cancelled on its way may be freed without having come. In one process loads alone show it.
    """

    async def freed() -> bool:
        return relay is None or bookings(relay).keys() <= frees(relay).keys()

    await eventually(freed, what="every booking to be freed")
    await client.until_idle()
    if relay is not None:
        assert set(frees(relay).values()) == {1}, note


async def until_not_running(mocker: MockerProcess) -> None:
    """Waits until an engine runs nothing."""

    async def nothing() -> bool:
        samples = await mocker.metrics()
        return not any(value for name, value in samples.items() if name.startswith("vllm:num_requests_"))

    await eventually(nothing, what="the engine to run nothing")


async def until_running(mocker: MockerProcess) -> None:
    """Waits until an engine runs something."""

    async def something() -> bool:
        samples = await mocker.metrics()
        return any(value for name, value in samples.items() if name.startswith("vllm:num_requests_running"))

    await eventually(something, what="the engine to run something")


@asynccontextmanager
async def workers(client: GatewayClient, *scripts: Script) -> AsyncIterator[tuple[str, list[ScriptedEngine]]]:
    """Workers of a model of their own, "model/0", "model/1", …; only those before it that failed come later."""
    model = next(_names)
    async with scripted_engine(scripts[0]) as first, scripted_engine(scripts[-1]) as last:
        engines = [first, last][: len(scripts)]
        for index, engine in enumerate(engines):
            await client.register(
                workers_pb2.Worker(worker_id=f"{model}/{index}", model=model, block_size=16, http_endpoint=engine.url)
            )
        if len(engines) > 1:  # load on the last one: the first one is chosen first
            await client.route(fresh_prompt(16_000), model=model, pinned_worker_id=f"{model}/1", request_id=model)
        try:
            yield model, engines
        finally:
            await call(client.stub.Free, scheduler_pb2.FreeRequest(model=model, request_id=model))
            await client.until_idle(model)


async def rest(running_call: Any, answer: Answer) -> None:
    """Reads a call to its end."""
    while (message := await running_call.read()) is not grpc.aio.EOF:
        answer.add(message)


async def failing(generating: Awaitable[Any], code: grpc.StatusCode, details: str) -> None:
    """Expects a status."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await generating
    assert failed.value.code() is code, failed.value
    assert details in (failed.value.details() or "")


async def test_tokens_and_usage_are_those_of_the_engine(stack: Stack, client: GatewayClient) -> None:
    prompt = fresh_prompt(100)
    direct = await stack.mockers[1].complete(prompt.tolist(), max_tokens=20, return_token_ids=True)
    got = await client.generate(prompt, max_tokens=20, pinned_worker_id="w1")
    assert got.token_ids == direct["choices"][0]["token_ids"]
    assert got.usage == gateway_pb2.Usage(prompt_tokens=100, completion_tokens=20, cached_tokens=96)
    assert got.finish_reason == gateway_pb2.FINISH_REASON_LENGTH
    assert (got.route.worker.worker_id, len(got.routes)) == ("w1", 1)
    assert got.request_id.startswith("gen-")
    await client.until_idle()


async def test_adapters_and_salts_reach_the_engine(client: GatewayClient) -> None:
    prompt = fresh_prompt(64)
    cached = []
    variants: list[dict[str, Any]] = [
        {},
        {"lora_name": "poet"},
        {"model": "poet"},
        {"cache_salt": "s"},
        {"cache_salt": "s"},
        {},
    ]
    for fields in variants:
        got = await client.generate(prompt, pinned_worker_id="w0", **fields)
        assert got.usage is not None
        cached.append(got.usage.cached_tokens)
    assert cached == [0, 0, 48, 0, 48, 48]


async def test_the_chosen_rank_runs_the_request(client: GatewayClient) -> None:
    prompts = [fresh_prompt(64), fresh_prompt(64)]
    for rank, prompt in enumerate(prompts):
        await client.generate(prompt, model="ranks", pinned_worker_id="w3", pinned_dp_rank=rank)
        await client.until_indexed(prompt, 4, model="ranks")
    await client.until_idle("ranks")
    for rank, prompt in enumerate(prompts):
        got = await client.generate(prompt, model="ranks")
        assert (got.route.worker.dp_rank, got.route.overlap_blocks) == (rank, 4)
        assert got.usage is not None
        assert got.usage.cached_tokens == 48
        await client.until_idle("ranks")


async def test_a_request_id_can_be_used_again_when_it_has_ended_not_before(
    client: GatewayClient, slow: MockerProcess
) -> None:
    for _ in range(3):
        assert (await client.generate([1, 2, 3], request_id="again")).request_id == "again"
        await client.until_idle()
    first = client.start([1] * 20, model="slow", request_id="taken", max_tokens=30)
    await until_running(slow)
    await failing(client.generate([1] * 20, model="slow", request_id="taken"), grpc.StatusCode.ALREADY_EXISTS, "active")
    assert len([message async for message in first]) >= 2
    await client.until_idle("slow")


def report_in_stream(**error: Any) -> Script:
    """As vLLM tells of an error once its answer has begun: inside a 200."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send(response, error=error)
        await response.write(b"data: [DONE]\n\n")
        return response

    return script


TOO_LONG = report_in_stream(message="too long", type="BadRequestError", code=400)


@pytest.mark.parametrize("script", [refuse(400, "too long"), refuse(409, "too long"), TOO_LONG])
async def test_ten_bad_requests_leave_every_worker_in_and_are_tried_once(client: GatewayClient, script: Script) -> None:
    async with workers(client, script, answer) as (model, engines):
        for _ in range(10):
            await failing(client.generate([1], model=model), grpc.StatusCode.INVALID_ARGUMENT, "too long")
        assert [len(engine.requests) for engine in engines] == [10, 0]
        assert await cooling(client, model) == [False, False]
        assert await failures(client, model) == [0, 0]


@pytest.mark.parametrize("script", [refuse(500, "cuda"), refuse(404, "?"), report_in_stream(message="?", code=500)])
async def test_ten_requests_that_no_engine_runs_are_held_against_none(client: GatewayClient, script: Script) -> None:
    async with workers(client, script, script) as (model, engines):
        for _ in range(10):
            await failing(client.generate([1], model=model), grpc.StatusCode.UNAVAILABLE, "")
        assert [len(engine.requests) for engine in engines] == [10, 10]
        assert await cooling(client, model) == [False, False]
        assert await failures(client, model) == [0, 0]


@pytest.mark.parametrize(
    "script",
    [
        drop,
        pytest.param(hang, marks=pytest.mark.services_only),
        refuse(503, "no upstream"),
        refuse(401, "no key"),
        refuse(404, "?"),
        refuse(500, "cuda"),
    ],
)
async def test_a_worker_that_fails_what_others_run_is_replaced_and_left_out_at_the_third_time(
    client: GatewayClient, script: Script
) -> None:
    async with workers(client, script, answer) as (model, engines):
        for number in (1, 2, 3):
            got = await client.generate([1, 2], model=model, max_tokens=3)
            assert [route.worker.worker_id for route in got.routes] == [f"{model}/0", f"{model}/1"]
            assert got.token_ids == [1, 2, 3]
            assert await failures(client, model) == [number, 0]
            if number < 3:
                assert await cooling(client, model) == [False, False]
        got = await client.generate([1, 2], model=model, max_tokens=3)
        assert [route.worker.worker_id for route in got.routes] == [f"{model}/1"]

        async def told() -> bool:
            return await cooling(client, model) == [True, False]

        await eventually(told, what="the scheduler told")
        assert len(engines[0].requests) == 3
        # The last one is kept, whatever it does; what fails there has nobody but the first one.
        engines[1].script = drop
        for _ in range(2):
            await failing(client.generate([1], model=model), grpc.StatusCode.UNAVAILABLE, "")
        assert await cooling(client, model) == [True, False]
        assert [len(engine.requests) for engine in engines] == [5, 6]
        # One request, and it is seen that the first one is well again.
        engines[0].script = answer
        for _ in range(8):
            assert (await client.generate([1, 2], model=model, max_tokens=3)).token_ids == [1, 2, 3]


async def test_two_failures_are_unavailable(client: GatewayClient) -> None:
    async with workers(client, drop, drop) as (model, _):
        await failing(client.generate([1], model=model), grpc.StatusCode.UNAVAILABLE, "")
    async with workers(client, drop) as (model, engines):
        await failing(client.generate([1], model=model), grpc.StatusCode.UNAVAILABLE, "not tried elsewhere")
    async with workers(client, drop, answer) as (model, engines):
        pinned = client.generate([1], model=model, pinned_worker_id=f"{model}/0")
        await failing(pinned, grpc.StatusCode.UNAVAILABLE, "")
        assert not engines[1].requests


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_says_how_long_it_is_busy_is_left_alone_and_is_well(
    client: GatewayClient, status: int
) -> None:
    async with workers(client, refuse(status, "busy", **{"Retry-After": "100"}), answer) as (model, engines):
        for _ in range(5):
            await client.generate([1], model=model, max_tokens=1)
        assert [len(engine.requests) for engine in engines] == [1, 5]
        assert await cooling(client, model) == [False, False]
        assert await failures(client, model) == [0, 0]


async def test_where_every_engine_is_busy_the_client_is_told_when_to_come_again(client: GatewayClient) -> None:
    async with workers(client, refuse(429, "busy", **{"Retry-After": "7"})) as (model, _):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.generate([1], model=model)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata() or ())["retry-after"] == "7"


async def test_what_an_engine_puts_out_past_max_tokens_reaches_nobody(client: GatewayClient) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await send_tokens(response, 7, 7)
            await asyncio.sleep(0.001)

    async with workers(client, endless) as (model, [engine]):
        got = await client.generate([1], model=model, max_tokens=5)
        assert (got.token_ids, got.finish_reason) == ([7] * 5, gateway_pb2.FINISH_REASON_LENGTH)
        await eventually(lambda: engine.aborted == 1)


async def test_a_worker_that_cannot_be_connected_to_is_replaced(client: GatewayClient) -> None:
    async with workers(client, answer, answer) as (model, _):
        unreachable = workers_pb2.Worker(
            worker_id=f"{model}/0", model=model, block_size=16, http_endpoint="http://127.0.0.1:1"
        )
        await client.register(unreachable)
        assert [r.worker.worker_id[-2:] for r in (await client.generate([1], model=model)).routes] == ["/0", "/1"]


def then_break(how: Callable[[web.Request, web.StreamResponse], Awaitable[None]]) -> Script:
    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 7)
        await how(request, response)
        return response

    return script


async def die(request: web.Request, response: web.StreamResponse) -> None:
    assert request.transport is not None
    request.transport.abort()


async def report(request: web.Request, response: web.StreamResponse) -> None:
    await send(response, error={"message": "out of memory", "code": 500})


async def talk_nonsense(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(b"data: {nonsense\n\n")


async def stop_early(request: web.Request, response: web.StreamResponse) -> None:
    await response.write_eof()


async def fall_silent(request: web.Request, response: web.StreamResponse) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("how", "details"),
    [
        (die, "failed after its first token"),
        (report, "out of memory"),
        (talk_nonsense, "makes no sense"),
        (stop_early, "broke off"),
        (fall_silent, "failed after its first token"),
    ],
)
async def test_an_engine_that_fails_later_is_an_error_and_frees(
    client: GatewayClient, how: Callable[[web.Request, web.StreamResponse], Awaitable[None]], details: str
) -> None:
    async with workers(client, then_break(how), answer) as (model, engines):
        got = Answer()

        async def collect() -> None:
            async for message in client.start([1], model=model):
                got.add(message)

        await failing(collect(), grpc.StatusCode.INTERNAL, details)
        assert got.token_ids == [7]
        assert not engines[1].requests


async def test_what_the_client_asked_for_reaches_the_engine_under_vllms_names(client: GatewayClient) -> None:
    async with workers(client, answer) as (model, [engine]):
        request = gateway_pb2.GenerateRequest(
            model=model,
            token_ids=[5, 6],
            request_id="named",
            stop_conditions=gateway_pb2.StopConditions(
                max_tokens=2, min_tokens=1, stop=["x"], stop_token_ids=[9], ignore_eos=True
            ),
            sampling_options=gateway_pb2.SamplingOptions(temperature=0.5, top_k=-1, seed=3),
            output_options=gateway_pb2.OutputOptions(skip_special_tokens=False),
            cache_salt="s",
        )
        async for _ in client.stub.Generate(request):
            pass
        assert engine.requests == [
            {
                "prompt": [5, 6],
                "model": model,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                "max_tokens": 2,
                "min_tokens": 1,
                "stop": ["x"],
                "stop_token_ids": [9],
                "ignore_eos": True,
                "temperature": 0.5,
                "top_k": -1,
                "seed": 3,
                "skip_special_tokens": False,
                "cache_salt": "s",
            }
        ]
        assert engine.headers[0]["X-Request-Id"] == "named"
        assert "X-data-parallel-rank" not in engine.headers[0]


async def test_where_a_request_runs_comes_with_its_first_token_and_where_it_failed_before(
    client: GatewayClient,
) -> None:
    async with workers(client, drop, answer) as (model, _):
        messages = [message async for message in client.start([1], model=model, max_tokens=2, request_id="told")]
        told = [(m.route.worker.worker_id[-2:], m.request_id, list(m.token_ids[:1])) for m in messages[:2]]
        assert told == [("/0", "told", []), ("/1", "told", [1])]


async def test_workers_that_the_gateway_cannot_drive_are_left_to_route(client: GatewayClient) -> None:
    async with workers(client, answer) as (model, _):
        await client.register(
            workers_pb2.Worker(
                worker_id=f"{model}/custom", model=model, block_size=16, engine=workers_pb2.ENGINE_KIND_CUSTOM
            )
        )
        assert {(await client.generate([1], model=model)).route.worker.worker_id for _ in range(4)} == {f"{model}/0"}
        assert (await client.route([1], model=model, pinned_worker_id=f"{model}/custom")).http_endpoint == ""
        pinned = client.generate([1], model=model, pinned_worker_id=f"{model}/custom")
        await failing(pinned, grpc.StatusCode.FAILED_PRECONDITION, "ask Route")


@pytest.mark.services_only
async def test_a_client_that_goes_before_dispatch_leaves_nothing(client: GatewayClient, relay: Relay) -> None:
    relay.hold("SelectAndReserve")
    try:
        running_call = client.start(fresh_prompt(100), request_id="early")
        reading = asyncio.ensure_future(running_call.read())
        await eventually(client.active)  # booked, and the answer on its way
        running_call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await client.until_idle()
    finally:
        relay.release("SelectAndReserve")
    await until_freed_once(client, relay)
    assert frees(relay) == bookings(relay)


@pytest.mark.parametrize("chunks", [0, 1, 2], ids=["before its first token", "after it", "in mid-stream"])
async def test_a_client_that_goes_away_frees_once_and_aborts_the_engine(
    client: GatewayClient, relay: Relay | None, slow: MockerProcess, chunks: int
) -> None:
    running_call = client.start(fresh_prompt(100), model="slow", max_tokens=100)
    for _ in range(chunks):
        await running_call.read()
    await until_running(slow)
    running_call.cancel()
    await client.until_idle("slow")
    await until_not_running(slow)
    await eventually(lambda: _none_in_flight(client))
    await until_freed_once(client, relay)
    assert relay is None or frees(relay) == bookings(relay)


async def _none_in_flight(client: GatewayClient) -> bool:
    return (await client.status()).in_flight == 0


async def test_clients_that_go_at_random_moments_leave_nothing(
    stack: Stack, client: GatewayClient, relay: Relay | None
) -> None:
    seed = test_seed()
    rng = random.Random(seed)

    async def impatient(timeouts: float) -> None:
        running_call = client.start(fresh_prompt(rng.randrange(1, 400)), max_tokens=30)
        try:
            async with asyncio.timeout(timeouts):
                async for _ in running_call:
                    pass
        except (TimeoutError, asyncio.CancelledError):
            running_call.cancel()

    await asyncio.gather(*(impatient(rng.expovariate(1 / 0.03)) for _ in range(100)))
    await client.until_idle()
    await eventually(lambda: _none_in_flight(client))
    for mocker in stack.mockers[:2]:
        await until_not_running(mocker)
    await until_freed_once(client, relay, f"seed {seed}")


@asynccontextmanager
async def another_gateway(
    stack: Stack, *flags: str, scheduler: str = ""
) -> AsyncIterator[tuple[Running, GatewayClient]]:
    """A second gateway on the same helpers; it learns the workers from them."""
    helpers = ("--indexer", stack.indexer.address, "--scheduler", scheduler or stack.scheduler.address)
    async with running("kvscout_gateway.main", *helpers, *flags) as gateway:
        async with connected(gateway, stack.scheduler, stack.indexer) as client:
            await client.until_known("w0", "w1", "w2")
            yield gateway, client


@pytest.mark.services_only
async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(stack: Stack, slow: MockerProcess) -> None:
    async with another_gateway(stack) as (gateway, client):
        running_call = client.start(fresh_prompt(40), model="slow", max_tokens=5)
        got = Answer()
        await until_running(slow)
        gateway.process.send_signal(signal.SIGTERM)

        async def refused() -> bool:
            try:
                await client.generate([1, 2, 3])
            except grpc.aio.AioRpcError as error:
                return isinstance(to_error(error), Unavailable)
            return False

        await eventually(refused)
        await rest(running_call, got)
        assert len(got.token_ids) == 5
        assert await gateway.process.wait() == 0
        # Long before the scheduler would end them by itself, 10 s after the gateway has gone.
        await eventually(lambda: _nothing_active(client), what="nothing booked", deadline_seconds=8)


async def _nothing_active(client: GatewayClient) -> bool:
    return not await client.active()


@pytest.mark.services_only
async def test_a_client_that_does_not_read_is_given_up_and_holds_nothing(stack: Stack, client: GatewayClient) -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await send_tokens(response, *[7] * 10_000)

    async with (
        workers(client, endless) as (model, [engine]),
        another_gateway(stack, "--client-write-seconds", "0.3") as (_, other),
    ):
        await other.until_known(f"{model}/0")
        running_call: Any = other.stub.Generate(gateway_pb2.GenerateRequest(model=model, token_ids=[1]))
        assert (await running_call.read()).route.worker.worker_id == f"{model}/0"

        async def given_up() -> bool:
            return engine.aborted == 1 and not await other.active() and (await other.status()).in_flight == 0

        await eventually(given_up, what="the engine aborted and nothing booked")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await rest(running_call, Answer())
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "the client has read nothing" in (failed.value.details() or "")


@pytest.mark.services_only
async def test_a_scheduler_that_hangs_costs_one_request_its_timeout_not_each(
    stack: Stack, client: GatewayClient
) -> None:
    async with (
        running("kvscout_scheduler.main") as scheduler,
        another_gateway(stack, scheduler=scheduler.address) as (_, other),
    ):

        async def failures() -> int:
            [told] = [
                helper for helper in (await other.status()).helpers if helper.kind == gateway_pb2.HELPER_KIND_SCHEDULER
            ]
            return told.failures

        async def degraded() -> bool:
            return (await other.route([1, 2, 3])).degraded

        async def well() -> bool:
            return not await degraded()

        await eventually(well)
        scheduler.process.send_signal(signal.SIGSTOP)
        try:
            assert await degraded()
            before = await failures()
            for number in range(20):
                answer = await other.route([1, 2, 3], request_id=f"r {number}")
                assert (answer.degraded, answer.HasField("booked"), answer.booked) == (True, True, False)
            # Reports of before are tried again a few times, nothing else.
            assert await failures() - before < 10
        finally:
            scheduler.process.send_signal(signal.SIGCONT)
        await eventually(well)
        assert (await other.route([1, 2, 3], request_id="booked")).booked
        assert not (await other.route([1, 2, 3])).booked


@pytest.mark.services_only
async def test_an_engine_that_is_gone_is_found_before_a_request_is_sent_there(
    stack: Stack, client: GatewayClient
) -> None:
    async with workers(client, answer) as (model, _):
        await client.register(
            workers_pb2.Worker(worker_id="gone", model=model, block_size=16, http_endpoint="http://127.0.0.1:1")
        )
        async with another_gateway(stack, "--engine-health-seconds", "0.05") as (_, other):
            await other.until_known(f"{model}/0", "gone")

            async def found() -> bool:
                warnings = (await other.status()).service.warnings
                return any("worker gone does not answer its health checks" in warning for warning in warnings)

            await eventually(found)
            for _ in range(4):
                got = await other.generate([1], model=model, max_tokens=1)
                assert [route.worker.worker_id for route in got.routes] == [f"{model}/0"]


@pytest.mark.services_only
async def test_more_than_the_limit_are_refused(stack: Stack, slow: MockerProcess) -> None:
    async with another_gateway(stack, "--max-in-flight", "1") as (_, client):
        running_call = client.start(fresh_prompt(40), model="slow", max_tokens=50)
        await running_call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.generate([1])
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata() or ())["retry-after"] == "1"
        running_call.cancel()
        await client.until_idle("slow")
        await eventually(lambda: _none_in_flight(client))
        await client.generate([1])


@pytest.mark.services_only
async def test_without_an_indexer_a_failed_worker_is_replaced_all_the_same(stack: Stack, client: GatewayClient) -> None:
    # Nothing separates the Free of the first try from the booking of the second here.
    async with workers(client, drop, answer) as (model, _):
        flags = ("--no-indexer", "--scheduler", stack.scheduler.address)
        async with running("kvscout_gateway.main", *flags) as gateway:
            async with connected(gateway, stack.scheduler, stack.indexer) as lonely:

                async def runs() -> Answer | None:
                    try:
                        return await lonely.generate([1], model=model)
                    except grpc.aio.AioRpcError as error:
                        if error.code() is not grpc.StatusCode.NOT_FOUND:  # the workers are not learnt yet
                            raise
                        return None

                got = await eventually(runs)
                assert not got.route.degraded
                assert len(got.routes) in (1, 2)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("model", {"model": ""}),
        ("token_ids", {"token_ids": []}),
        ("request_id", {"request_id": "two\nlines"}),
        ("request_id", {"request_id": "x" * 300}),
        ("pinned_dp_rank", {"pinned_dp_rank": 1}),
        ("stop_conditions.max_tokens", {"stop_conditions": gateway_pb2.StopConditions(max_tokens=0)}),
        ("stop_conditions.min_tokens", {"stop_conditions": gateway_pb2.StopConditions(max_tokens=1, min_tokens=2)}),
        ("sampling_options.n", {"sampling_options": gateway_pb2.SamplingOptions(n=2)}),
        ("sampling_options.temperature", {"sampling_options": gateway_pb2.SamplingOptions(temperature=-1)}),
        ("sampling_options.temperature", {"sampling_options": gateway_pb2.SamplingOptions(temperature=float("nan"))}),
        ("sampling_options.min_p", {"sampling_options": gateway_pb2.SamplingOptions(min_p=float("inf"))}),
        ("sampling_options.top_p", {"sampling_options": gateway_pb2.SamplingOptions(top_p=0)}),
    ],
)
async def test_bad_options_are_refused_by_name(client: GatewayClient, field: str, fields: dict[str, Any]) -> None:
    request = gateway_pb2.GenerateRequest(**{"model": MODEL, "token_ids": [1], **fields})

    async def run() -> None:
        async for _ in client.stub.Generate(request):
            pass

    await failing(run(), grpc.StatusCode.INVALID_ARGUMENT, f"{field}: ")


async def test_what_would_be_dropped_silently_is_refused(client: GatewayClient) -> None:
    output = gateway_pb2.OutputOptions(prompt_logprobs=1)
    await failing(client.generate([1], output_options=output), grpc.StatusCode.UNIMPLEMENTED, "prompt_logprobs")
    await failing(client.generate([1], mm_items=[{"id": "i"}]), grpc.StatusCode.INVALID_ARGUMENT, "mm_items: ")


async def test_each_token_comes_with_its_log_probabilities_where_they_are_asked_for(client: GatewayClient) -> None:
    prompt = fresh_prompt(40)
    token_ids: list[int] = []
    places: list[gateway_pb2.TokenLogprobs] = []
    output = gateway_pb2.OutputOptions(logprobs=3)
    async for message in client.start(prompt, pinned_worker_id="w1", max_tokens=6, output_options=output):
        assert len(message.logprobs) == len(message.token_ids)
        token_ids += message.token_ids
        places += message.logprobs
    plain = await client.generate(prompt, pinned_worker_id="w1", max_tokens=6)
    assert token_ids == plain.token_ids
    assert [place.top_token_ids[0] for place in places] == token_ids
    for place in places:
        assert place.logprob == place.top_logprobs[0] < 0
        assert sorted(place.top_logprobs, reverse=True) == list(place.top_logprobs)
        assert len(place.top_logprobs) == 3
    await client.until_idle()


async def test_log_probabilities_that_are_none_are_the_engines_failure(client: GatewayClient) -> None:
    async def nonsense(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert body["return_tokens_as_token_ids"] is True
        response = await begin(request)
        logprobs = {"token_logprobs": [-1.0], "top_logprobs": [{"by its text": -1.0}]}
        await send(response, choices=[{"token_ids": [7], "text": "", "logprobs": logprobs}])
        return await hang(request, body)

    async with workers(client, nonsense) as (model, _):
        output = gateway_pb2.OutputOptions(logprobs=1)
        generating = client.generate([1], model=model, output_options=output)
        await failing(generating, grpc.StatusCode.INTERNAL, "does not name a token by its number")


async def test_the_engine_gets_fields_that_the_gateway_does_not_know(client: GatewayClient) -> None:
    async with workers(client, answer) as (model, [engine]):
        prompt, content = fresh_prompt(64), '{"multi_modal_data": {"image": ["data:"]}}'
        mm_items = [types_pb2.MultimodalItem(id="cat", offset=3, length=10)]
        await client.generate(prompt, model=model, max_tokens=1, mm_items=mm_items, engine_fields=content)
        assert engine.requests[0]["multi_modal_data"] == {"image": ["data:"]}
        for fields in ("[]", "{", '{"prompt": [1]}', '{"stream": false, "n": 2}', "[" * 100_000):
            refused = client.generate([1], model=model, engine_fields=fields)
            await failing(refused, grpc.StatusCode.INVALID_ARGUMENT, "engine_fields: ")
