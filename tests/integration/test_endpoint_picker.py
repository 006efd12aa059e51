"""A real Envoy asks the endpoint picker: with the configuration that is shipped, and as other gateways configure it.

Whatever happens to a request, nothing stays booked for it.
"""

import asyncio
import json
import random
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.envoy_process import Change, Envoy, Settings, full_duplex, running_envoy, streamed
from support.ext_proc_messages import NONE, parsed, request_headers
from support.free_ports import free_ports
from support.gateway_stack import MODEL, GatewayClient, Stack, connected, fresh_prompt, mocker_worker, running_stack
from support.mocker_process import running_mocker
from support.process_metrics import scrape
from support.processes import DEADLINE_SECONDS, Running, eventually, running
from support.scripted_engine import ScriptedEngine, answer, begin, drop, hang, scripted_engine, send_tokens
from support.trained_tokenizers import byte_level, save

from kvscout.v1 import scheduler_pb2, types_pb2, workers_pb2
from kvscout_common.doctor.collection import Collection
from kvscout_common.doctor.diagnosis import Finding, diagnose
from kvscout_common.hashing import native_available
from kvscout_common.identity.client_security import PLAINTEXT
from kvscout_common.rpc.channel import call
from kvscout_gateway.engines.health import MIN_FAILURES
from kvscout_gateway.fronts.endpoint_picker import conformance, wire
from kvscout_gateway.fronts.reserved import RESERVED_HEADERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODES: dict[str, Change] = {"shipped": lambda settings: None, "full duplex": full_duplex, "streamed": streamed}
BY_TURNS = (200, 404, 503)
"""What is answered to a request that nobody picked for: some engines here have other models, and one is not there."""
PORT = ("--endpoint-picker-port", "0", "--shutdown-delay-seconds", "0")
"""Of a gateway that stops at once: only the tests of that have time to wait."""
PATIENT = ("--endpoint-picker-timeout-ms", "3500")
"""As patient as the proxy: what is picked by turns, because this machine has no time, is not what is asked here."""
SLOW = ("--model", "slow", "--speedup", "1", "--step-base-ms", "100")
"""Tokens come slowly enough to do something meanwhile."""


class World:
    """The stack, a scripted engine, a worker that is not there, and an Envoy for each mode."""

    def __init__(self, stack: Stack, scripted: ScriptedEngine, folder: Path) -> None:
        self.stack = stack
        self.client: GatewayClient = stack.client
        self.scripted = scripted
        self.lost = f"127.0.0.1:{free_ports(1)[0]}"
        self.engines = [*(address(mocker.url) for mocker in stack.mockers), address(scripted.url), self.lost]
        self.envoys: dict[str, Envoy] = {}
        self._folder = folder

    @asynccontextmanager
    async def envoy(self, change: Change, gateway: Running | None = None) -> AsyncIterator[Envoy]:
        """One more Envoy."""
        folder = self._folder / f"{random.randrange(1 << 60):x}"
        folder.mkdir()
        port = (gateway or self.stack.gateway).ready["endpoint_picker_port"]
        async with running_envoy(folder, f"127.0.0.1:{port}", self.engines, change) as envoy:
            yield envoy

    @asynccontextmanager
    async def gateway(self, *flags: str) -> AsyncIterator[tuple[Running, GatewayClient]]:
        """One more gateway, with the workers of models "mock" and "slow"."""
        stack = self.stack
        helpers = ("--scheduler", stack.scheduler.address, "--indexer", stack.indexer.address)
        timeouts = ("--indexer-timeout-ms", "2000", "--scheduler-timeout-ms", "3000", *PATIENT)
        async with AsyncExitStack() as entered:
            gateway = await entered.enter_async_context(
                running("kvscout_gateway.main", *helpers, *timeouts, *PORT, *flags)
            )
            client = await entered.enter_async_context(connected(gateway, stack.scheduler, stack.indexer))
            for index, mocker in enumerate(stack.mockers):
                await client.register(mocker_worker(f"w{index}", mocker, model=MODEL if index < 2 else "slow"))
            yield gateway, client

    async def until_idle(self) -> None:
        """Waits until nothing is booked on any worker."""
        for model in (MODEL, "slow", "scripted"):
            await self.client.until_idle(model)


def address(url: str) -> str:
    return url.removeprefix("http://")


def completion(tokens: int = 64, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(fresh_prompt(tokens)), "max_tokens": 4, **fields}


async def begin_and_hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """An engine that falls silent after its first token."""
    response = await begin(request)
    await send_tokens(response, 1)
    return await hang(request, body)


