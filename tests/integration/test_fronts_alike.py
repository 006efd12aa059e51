"""What holds of a request whichever way it came in: gRPC, the OpenAI API, an Envoy whose picker the gateway is.

Envoy has the configuration that is shipped; it is asked for every response, so that all three fronts see first outputs
and usage.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import grpc
import pytest
import pytest_asyncio
from aiohttp import web
from support.envoy_process import running_envoy
from support.gateway_stack import MODEL, GatewayClient, Stack, fresh_prompt, running_stack
from support.process_metrics import scrape
from support.processes import eventually
from support.scripted_engine import ScriptedEngine, answer, begin, drop, hang, refuse, scripted_engine, send_tokens

from kvscout.v1 import scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.rpc.channel import call

pytestmark = pytest.mark.asyncio(loop_scope="module")

OBJECT = {"do_remote_prefill": True, "remote_engine_id": "e-1"}
PREFILL, DECODE, AGGREGATED = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE, types_pb2.ROLE_AGGREGATED
FRONTS = ("grpc", "openai", "envoy")


class Outcome(NamedTuple):
    """How a request ended, in the words of HTTP."""

    status: int
    cached_tokens: int = 0


class World:
    """A stack, with a relay before a scheduler of its own; three engines that do what tests say, and an Envoy."""

    def __init__(self, stack: Stack, engines: list[ScriptedEngine], envoy_url: str) -> None:
        self.stack = stack
        self.relay = stack.relay
        self.client: GatewayClient = stack.client
        self.engines = engines
        self.http = aiohttp.ClientSession()
        self.urls = {"openai": f"http://127.0.0.1:{stack.gateway.ready['http_port']}", "envoy": envoy_url}

    @asynccontextmanager
    async def workers(
        self, model: str, *roles: types_pb2.Role.ValueType, **fields: Any
    ) -> AsyncIterator[list[ScriptedEngine]]:
        """The engines as workers of a model, one of each role; none of them can fall back unless `fields` says so."""
        named = [f"{model}-{number}" for number in range(len(roles))]
        for worker_id, role, engine in zip(named, roles, self.engines, strict=False):
            engine.script = answer
            engine.requests.clear()
            engine.headers.clear()
            worker = workers_pb2.Worker(
                worker_id=worker_id, model=model, role=role, engine=workers_pb2.ENGINE_KIND_VLLM, block_size=16,
                http_endpoint=engine.url, transport=workers_pb2.EVENT_TRANSPORT_NONE,
                **(fields if role == DECODE else {}),
            )  # fmt: skip
            await self.client.register(worker)
        if self.relay is not None:
            self.relay.requests.clear()
        try:
            yield self.engines[: len(roles)]
            await self.client.until_idle(model)
        finally:
            for worker_id in named:
                await call(self.client.stub.RemoveWorker, workers_pb2.RemoveWorkerRequest(worker_id=worker_id))

    async def ask(self, front: str, model: str, prompt: Any = None, **fields: Any) -> Outcome:
        """One request, to its end."""
        prompt = list(fresh_prompt(100) if prompt is None else prompt)
        if front == "grpc":
            try:
                got = await self.client.generate(prompt, model=model)
            except grpc.aio.AioRpcError as error:
                code = grpc.StatusCode
                return Outcome({code.RESOURCE_EXHAUSTED: 429, code.UNAVAILABLE: 503}[error.code()])
            return Outcome(200, got.usage.cached_tokens if got.usage else 0)
        body = {"model": model, "prompt": prompt, "max_tokens": 4, **fields}
        async with self.http.post(f"{self.urls[front]}/v1/completions", json=body) as response:
            document = await response.json() if response.content_type == "application/json" else {}
            await response.read()
        told = document.get("usage", {}).get("prompt_tokens_details") or {}
        return Outcome(response.status, told.get("cached_tokens", 0))

    @asynccontextmanager
    async def begun(self, front: str, model: str, chunks: int) -> AsyncIterator[None]:
        """A request whose client has some chunks of its answer, and goes when this is left."""
        task = asyncio.ensure_future(self._read_for_ever(front, model, enough := asyncio.Event(), chunks))
        waiting = asyncio.ensure_future(enough.wait())
        try:
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            task.cancel()
            waiting.cancel()
            await asyncio.wait([task, waiting])

    async def _read_for_ever(self, front: str, model: str, enough: asyncio.Event, chunks: int) -> None:
        if chunks == 0:
            enough.set()
        if front == "grpc":
            running = self.client.start(fresh_prompt(100), model=model, max_tokens=50)
            try:
                async for message in running:
                    chunks -= bool(message.token_ids)
                    if chunks <= 0:
                        enough.set()
            finally:
                running.cancel()
            return
        body = {"model": model, "prompt": list(fresh_prompt(100)), "max_tokens": 50, "stream": True}
        async with self.http.post(f"{self.urls[front]}/v1/completions", json=body) as response:
            async for line in response.content:
                chunks -= line.startswith(b"data:")
                if chunks <= 0:
                    enough.set()

    def counted(self, rpc: str, message: Callable[[bytes], Any]) -> Counter[tuple[str, int]]:
        """Calls that the scheduler got, by request and attempt; none in one process."""
        requests = self.relay.requests if self.relay is not None else ()
        seen = [message(raw) for name, raw in requests if name == rpc]
        return Counter((one.request_id, one.attempt_id) for one in seen)

    async def until_freed_once(self) -> None:
        """Waits until every booking was freed; fails if one was twice, or what was never booked."""
        booked = self.counted("SelectAndReserve", scheduler_pb2.SelectRequest.FromString)

        async def freed() -> bool:
            return len(self.counted("Free", scheduler_pb2.FreeRequest.FromString)) >= len(booked)

        await eventually(freed, what=f"{len(booked)} bookings freed")
        frees = self.counted("Free", scheduler_pb2.FreeRequest.FromString)
        assert frees == booked
        assert self.relay is None or set(frees.values()) == {1}

    async def until_active(self, model: str) -> None:
        """Waits until something of a model is booked."""

        async def booked() -> bool:
            return any(one.request.model == model for one in await self.client.active())

        await eventually(booked, what=f"a booking of {model}")

    async def paths(self) -> Counter[str]:
        """How requests of disaggregated models were served."""
        head = 'kvscout_disaggregated_requests_total{path="'
        samples = await scrape(self.stack.gateway)
        return Counter({name[len(head) : -2]: int(n) for name, n in samples.items() if name.startswith(head)})

    async def took(self, before: Counter[str], path: str) -> None:
        """Waits until one request more was served on a path, and none on another: its client may know that earlier."""

        async def counted() -> Counter[str]:
            return await self.paths() - before

        assert await eventually(counted, what=f"a request counted as {path}") == Counter({path: 1})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(each_mode: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    flags = ("--endpoint-picker-port", "0", "--endpoint-picker-sample-every", "1", "--shutdown-delay-seconds", "0")
    async with AsyncExitStack() as entered:
        enter = entered.enter_async_context
        stack = await enter(running_stack(*flags, relay=True))
        engines = [await enter(scripted_engine(answer)) for _ in range(3)]
        urls = [*(mocker.url for mocker in stack.mockers), *(engine.url for engine in engines)]
        picker = f"127.0.0.1:{stack.gateway.ready['endpoint_picker_port']}"
        hosts = [url.removeprefix("http://") for url in urls]
        envoy = await enter(running_envoy(tmp_path_factory.mktemp("envoy"), picker, hosts))
        one = World(stack, engines, envoy.url)
        entered.push_async_callback(one.http.close)
        yield one


@pytest.fixture(params=FRONTS)
def front(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def trickle(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An engine that puts out two tokens, and then nothing."""
    response = await begin(request)
    for token in range(2):
        await send_tokens(response, token)
        await asyncio.sleep(0.02)
    return await hang(request, body)