def cached(body: Any) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(each_mode: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    flags = (*PORT, "--endpoint-picker-sample-every", "2", *PATIENT)
    async with AsyncExitStack() as entered:
        stack = await entered.enter_async_context(running_stack(*flags, mockers=((), (), SLOW)))
        scripted = await entered.enter_async_context(scripted_engine(answer))
        one = World(stack, scripted, tmp_path_factory.mktemp("envoy"))
        await one.client.register(mocker_worker("w2", stack.mockers[2], model="slow"))
        fields: dict[str, Any] = {"engine": workers_pb2.ENGINE_KIND_VLLM, "block_size": 16, "dp_size": 1}
        for worker_id, url in (("s0", scripted.url), ("ranks", scripted.url)):
            fields |= {"model": "ranks", "dp_size": 2} if worker_id == "ranks" else {"model": "scripted"}
            await one.client.register(workers_pb2.Worker(worker_id=worker_id, http_endpoint=url, **fields))
        for mode, change in MODES.items():
            one.envoys[mode] = await entered.enter_async_context(one.envoy(change))
        yield one


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_stays_booked(world: World) -> AsyncIterator[None]:
    world.scripted.script = answer
    yield
    await world.until_idle()


@pytest.fixture(params=MODES)
def envoy(request: pytest.FixtureRequest, world: World) -> Envoy:
    return world.envoys[request.param]


@pytest.fixture
def shipped(world: World) -> Envoy:
    return world.envoys["shipped"]


async def test_a_prompt_goes_where_it_is_cached(world: World, envoy: Envoy) -> None:
    body = completion(256)
    first = await envoy.post(body)
    assert (first.status, cached(first.json)) == (200, 0)
    await world.client.until_indexed(body["prompt"], 16)
    for _ in range(3):
        # The proxy tells of the end of a request after its client has the answer.
        await world.until_idle()
        assert cached((await envoy.post(body)).json) == 240


async def test_a_conversation_in_text_goes_where_it_is_cached(envoy: Envoy) -> None:
    text = " ".join(f"word{random.randrange(1 << 30)}" for _ in range(64))
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}

    async def cached_everywhere() -> bool:
        answers = [await envoy.post(body, path="/v1/chat/completions") for _ in range(3)]
        assert {answered.status for answered in answers} == {200}
        return all(cached(answered.json) for answered in answers)

    await eventually(cached_everywhere, what="three answers from a worker that has it cached")


async def test_a_stream_comes_whole_and_is_booked_as_long_as_it_runs(world: World, envoy: Envoy) -> None:
    fields: dict[str, Any] = {"model": "slow", "stream": True, "stream_options": {"include_usage": True}}
    fields["max_tokens"] = tokens = 20
    async with envoy.http.post(envoy.url + "/v1/completions", json=completion(**fields)) as response:
        assert response.status == 200
        await world.client.until_active()
        events = (await response.read()).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert sum(b'"text"' in event for event in events) == tokens
    assert json.loads(events[-3].removeprefix(b"data: "))["usage"]["completion_tokens"] == tokens


async def test_prefill_is_over_at_the_first_piece_where_the_proxy_shows_it(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(world.envoys["full duplex"].post(completion(model="slow", stream=True, max_tokens=30)))

        async def prefilled() -> bool:
            [(requests, prefill_tokens, _)] = await world.client.loads("slow")
            return requests == 1 and prefill_tokens == 0

        await eventually(prefilled, what="a request that is past its prefill")


async def test_a_long_prompt_comes_in_pieces(world: World, envoy: Envoy) -> None:
    body = json.dumps(completion(4000)).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]
            await asyncio.sleep(0)

    headers = {"content-type": "application/json"}
    async with envoy.http.post(envoy.url + "/v1/completions", data=chunks(), headers=headers) as response:
        assert response.status == 200
        assert (await response.json())["usage"]["prompt_tokens"] == 4000


async def test_a_body_of_megabytes_arrives(world: World, envoy: Envoy) -> None:
    body = completion(64, model="scripted", user="x" * 1_500_000, max_tokens=1)
    assert (await envoy.post(body)).status == 200
    assert world.scripted.requests[-1] == body


async def test_a_body_beyond_the_proxy_s_buffer_is_refused_by_it(shipped: Envoy) -> None:
    assert (await shipped.post(completion(user="x" * (33 << 20)))).status == 413


@pytest.mark.parametrize("when", ["before the answer", "in the middle"])
async def test_a_client_that_goes_away_leaves_nothing_behind(world: World, envoy: Envoy, when: str) -> None:
    world.scripted.script = hang if when == "before the answer" else begin_and_hang
    before, aborted = len(world.scripted.requests), world.scripted.aborted
    request = envoy.http.post(envoy.url + "/v1/completions", json=completion(model="scripted", stream=True))
    if when == "before the answer":
        task = asyncio.ensure_future(request)
        await eventually(lambda: len(world.scripted.requests) > before, what="the request at the engine")
        await world.client.until_active()
        task.cancel()
        await asyncio.wait([task])
    else:
        async with request as response:
            assert await response.content.readany()
            response.close()
    await eventually(lambda: world.scripted.aborted > aborted, what="the engine's request aborted")


async def test_an_engine_that_dies_in_the_middle_is_seen_by_the_client(world: World, envoy: Envoy) -> None:
    seen = asyncio.Event()

    async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await send_tokens(response, 1)
        await seen.wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    world.scripted.script = dies
    body = completion(model="scripted", stream=True)
    async with envoy.http.post(envoy.url + "/v1/completions", json=body) as response:
        assert b'"token_ids": [1]' in await response.content.readany()
        seen.set()
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_what_cannot_be_placed_is_answered_in_the_engine_s_place(world: World, envoy: Envoy) -> None:
    not_json = await envoy.post(b'{"model": ')
    assert (not_json.status, not_json.json["error"]["param"]) == (400, "body")
    assert (await envoy.post({"model": 7, "prompt": [1, 2]})).status == 400
    unknown = await envoy.post(completion(model="nobody-has-it"))
    assert (unknown.status, unknown.headers["content-type"]) == (404, "application/json")
    drain = workers_pb2.DrainWorkerRequest(worker_id="s0")
    await call(world.client.stub.DrainWorker, drain, timeout=DEADLINE_SECONDS)
    try:
        answered = await envoy.post(completion(model="scripted"))
        assert answered.status == 503
        assert answered.headers["retry-after"] == "1"
    finally:
        drain.undo = True
        await call(world.client.stub.DrainWorker, drain, timeout=DEADLINE_SECONDS)
    assert (await envoy.post(completion(model="scripted"))).status == 200


async def test_where_all_are_busy_the_client_is_told_to_come_again(world: World, envoy: Envoy) -> None:
    set_threshold = world.client.stub.SetBusyThresholds
    busy = types_pb2.SetBusyThresholdsRequest(model="scripted", active_prefill_tokens_threshold=1)
    await call(set_threshold, busy, timeout=DEADLINE_SECONDS)
    named: dict[str, Any] = {"model": "scripted", "request_id": "of-somebody-else"}
    booking = scheduler_pb2.ReserveRequest(**named, worker=types_pb2.WorkerRank(worker_id="s0"), isl_tokens=1_000)
    await call(world.client.scheduler.Reserve, booking, timeout=DEADLINE_SECONDS)
    try:
        refused = await envoy.post(completion(model="scripted"))
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
    finally:
        await call(world.client.scheduler.Free, scheduler_pb2.FreeRequest(**named), timeout=DEADLINE_SECONDS)
        clear = types_pb2.SetBusyThresholdsRequest(model="scripted", clear=["active_prefill_tokens_threshold"])
        await call(set_threshold, clear, timeout=DEADLINE_SECONDS)


async def test_a_request_without_a_body_goes_to_any_worker(envoy: Envoy) -> None:
    answered = await envoy.get("/v1/models")
    # One of the engines is scripted, and has no list of models.
    assert answered.status == 200 or answered.body == b"404: Not Found"


@pytest.mark.services_only
async def test_what_names_no_model_goes_to_the_only_one_and_the_engine_judges_it(world: World) -> None:
    fields: dict[str, Any] = {"engine": workers_pb2.ENGINE_KIND_VLLM, "block_size": 16, "dp_size": 1}
    worker = workers_pb2.Worker(worker_id="s", model="scripted", http_endpoint=world.scripted.url, **fields)
    async with AsyncExitStack() as entered:
        # Of its own: the other one knows more models.
        scheduler = await entered.enter_async_context(running("kvscout_scheduler.main"))
        flags = (
            *("--no-indexer", "--scheduler", scheduler.address),
            *PORT,
            "--endpoint-picker-sample-every",
            "0",
            *PATIENT,
        )
        gateway = await entered.enter_async_context(running("kvscout_gateway.main", *flags))
        client = await entered.enter_async_context(connected(gateway, scheduler, world.stack.indexer))
        await client.register(worker)
        for change in MODES.values():
            envoy = await entered.enter_async_context(world.envoy(change, gateway))
            seen = len(world.scripted.requests)
            body = {"prompt": [1, 2], "max_tokens": 1}
            assert (await envoy.post(body)).status == 200
            assert world.scripted.requests[seen:] == [body]
            for path in ("/tokenize", "/v1/embeddings"):
                async with envoy.http.post(envoy.url + path, json={}) as response:
                    # Of the engine.
                    assert (response.status, await response.text()) == (404, "404: Not Found")
        counted = await scrape(gateway)
        assert counted['kvscout_endpoint_picks_total{outcome="picked"}'] == 3 * len(MODES)


async def test_a_path_that_is_no_client_s_comes_to_no_engine(world: World, envoy: Envoy) -> None:
    seen = len(world.scripted.requests)
    for path, status in (("/sleep?level=1", 403), ("/v1/load_lora_adapter", 403), ("/v1/videos", 404)):
        for body in (b"", json.dumps(completion(model="scripted")).encode()):
            async with envoy.http.post(envoy.url + path, data=body) as response:
                assert response.status == status
                assert "--client-path" in (await response.json())["error"]["message"]
    assert len(world.scripted.requests) == seen


async def test_a_form_is_placed_by_its_model_and_says_nothing_that_is_not_its_client_s_to_say(envoy: Envoy) -> None:
    for field, status, named in (("language", 404, "nobody-has-it"), ("kv_transfer_params", 400, "kv_transfer_params")):
        form = aiohttp.FormData({"model": "nobody-has-it", field: "en"})
        form.add_field("file", b"x" * 100_000, filename="a.wav")
        async with envoy.http.post(envoy.url + "/v1/audio/transcriptions", data=form) as response:
            assert response.status == status
            assert named in (await response.json())["error"]["message"]


async def test_a_body_goes_to_the_engine_with_another_model_and_without_what_is_not_its_client_s_to_say(
    world: World, envoy: Envoy
) -> None:
    rewrite = {"x-gateway-model-name-rewrite": "scripted"}
    for tokens in (3, 40_000):
        plain = completion(tokens, model="a-much-longer-name-than-the-other", max_tokens=1)
        forged = {**plain, "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.9.9.9"}}
        answered = await envoy.post(forged, headers={**rewrite, "x-data-parallel-host": "10.9.9.9"})
        assert answered.status == 200
        assert world.scripted.requests[-1] == {**plain, "model": "scripted"}
        assert not {name.lower() for name in world.scripted.headers[-1]} & {"x-data-parallel-host", "x-kvscout-x"}
    # A longer one than came.
    shorter = await envoy.post(completion(model="x", max_tokens=1), headers=rewrite)
    assert (shorter.status, world.scripted.requests[-1]["model"]) == (200, "scripted")