async def computed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """What a healthy prefill engine answers."""
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1, "total_tokens": len(body["prompt"]) + 1}
    choice = {"index": 0, "text": "x", "token_ids": [1], "finish_reason": "length"}
    return web.json_response({"choices": [choice], "usage": usage, "kv_transfer_params": OBJECT})


@pytest.mark.services_only
async def test_a_client_that_goes_before_dispatch_leaves_one_free_and_no_load(world: World, front: str) -> None:
    assert world.relay is not None
    async with world.workers(f"early-{front}", AGGREGATED) as [engine]:
        world.relay.hold("SelectAndReserve")
        try:
            async with world.begun(front, f"early-{front}", 0):
                await world.until_active(f"early-{front}")  # booked, and the answer on its way
            await world.client.until_idle(f"early-{front}")
        finally:
            world.relay.release("SelectAndReserve")
        await world.until_freed_once()
        assert engine.requests == []


@pytest.mark.parametrize("chunks", [0, 1, 2], ids=["before its first token", "after it", "in mid-stream"])
async def test_a_client_that_goes_later_leaves_one_free_no_load_and_no_work(
    world: World, front: str, chunks: int
) -> None:
    model = f"later-{front}-{chunks}"
    async with world.workers(model, AGGREGATED) as [engine]:
        engine.script = trickle if chunks else hang
        aborted = engine.aborted
        async with world.begun(front, model, chunks):
            await eventually(_when(lambda: bool(engine.requests)), what="the request at its engine")
            await world.until_active(model)
        await eventually(_when(lambda: engine.aborted == aborted + 1), what="the engine's request aborted")
        await world.client.until_idle(model)
        await world.until_freed_once()