@pytest.mark.services_only
async def test_an_objective_has_a_priority_in_the_line_of_its_model(world: World) -> None:
    order: list[str] = []

    async def note(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        order.append(body["user"])
        return await answer(request, body)

    flags = ("--endpoint-picker-objective", "urgent=10", "--endpoint-picker-objective", "batch=-10")
    timeouts = ("--endpoint-picker-timeout-ms", "60000")
    async with AsyncExitStack() as entered:
        scheduler = await entered.enter_async_context(
            running("kvscout_scheduler.main", "--router-queue-threshold", "0.5")
        )
        helpers = ("--no-indexer", "--scheduler", scheduler.address)
        gateway = await entered.enter_async_context(running("kvscout_gateway.main", *helpers, *PORT, *flags, *timeouts))
        client = await entered.enter_async_context(connected(gateway, scheduler, world.stack.indexer))
        await client.register(
            workers_pb2.Worker(
                worker_id="s",
                model="scripted",
                http_endpoint=world.scripted.url,
                engine=workers_pb2.ENGINE_KIND_VLLM,
                block_size=16,
                dp_size=1,
                max_num_batched_tokens=16,
            )
        )

        def patient(settings: Settings) -> None:
            settings.ext_proc["message_timeout"] = f"{DEADLINE_SECONDS}s"

        envoy = await entered.enter_async_context(world.envoy(patient, gateway))

        async def streaming() -> bool:
            # Without a stream there is no line to stand in.
            return any(helper.stream_connected for helper in (await client.status()).helpers)

        await eventually(streaming, what="a stream to the scheduler")
        reached = asyncio.Event()

        async def occupy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            reached.set()
            return await hang(request, body)

        world.scripted.script = occupy
        first = asyncio.ensure_future(envoy.post(completion(model="scripted", user="first", stream=True)))
        await reached.wait()
        world.scripted.script = note
        waiting = []
        for objective in ("batch", "none", "urgent"):
            headers = {"x-gateway-inference-objective": objective}
            body = completion(model="scripted", user=objective)
            waiting.append(asyncio.ensure_future(envoy.post(body, headers=headers)))
            await until_waiting(client, len(waiting))
        first.cancel()
        assert [answered.status for answered in await asyncio.gather(*waiting)] == [200] * 3
    assert order == ["urgent", "none", "batch"]


async def until_waiting(client: GatewayClient, requests: int) -> None:
    """Waits until so many stand in line."""

    async def in_line() -> bool:
        status = await call(client.scheduler.GetStatus, types_pb2.GetStatusRequest(), timeout=DEADLINE_SECONDS)
        return sum(pool.queued for pool in status.pools) == requests

    await eventually(in_line, what=f"{requests} requests in line")


@pytest.mark.services_only
async def test_in_a_conformance_test_a_request_goes_where_it_says_and_its_answer_tells(world: World) -> None:
    def forwarded(settings: Settings) -> None:
        settings.ext_proc["metadata_options"]["forwarding_namespaces"]["untyped"].append(wire.LB_NAMESPACE)

    async with world.gateway("--endpoint-picker-conformance") as (gateway, _), world.envoy(forwarded, gateway) as envoy:
        for wanted in world.engines[:2]:
            answered = await envoy.post(completion(), headers={conformance.SELECTION: wanted})
            assert answered.status == 200
            assert answered.headers[conformance.SERVED] == answered.headers[conformance.SELECTED] == wanted
        by_ip = await envoy.post(completion(), headers={conformance.SELECTION: "127.0.0.1"})
        assert by_ip.headers[conformance.SERVED] in world.engines
        assert (await envoy.post(completion(), headers={conformance.SELECTION: "10.9.9.9"})).status == 503
        assert (await envoy.post(completion())).headers[conformance.SERVED] in world.engines
    # Elsewhere the header is nothing.
    async with world.gateway() as (gateway, _), world.envoy(forwarded, gateway) as envoy:
        answered = await envoy.post(completion(), headers={conformance.SELECTION: "10.9.9.9"})
        assert answered.status == 200
        assert conformance.SERVED not in answered.headers


async def test_a_client_names_no_destinations(world: World, envoy: Envoy) -> None:
    forged = dict.fromkeys(RESERVED_HEADERS, "10.9.9.9:80")
    assert (await envoy.post(completion(model="scripted"), headers=forged)).status == 200
    seen: Mapping[str, str] = world.scripted.headers[-1]
    assert seen["x-gateway-destination-endpoint"] == address(world.scripted.url)
    assert RESERVED_HEADERS & {name.lower() for name in seen} == {wire.DESTINATION, wire.PICK}


async def test_the_rank_is_told_to_an_engine_that_has_several(world: World, envoy: Envoy) -> None:
    forged = {"x-data-parallel-rank": "7"}
    assert (await envoy.post(completion(model="ranks"), headers=forged)).status == 200
    assert world.scripted.headers[-1]["x-data-parallel-rank"] in ("0", "1")


async def test_where_prefill_is_apart_its_worker_is_named_for_the_decode_worker_s_sidecar(
    world: World, envoy: Envoy
) -> None:
    workers = [
        workers_pb2.Worker(
            worker_id=worker_id, model="apart", http_endpoint=url, role=role, block_size=16,
            engine=workers_pb2.ENGINE_KIND_VLLM, total_kv_blocks=4095,
        )
        for worker_id, url, role in (
            ("p0", f"http://{world.lost}", types_pb2.ROLE_PREFILL),
            ("d0", world.scripted.url, types_pb2.ROLE_DECODE),
        )
    ]  # fmt: skip
    for worker in workers:
        await world.client.register(worker)
    try:
        forged = {"x-prefiller-host-port": "10.9.9.9:80"}
        assert (await envoy.post(completion(model="apart"), headers=forged)).status == 200
        assert world.scripted.headers[-1]["x-prefiller-host-port"] == world.lost

        async def free() -> bool:
            return not await world.client.active()

        await eventually(free, what="neither worker booked")
    finally:
        for worker in workers:
            remove = workers_pb2.RemoveWorkerRequest(worker_id=worker.worker_id)
            await call(world.client.stub.RemoveWorker, remove, timeout=DEADLINE_SECONDS)


@asynccontextmanager
async def lost_worker(world: World) -> AsyncIterator[None]:
    """A second worker of "scripted", "lost", that cannot be reached."""
    lost = workers_pb2.Worker(
        worker_id="lost", model="scripted", http_endpoint=f"http://{world.lost}", engine=workers_pb2.ENGINE_KIND_VLLM,
        block_size=16,
    )  # fmt: skip
    await world.client.register(lost)
    try:
        yield
    finally:
        remove = workers_pb2.RemoveWorkerRequest(worker_id="lost")
        await call(world.client.stub.RemoveWorker, remove, timeout=DEADLINE_SECONDS)


async def test_the_next_endpoint_of_a_pick_serves_where_the_first_cannot_be_reached(world: World, envoy: Envoy) -> None:
    async def elsewhere() -> float:
        return (await scrape(world.stack.gateway))["kvscout_endpoint_picks_served_elsewhere_total"]

    before = await elsewhere()
    async with lost_worker(world):
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await elsewhere() == before:
                assert (await envoy.post(completion(model="scripted"))).status == 200
        world.scripted.script = begin_and_hang
        # What was booked goes along.
        for _ in range(4):
            task = asyncio.ensure_future(envoy.post(completion(model="scripted")))

            async def moved() -> bool:
                return {one.worker.worker_id for one in await world.client.active()} == {"s0"}

            await eventually(moved, what="what is booked to be booked where it runs")
            task.cancel()
            await asyncio.wait([task])
            await world.client.until_idle("scripted")


async def test_a_worker_that_is_left_out_serves_where_no_other_can_be_reached(world: World, shipped: Envoy) -> None:
    async def booked() -> bool:
        return [one.worker.worker_id for one in await world.client.active()] == ["s0"]

    async with lost_worker(world):
        world.scripted.script = drop
        # What is sent to s0 first fails there first; the other one is the half that stays.
        await world.client.route(fresh_prompt(16_000), model="scripted", pinned_worker_id="lost", request_id="load")
        for _ in range(MIN_FAILURES):
            with pytest.raises(grpc.aio.AioRpcError):
                await world.client.generate([1], model="scripted")
        await call(world.client.stub.Free, scheduler_pb2.FreeRequest(model="scripted", request_id="load"))
        assert any("s0/0 fails" in warning for warning in (await world.client.status()).service.warnings)
        world.scripted.script = answer
        answers = [await shipped.post(completion(model="scripted")) for _ in range(8)]
        assert [one.status for one in answers] == [200] * 8
        # What runs there is booked there, although the scheduler would send nothing there yet.
        world.scripted.script = begin_and_hang
        task = asyncio.ensure_future(shipped.post(completion(model="scripted")))
        await eventually(booked, what="a request to be booked where it runs")
        task.cancel()
        await asyncio.wait([task])
        await world.client.until_idle("scripted")


async def test_only_the_proxy_s_subset_is_picked_from(world: World) -> None:
    allowed = world.engines[1]

    def hint(settings: Settings) -> None:
        settings.manager["http_filters"].insert(0, {
            "name": "envoy.filters.http.set_metadata",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [{
                    "metadata_namespace": wire.SUBSET_NAMESPACE,
                    "value": {wire.SUBSET: [allowed, "10.9.9.9:80"]},
                }],
            },
        })  # fmt: skip

    async def requests() -> dict[str, int]:
        return {one.worker.worker_id: one.requests for one in (await world.client.status()).workers}

    async with world.envoy(hint) as envoy:
        before = await requests()
        for _ in range(6):
            assert (await envoy.post(completion())).status == 200

        async def all_there() -> bool:
            return (await requests())["w1"] - before.get("w1", 0) == 6

        await eventually(all_there, what="six requests at the only worker")
        refused = await envoy.post(completion(model="slow"))
        assert refused.status == 503
        assert "the proxy allows" in refused.json["error"]["message"]


async def test_samples_check_the_predictions(world: World, shipped: Envoy) -> None:
    async def checked() -> int:
        return sum(one.checked for one in (await world.client.status()).workers)

    before = await checked()
    for _ in range(8):
        assert (await shipped.post(completion())).status == 200

    async def sampled() -> bool:
        return before + 2 <= await checked() <= before + 6

    await eventually(sampled, what="some of the predictions checked, and not all")


@pytest.mark.services_only
async def test_tokens_that_are_not_the_engine_s_are_noticed_in_what_the_proxy_shows(
    world: World, tmp_path: Path
) -> None:
    save(tmp_path, byte_level())
    flags = ("--tokenizer", str(tmp_path), "--endpoint-picker-port", "0", "--endpoint-picker-sample-every", "1")
    async with world.gateway(*flags) as (gateway, client), world.envoy(lambda settings: None, gateway) as envoy:
        body = {"model": MODEL, "prompt": "one two three", "max_tokens": 1}
        assert (await envoy.post(body)).status == 200

        async def warned() -> bool:
            return any("not those of its engine" in warning for warning in (await client.status()).service.warnings)

        await eventually(warned, what="a warning that the tokens differ")
        counted = await scrape(gateway)
        assert counted['kvscout_token_parity_total{outcome="length_mismatch"}'] == 1