async def test_the_decode_leg_is_the_clients_own_body_and_the_returned_object(world: World) -> None:
    """Through Envoy the two legs are the sidecar's, which has to find its prefill worker named."""
    async with world.workers("bodies", PREFILL, DECODE) as [prefill, decode]:
        prefill.script = computed
        body = {"model": "bodies", "prompt": list(fresh_prompt(40)), "max_tokens": 5, "stream": True, "seed": 7}
        body |= {"guided_json": {"type": "object"}, "stream_options": {"include_usage": True}, "min_tokens": 2}
        headers = {"x-request-id": "same"}
        url = f"{world.urls['openai']}/v1/completions"
        async with world.http.post(url, json=body, headers=headers) as response:
            assert (response.status, b"[DONE]" in await response.read()) == (200, True)
        [first], [second] = prefill.requests, decode.requests
        assert second == {**body, "kv_transfer_params": OBJECT}
        assert first["kv_transfer_params"]["do_remote_decode"] is True
        assert (first["max_tokens"], first["stream"]) == (1, False)
        assert {name: first[name] for name in ("prompt", "seed", "guided_json")} == {
            name: body[name] for name in ("prompt", "seed", "guided_json")
        }
        assert prefill.headers[0]["x-request-id"] == decode.headers[0]["x-request-id"] == "same"

        assert (await world.ask("envoy", "bodies")).status == 200
        assert decode.headers[-1]["x-prefiller-host-port"] == prefill.url.removeprefix("http://")


@pytest.mark.parametrize("aggregated", [True, False], ids=["an aggregated one serves", "nobody can"])
async def test_without_prefill_who_cannot_fall_back_leaves_it_to(world: World, front: str, *, aggregated: bool) -> None:
    model, roles = f"pool-{front}-{aggregated}", (DECODE, AGGREGATED) if aggregated else (DECODE,)
    async with world.workers(model, *roles) as [decode, *others]:
        before = await world.paths()
        assert (await world.ask(front, model)).status == (200 if aggregated else 503)
        assert decode.requests == []
        assert [len(other.requests) for other in others] == [1] * len(others)
        await world.took(before, "fallback_aggregated" if aggregated else "refused")