@pytest.mark.services_only
async def test_without_its_picker_the_proxy_goes_on_alone(world: World) -> None:
    async with AsyncExitStack() as entered:
        gateway, client = await entered.enter_async_context(world.gateway())
        envoys = {
            mode: await entered.enter_async_context(world.envoy(change, gateway)) for mode, change in MODES.items()
        }
        begun = {mode: asyncio.Event() for mode in MODES}

        async def stream(mode: str) -> bytes:
            body = completion(model="slow", stream=True, max_tokens=50)
            async with envoys[mode].http.post(envoys[mode].url + "/v1/completions", json=body) as response:
                first = await response.content.readany()
                begun[mode].set()
                return first + await response.read()

        under_way = {mode: asyncio.ensure_future(stream(mode)) for mode in MODES}
        async with asyncio.timeout(DEADLINE_SECONDS):
            await asyncio.gather(*(event.wait() for event in begun.values()))
        assert len(await client.active()) == len(MODES)
        gateway.process.kill()
        await gateway.process.wait()
        # What comes before anybody knows, where the picker was to be shown the request only.
        assert (await envoys["shipped"].post(completion())).status in BY_TURNS
        assert (await envoys["streamed"].post(completion())).status in BY_TURNS
        # What runs is not hurt, but where the picker moved its bytes.
        assert (await under_way["shipped"]).endswith(b"data: [DONE]\n\n")
        await asyncio.wait(under_way.values())
        assert isinstance(under_way["full duplex"].exception(), aiohttp.ClientError)
        for envoy in envoys.values():
            await envoy.until_picker(healthy=False)
            for _ in range(4):
                assert (await envoy.post(completion())).status in BY_TURNS
        await world.until_idle()


def closed(settings: Settings) -> None:
    """No request goes on without a picker."""
    settings.ext_proc["failure_mode_allow"] = False


@pytest.mark.services_only
async def test_a_proxy_may_be_told_to_fail_without_its_picker(world: World) -> None:
    async with world.gateway() as (gateway, _), world.envoy(closed, gateway) as envoy:
        body = completion(model="slow", stream=True, max_tokens=50)
        async with envoy.http.post(envoy.url + "/v1/completions", json=body) as under_way:
            await under_way.content.readany()
            gateway.process.kill()
            await gateway.process.wait()
            assert (await envoy.post(completion())).status == 500
            with pytest.raises(aiohttp.ClientError):
                await under_way.read()


@pytest.mark.services_only
@pytest.mark.parametrize("mode", [closed, full_duplex])
async def test_pickers_that_are_restarted_one_after_the_other_cost_no_request(world: World, mode: Change) -> None:
    # Thirty health checks of this Envoy, whose interval is 0.1 s.
    flags = ("--shutdown-delay-seconds", "3")
    statuses: Counter[int] = Counter()
    over = asyncio.Event()

    async def send_requests(envoy: Envoy) -> None:
        while not over.is_set():
            answered = await envoy.post(completion(stream=True))
            statuses[answered.status] += 1
            assert answered.status != 200 or answered.body.endswith(b"data: [DONE]\n\n")

    async with AsyncExitStack() as entered:
        # Outside the kernel's range: nobody takes one while its picker is being restarted.
        ports = [str(port) for port in free_ports(2)]
        starts = [world.gateway("--endpoint-picker-port", port, *flags) for port in ports]
        pickers = [(await entered.enter_async_context(start))[0] for start in starts]

        def both(settings: Settings) -> None:
            mode(settings)
            settings.serve("endpoint_picker", [f"127.0.0.1:{port}" for port in ports])

        envoy = await entered.enter_async_context(world.envoy(both, pickers[0]))
        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(send_requests(envoy))
            for picker, port in zip(pickers, ports, strict=True):
                before = statuses.total()
                assert await picker.stop() == 0
                assert statuses.total() > before
                await entered.enter_async_context(world.gateway("--endpoint-picker-port", port, *flags))
                await envoy.until_picker(healthy=True)
            over.set()
    assert statuses.keys() == {200}


@pytest.mark.services_only
async def test_while_its_scheduler_hangs_a_picker_names_workers_by_turns(world: World) -> None:
    flags = ("--endpoint-picker-timeout-ms", "300", "--scheduler-timeout-ms", "20000")
    async with world.gateway(*flags) as (gateway, _), world.envoy(full_duplex, gateway) as envoy:
        scheduler = world.stack.scheduler.process
        scheduler.send_signal(signal.SIGSTOP)
        try:
            assert (await envoy.post(completion())).status == 200
            unknown = await envoy.post(completion(model="nope"))
            assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
        finally:
            scheduler.send_signal(signal.SIGCONT)