async def test_while_decode_workers_drain_an_aggregated_one_serves(world: World, front: str) -> None:
    model = f"drains-{front}"
    async with world.workers(model, PREFILL, DECODE, AGGREGATED) as [prefill, decode, aggregated]:
        await call(world.client.stub.DrainWorker, workers_pb2.DrainWorkerRequest(worker_id=f"{model}-1"))
        before = await world.paths()
        assert (await world.ask(front, model)).status == 200
        assert (prefill.requests, decode.requests, len(aggregated.requests)) == ([], [], 1)
        await world.took(before, "fallback_aggregated")


async def test_without_prefill_a_decode_worker_that_can_serves_and_is_charged(world: World, front: str) -> None:
    model = f"able-{front}"
    async with world.workers(model, DECODE, can_fallback=True) as [decode]:
        before = await world.paths()
        decode.script = hang
        async with world.begun(front, model, 0):
            await eventually(_when(lambda: bool(decode.requests)), what="the request at its engine")
            active = [one for one in await world.client.active() if one.request.model == model]
            assert [one.uncached_tokens for one in active] == [100]
        decode.script = answer
        assert (await world.ask(front, model)).status == 200
        assert "x-prefiller-host-port" not in decode.headers[-1]

        async def counted() -> set[str]:
            return set(await world.paths() - before)

        assert await eventually(counted, what="a request counted") == {"fallback_decode"}


@pytest.mark.parametrize("how", ["500", "503"])
async def test_a_prefill_worker_that_refuses_costs_the_openai_client_nothing(world: World, how: str) -> None:
    """Through Envoy the sidecar asks it, and tells nobody."""
    model = f"refuses-{how}"
    async with world.workers(model, PREFILL, DECODE, can_fallback=True) as [prefill, decode]:
        prefill.script = refuse(int(how), "no")
        assert (await world.ask("openai", model, stream=True)).status == 200
        assert len(prefill.requests) == 1
        assert "kv_transfer_params" not in decode.requests[-1]


async def test_where_all_decode_workers_are_busy_no_prefill_runs(world: World, front: str) -> None:
    model = f"busy-{front}"
    async with world.workers(model, PREFILL, DECODE, total_kv_blocks=10) as [prefill, decode]:
        prefill.script, decode.script = computed, hang
        threshold = types_pb2.SetBusyThresholdsRequest(model=model, active_decode_blocks_threshold=0.5)
        await call(world.client.stub.SetBusyThresholds, threshold)
        async with world.begun("grpc", model, 0):
            await eventually(_when(lambda: bool(decode.requests)), what="the first one decoding")
            ran = len(prefill.requests)
            assert (await world.ask(front, model)).status == 429
            assert len(prefill.requests) == ran


async def test_a_decode_worker_that_dies_before_its_first_token_costs_one_more_try(world: World, front: str) -> None:
    model = f"dies-{front}"
    async with world.workers(model, PREFILL, DECODE, DECODE) as [prefill, one, other]:
        prefill.script, one.script = computed, drop
        while not one.requests:  # either may be asked first
            assert (await world.ask(front, model, stream=True)).status == 200
        assert other.requests
        await world.client.until_idle(model)
        await world.until_freed_once()


async def test_predicted_cached_tokens_are_the_engines_own(world: World, front: str) -> None:
    async def seen(what: str) -> int:
        return sum(getattr(worker, what) for worker in (await world.client.status()).workers)

    checked, mispredicted = await seen("checked"), await seen("mispredicted")
    prompt, cached = list(fresh_prompt(40)), []
    for _ in range(6):
        told = await world.ask(front, MODEL, prompt)
        cached.append(told.cached_tokens)
        await world.client.until_indexed(prompt, len(prompt) // 16)
        # The end of a request may come later than its answer, as load that turns the next decision.
        await world.client.until_idle(MODEL)
        prompt += fresh_prompt(37)
    assert cached[0] == 0
    assert cached[1:] == [(40 + 37 * turn) // 16 * 16 for turn in range(5)]

    async def all_checked() -> bool:
        return await seen("checked") == checked + 6

    await eventually(all_checked, what="each prediction checked")
    assert await seen("mispredicted") == mispredicted


def _when(found: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return found()

    return check