@pytest.mark.services_only
async def test_a_picker_that_hangs_is_not_waited_for(world: World) -> None:
    def impatient(settings: Settings) -> None:
        settings.ext_proc["message_timeout"] = "0.2s"

    async with world.gateway() as (gateway, _), world.envoy(impatient, gateway) as envoy:
        gateway.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(3):
                assert (await envoy.post(completion())).status in BY_TURNS
            await envoy.until_picker(healthy=False)
        finally:
            gateway.process.send_signal(signal.SIGCONT)
        await envoy.until_picker(healthy=True)

        async def picks() -> bool:
            # A gateway that has just woken up may be too slow once more.
            assert (await envoy.post(completion())).status in BY_TURNS
            return (await scrape(gateway)).get('kvscout_endpoint_picks_total{outcome="picked"}', 0) > 0

        await eventually(picks, what="a picker that picks again")


async def doctor(envoy: Envoy) -> dict[str, Finding]:
    """What doctor reads in an Envoy's counters."""
    snapshot = await Collection(PLAINTEXT, timeout_seconds=DEADLINE_SECONDS).snapshot([], proxies=[envoy.admin])
    return {finding.id: finding for finding in diagnose(snapshot)}


def default_limits(settings: Settings) -> None:
    """Envoy's own."""
    for name in ("engines", "endpoint_picker"):
        del settings.cluster(name)["circuit_breakers"]


@pytest.mark.services_only
async def test_all_requests_of_a_worker_that_dies_are_run_by_others(world: World) -> None:
    requests = 24
    async with AsyncExitStack() as entered:
        slow = ("--model", "dying", "--speedup", "1", "--step-base-ms", "100")
        mockers = [await entered.enter_async_context(running_mocker(*slow)) for _ in range(2)]

        def only(settings: Settings) -> None:
            settings.serve("engines", [address(mocker.url) for mocker in mockers])

        def only_and_default(settings: Settings) -> None:
            only(settings)
            default_limits(settings)

        for index, mocker in enumerate(mockers):
            await world.client.register(mocker_worker(f"dying{index}", mocker, model="dying"))
        envoy = await entered.enter_async_context(world.envoy(only))
        tight = await entered.enter_async_context(world.envoy(only_and_default))
        half = [
            [asyncio.ensure_future(one.post(completion(model="dying", max_tokens=60))) for _ in range(requests)]
            for one in (envoy, tight)
        ]

        async def running_all() -> bool:
            return [await one.stat(r"cluster\.engines\.upstream_rq_active") for one in (envoy, tight)] == [requests] * 2

        await eventually(running_all, what="all requests at the workers")
        mockers[0].process.kill()
        await mockers[0].process.wait()
        statuses, tight_statuses = [[answered.status for answered in await asyncio.gather(*some)] for some in half]
        assert statuses == [200] * requests
        assert not await doctor(envoy)
        # What it is about: more than 3 retries at once.
        assert 503 in tight_statuses
        [told] = (await doctor(tight))["proxy-overflow"].evidence
        assert f"upstream_rq_retry_overflow is {tight_statuses.count(503)} " in told
        await world.client.until_idle("dying")
        for index in range(2):
            remove = workers_pb2.RemoveWorkerRequest(worker_id=f"dying{index}")
            await call(world.client.stub.RemoveWorker, remove, timeout=DEADLINE_SECONDS)


async def posted(http: aiohttp.ClientSession, envoy: Envoy) -> int:
    """The status of a request, once its answer is whole."""
    body = completion(model="scripted", max_tokens=1)
    async with http.post(envoy.url + "/v1/completions", json=body) as response:
        await response.read()
        return response.status


@pytest.mark.services_only
async def test_more_requests_than_envoys_default_limits_are_all_picked_for(world: World) -> None:
    requests = 1100
    release = asyncio.Event()

    async def wait(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return await answer(request, body)

    def patient(settings: Settings) -> None:
        settings.ext_proc["message_timeout"] = f"{DEADLINE_SECONDS}s"
        # A machine that is busy with these requests is no picker that is ill.
        settings.cluster("endpoint_picker")["health_checks"][0]["timeout"] = f"{DEADLINE_SECONDS}s"
        for name in ("engines", "endpoint_picker"):
            settings.cluster(name)["connect_timeout"] = f"{DEADLINE_SECONDS}s"

    def patient_and_default(settings: Settings) -> None:
        patient(settings)
        default_limits(settings)
        settings.cluster("engines")["circuit_breakers"] = {
            "thresholds": [{"max_requests": 9999, "max_connections": 9999}]
        }

    under_way: list[asyncio.Future[int]] = []

    async def decided(envoy: Envoy) -> int:
        """How many requests have a call to the picker, or go on without one."""
        called = await envoy.stat(r"cluster\.endpoint_picker\.upstream_rq_total")
        return called + await envoy.stat(r"http\.inference\.ext_proc\.failure_mode_allowed")

    world.scripted.script = wait
    for change, bypassed in ((patient, 0), (patient_and_default, requests - 1024)):
        release.clear()
        world.scripted.requests.clear()
        under_way.clear()
        async with world.envoy(change) as envoy, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            # In steps that fit into a short backlog of a listener: beyond it the kernel drops who connects.
            for count in range(100, requests + 1, 100):
                under_way += [asyncio.ensure_future(posted(http, envoy)) for _ in range(100)]

                async def all_decided(envoy: Envoy = envoy, count: int = count) -> bool:
                    return await decided(envoy) == count

                await eventually(all_decided, what=f"a call to the picker, or none, for each of {count} requests")
            allowed = await envoy.stat(r"http\.inference\.ext_proc\.failure_mode_allowed")
            assert allowed == bypassed, await envoy.stats("endpoint_picker|ext_proc")
            assert ("picker-bypassed" in await doctor(envoy)) is (bypassed > 0)
            release.set()
            await asyncio.gather(*under_way)
        await world.until_idle()


@pytest.mark.services_only
@pytest.mark.parametrize("transport", ["grpcio", *(["native"] if native_available() else [])])
@pytest.mark.parametrize("mode", MODES)
async def test_a_picker_that_leaves_cuts_nothing_and_lets_the_lease_end_what_it_booked(
    world: World, mode: str, transport: str
) -> None:
    flags = ("--rpc-transport", transport, "--endpoint-picker-watch", "leave", "--endpoint-picker-lease-seconds", "4")
    async with world.gateway(*flags) as (gateway, client), world.envoy(MODES[mode], gateway) as envoy:
        for _ in range(20):
            answered = await envoy.post(completion(stream=True))
            assert answered.body.endswith(b"data: [DONE]\n\n")
        # Where leaving would cut what the proxy has shown by then, it stays and sees the ends.
        stays = (mode, transport) == ("full duplex", "grpcio")
        left = (await scrape(gateway))["kvscout_endpoint_picks_left"]
        if stays:
            assert left == 0
        else:
            assert left > 0
            assert await client.active()
        await client.until_idle()


def logged(settings: Settings) -> None:
    """What the guide says of access logs."""
    guide = (Path(__file__).parents[2] / "docs/envoy.md").read_text()
    [snippet] = re.findall(r"^```yaml\n(access_log:\n.*?)^```", guide, re.DOTALL | re.MULTILINE)
    settings.manager.update(yaml.safe_load(snippet))


@pytest.mark.services_only
async def test_the_access_log_ends_what_was_left(world: World) -> None:
    # A lease that outlives the test: only the log can end what is booked.
    flags = ("--endpoint-picker-watch", "leave", "--endpoint-picker-lease-seconds", "3600")
    async with world.gateway(*flags) as (gateway, client), world.envoy(logged, gateway) as envoy:
        for _ in range(3):
            assert (await envoy.post(completion(stream=True))).status == 200
        await client.until_idle()
        aborted = asyncio.ensure_future(envoy.post(completion(model="slow", stream=True, max_tokens=200)))

        async def left() -> bool:
            # Before that, the end of its stream would end it.
            return (await scrape(gateway))["kvscout_endpoint_picks_left"] == 1

        await eventually(left, what="a request that the picker has left to the log")
        aborted.cancel()
        await client.until_idle("slow")
        samples = await scrape(gateway)
        assert samples["kvscout_endpoint_picks_logged_total"] == 4
        assert samples["kvscout_endpoint_picks_left"] == 0
        assert samples["kvscout_requests_in_flight"] == 0
        # The log has no end of its own: the proxy keeps it open as long as it lives.
        assert await gateway.stop() == 0


@pytest.mark.services_only
async def test_a_gateway_that_drains_sees_its_requests_to_their_ends(world: World) -> None:
    async with world.gateway() as (gateway, client), world.envoy(full_duplex, gateway) as envoy:
        request = asyncio.ensure_future(envoy.post(completion(model="slow", stream=True, max_tokens=30)))
        await client.until_active()
        gateway.process.terminate()
        assert (await request).body.endswith(b"data: [DONE]\n\n")
        assert await gateway.stop() == 0


@pytest.mark.services_only
async def test_health_is_told_by_name(world: World) -> None:
    async with world.gateway("--endpoint-picker-plaintext") as (gateway, _):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ready['endpoint_picker_port']}") as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            for name in ("", "liveness", "readiness", wire.SERVICE):
                status = (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                assert status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await health.Check(health_pb2.HealthCheckRequest(service="kvscout.v1.Gateway"))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.services_only
async def test_a_proxy_needs_a_token_unless_all_that_comes_there_is_of_one_tenant(world: World, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(
        'tokens: [{token: proxy, role: client, tenant: default}, {token: eye, role: viewer, tenant: "*"}]'
    )

    async def first_answer(gateway: Running, metadata: tuple[tuple[str, str], ...] = (), *, asks: bool = True) -> Any:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.ready['endpoint_picker_port']}") as channel:
            stream: Any = channel.stream_stream(f"/{wire.SERVICE}/Process")(metadata=metadata, timeout=DEADLINE_SECONDS)
            if asks:
                await stream.write(request_headers(NONE, headers={"x-gateway-model-name": "nobody-has-it"}))
            return parsed([await stream.read()])[0].immediate_response.status.code

    port = (*PORT, "--endpoint-picker-plaintext", "--auth-tokens", str(tokens))
    helpers = ("--scheduler", world.stack.scheduler.address, "--no-indexer")
    async with running("kvscout_gateway.main", *helpers, *port) as gateway:
        # Refused before it asks; grpc.aio would lose the status to a write that comes too late.
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await first_answer(gateway, asks=False)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await first_answer(gateway, (("authorization", "Bearer eye"),)) == 403
        assert await first_answer(gateway, (("authorization", "Bearer proxy"),)) == 404
    async with running("kvscout_gateway.main", *helpers, *port, "--endpoint-picker-tenant", "default") as gateway:
        assert await first_answer(gateway) == 404
