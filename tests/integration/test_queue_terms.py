"""Priorities, fair shares, deadlines and targets of real processes: over HTTP, through a real Envoy, and over gRPC."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from support.envoy_process import running_envoy
from support.gateway_stack import GatewayClient, Services, connected, running_services
from support.kubernetes_api import OBJECTIVES, fake_api, objective
from support.processes import DEADLINE_SECONDS, eventually
from support.scripted_engine import ScriptedEngine, answer, drop, hang, scripted_engine

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2, workers_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "m"
PROMPT = list(range(1, 17))
"""As many tokens as make the worker take nobody else until they are computed."""
ADMIN = (("authorization", "Bearer admin"),)
FLAGS = (
    *("--http-port", "0", "--endpoint-picker-port", "0", "--endpoint-picker-tenant", "default"),
    *("--endpoint-picker-timeout-ms", "60000", "--shutdown-delay-seconds", "0"),
    *("--inference-objective", "urgent=10", "--inference-objective", "batch=-10,ttft=0.001"),
)
TOKENS = """tokens:
  - {token: admin, role: admin, tenant: "*"}
  - {token: flood, role: client, tenant: default, name: flood}
  - {token: quiet, role: client, tenant: default, name: quiet, priority: 5}
"""


class World:
    """A gateway with a queue, one worker that computes one prompt at a time, and an Envoy whose picker it is."""

    def __init__(
        self, services: Services, client: GatewayClient, engine: ScriptedEngine, envoy: str, token_file: Path
    ) -> None:
        self.client = client
        self.engine = engine
        self.gateway = services.gateway.address
        self.token_file = token_file
        self.http = aiohttp.ClientSession()
        self.urls = {"openai": f"http://127.0.0.1:{services.gateway.ready['http_port']}", "envoy": envoy}
        self.served: list[str] = []
        """Requests in the order in which the engine got them."""
        self._sent: list[asyncio.Task[int]] = []

    async def post(self, front: str, name: str, token: str = "admin", **fields: Any) -> tuple[int, dict[str, str]]:
        """Status and headers of a request."""
        headers = {"authorization": f"Bearer {token}", **fields.pop("headers", {})}
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "user": name, **fields}
        async with self.http.post(f"{self.urls[front]}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status, {one.lower(): value for one, value in response.headers.items()}

    async def wait_in_line(self, front: str, name: str, token: str = "admin", **fields: Any) -> None:
        """Send a request; return when it waits in the queue."""
        before = await self.queued()

        async def status() -> int:
            return (await self.post(front, name, token, **fields))[0]

        self._sent.append(asyncio.ensure_future(status()))
        await self.until_queued(before + 1)

    async def statuses(self) -> list[int]:
        """Statuses of all that waited, when they are answered."""
        sent, self._sent = self._sent, []
        return list(await asyncio.gather(*sent))

    async def status(self) -> scheduler_pb2.SchedulerGetStatusResponse:
        return await self.client.scheduler.GetStatus(types_pb2.GetStatusRequest(), metadata=ADMIN)

    async def shown(self) -> tuple[int, str]:
        """Exit code and output of `kvscout status`."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvscout_cli.main", "status", "--gateway", self.gateway),
            *("--token-file", str(self.token_file)),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    async def queued(self) -> int:
        return sum(pool.queued for pool in (await self.status()).pools)

    async def until_queued(self, requests: int) -> None:
        async def waiting() -> bool:
            return await self.queued() == requests

        await eventually(waiting, what=f"{requests} requests in the queue")

    async def active(self) -> int:
        listed = await self.client.scheduler.ListActiveRequests(
            scheduler_pb2.ListActiveRequestsRequest(), metadata=ADMIN
        )
        return len(listed.requests)

    async def until_idle(self) -> None:
        async def idle() -> bool:
            return await self.active() == 0

        await eventually(idle, what="nothing booked")

    @asynccontextmanager
    async def occupied(self) -> AsyncIterator[None]:
        """The worker has no room until this is left; then who waits is served, one after the other."""
        self.served.clear()
        reached = asyncio.Event()

        async def occupy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            reached.set()
            return await hang(request, body)

        async def note(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            self.served.append(body["user"])
            return await answer(request, body)

        self.engine.script = occupy
        first = asyncio.ensure_future(self.post("openai", "first", stream=True))
        await reached.wait()
        self.engine.script = note
        try:
            yield
        finally:
            first.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(each_mode: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder: Path = tmp_path_factory.mktemp("terms")
    tokens = folder / "tokens.yaml"
    tokens.touch(mode=0o600)
    tokens.write_text(TOKENS)
    token_file = folder / "token"
    token_file.write_text("admin")
    async with AsyncExitStack() as entered:
        enter = entered.enter_async_context
        api = await enter(fake_api())
        api.define(OBJECTIVES)
        await api.put(OBJECTIVES, objective("of-cluster", "llama", 5), objective("urgent", "llama", -5))
        kubeconfig = folder / "kubeconfig"
        context = {"name": "c", "context": {"cluster": "c"}}
        cluster = {"name": "c", "cluster": {"server": api.url}}
        kubeconfig.write_text(yaml.safe_dump({"current-context": "c", "contexts": [context], "clusters": [cluster]}))
        flags = (*FLAGS, "--workers-k8s", "pool/llama", "--kubeconfig", str(kubeconfig))
        services = await enter(
            running_services(*flags, "--auth-tokens", str(tokens), scheduler_flags=("--router-queue-threshold", "0.5"))
        )
        client = await enter(connected(services.gateway, services.scheduler, services.indexer))
        engine = await enter(scripted_engine(answer))
        worker = workers_pb2.Worker(
            worker_id="w", model=MODEL, http_endpoint=engine.url, engine=workers_pb2.ENGINE_KIND_VLLM, block_size=16,
            max_num_batched_tokens=16, transport=workers_pb2.EVENT_TRANSPORT_NONE,
        )  # fmt: skip
        await client.stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), metadata=ADMIN)
        picker = f"127.0.0.1:{services.gateway.ready['endpoint_picker_port']}"

        def patient(settings: Any) -> None:
            settings.ext_proc["message_timeout"] = f"{DEADLINE_SECONDS}s"

        envoy = await enter(running_envoy(folder, picker, [engine.url.removeprefix("http://")], patient))
        made = World(services, client, engine, envoy.url, token_file)
        entered.push_async_callback(made.http.close)

        async def connected_to_scheduler() -> bool:
            status = await client.stub.GetStatus(types_pb2.GetStatusRequest(), metadata=ADMIN)
            streams = [one for one in status.helpers if one.kind == gateway_pb2.HELPER_KIND_SCHEDULER]
            return services.scheduler is services.gateway or any(one.stream_connected for one in streams)

        await eventually(connected_to_scheduler, what="a stream to the scheduler")

        async def objectives_listed() -> bool:
            return any(path == OBJECTIVES and "watch" in query for path, query in api.asked)

        await eventually(objectives_listed, what="a watch of the cluster's objectives")
        yield made
        await made.until_idle()


@pytest.mark.parametrize("front", ["openai", "envoy"])
async def test_higher_priorities_go_first_whatever_says_them(world: World, front: str) -> None:
    async with world.occupied():
        await world.wait_in_line(front, "later", priority=3)
        await world.wait_in_line(front, "plain")
        await world.wait_in_line(front, "sooner", priority=-3)
        await world.wait_in_line(front, "by-objective", headers={"x-gateway-inference-objective": "urgent"})
        await world.wait_in_line(front, "by-header", headers={"x-kvscout-priority": "20"})
    assert await world.statuses() == [200] * 5
    assert world.served == ["by-header", "by-objective", "sooner", "plain", "later"]
    assert not {name.lower() for name in world.engine.headers[-1]} & {
        "x-kvscout-priority",
        "x-gateway-inference-objective",
    }


async def test_objectives_of_the_cluster_count_and_those_of_flags_before_them(world: World) -> None:
    async with world.occupied():
        await world.wait_in_line("openai", "plain")
        await world.wait_in_line("openai", "by-cluster", headers={"x-gateway-inference-objective": "of-cluster"})
        await world.wait_in_line("openai", "by-flag", headers={"x-llm-d-inference-objective": "urgent"})
    assert await world.statuses() == [200] * 3
    assert world.served == ["by-flag", "by-cluster", "plain"]


async def test_a_token_bounds_the_priority_that_its_client_may_have(world: World) -> None:
    async with world.occupied():
        await world.wait_in_line("openai", "flood", token="flood", headers={"x-kvscout-priority": "1000"})
        await world.wait_in_line("openai", "quiet", token="quiet", headers={"x-kvscout-priority": "1000"})
        await world.wait_in_line("openai", "admin", headers={"x-kvscout-priority": "6"})
    assert await world.statuses() == [200] * 3
    assert world.served == ["admin", "quiet", "flood"]


async def test_a_client_that_floods_does_not_take_the_share_of_another(world: World) -> None:
    async with world.occupied():
        for number in range(12):
            await world.wait_in_line("openai", f"flood-{number}", token="flood")
        for number in range(4):
            await world.wait_in_line("openai", f"quiet-{number}", token="quiet")
        status, shown = await world.shown()
        assert (status, "flood" in shown, "quiet" in shown) == (0, True, True), shown
        shares = {(one.caller, one.waiting) for pool in (await world.status()).pools for one in pool.queue}
        assert shares == {("flood", 12), ("quiet", 4)}
    assert await world.statuses() == [200] * 16
    # One of each in turns: the last quiet one is at most the ninth.
    assert [name for name in world.served if name.startswith("quiet")] == [f"quiet-{number}" for number in range(4)]
    assert world.served.index("quiet-3") <= 8, world.served


@pytest.mark.parametrize("front", ["openai", "envoy"])
async def test_fairness_ids_of_one_caller_share_what_it_has(world: World, front: str) -> None:
    async with world.occupied():
        for number in range(8):
            await world.wait_in_line(front, f"a-{number}", headers={"x-gateway-inference-fairness-id": "a"})
        for number in range(3):
            await world.wait_in_line(front, f"b-{number}", headers={"x-llm-d-inference-fairness-id": "b"})
    assert await world.statuses() == [200] * 11
    assert world.served.index("b-2") <= 6, world.served


@pytest.mark.parametrize("front", ["openai", "envoy"])
async def test_a_request_whose_deadline_passes_in_the_queue_gets_504_and_leaves_nothing(
    world: World, front: str
) -> None:
    async with world.occupied():
        status, _ = await world.post(front, "late", headers={"x-kvscout-deadline-ms": "200"})
        assert status == 504
        await world.until_queued(0)
        assert await world.active() == 1
    await world.until_idle()
    assert world.served == []


async def test_a_retry_does_not_begin_after_the_deadline(world: World) -> None:
    model, seconds = "fails-late", 1.5
    called: list[str] = []

    async def fail_the_first(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        called.append(body["user"])
        if called.count(body["user"]) > 1:
            return await answer(request, body)
        # The gateway counts from before the engine gets the request: the deadline is over by then.
        await asyncio.sleep(seconds)
        return await drop(request, body)

    async with AsyncExitStack() as entered:
        for number in range(2):
            engine = await entered.enter_async_context(scripted_engine(fail_the_first))
            worker = workers_pb2.Worker(
                worker_id=f"late-{number}", model=model, http_endpoint=engine.url, block_size=16,
                engine=workers_pb2.ENGINE_KIND_VLLM, transport=workers_pb2.EVENT_TRANSPORT_NONE,
            )  # fmt: skip
            await world.client.stub.RegisterWorker(workers_pb2.RegisterWorkerRequest(worker=worker), metadata=ADMIN)
        headers = {"x-kvscout-deadline-ms": str(int(1000 * seconds))}
        assert (await world.post("openai", "in-a-hurry", model=model, headers=headers))[0] == 504
        await world.until_idle()
        assert (await world.post("openai", "patient", model=model))[0] == 200
        await world.until_idle()
    assert called == ["in-a-hurry", "patient", "patient"]


async def test_the_deadline_of_a_grpc_call_ends_its_wait(world: World) -> None:
    async with world.occupied():
        stop = gateway_pb2.StopConditions(max_tokens=1)
        message = gateway_pb2.GenerateRequest(model=MODEL, token_ids=PROMPT, stop_conditions=stop)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in world.client.stub.Generate(message, timeout=0.3, metadata=ADMIN):
                pass
        assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await world.until_queued(0)
        assert await world.active() == 1
    await world.until_idle()
    assert world.served == []


async def test_metadata_of_a_grpc_call_are_read_like_headers(world: World) -> None:
    async with world.occupied():
        await world.wait_in_line("openai", "plain")
        calls = []
        for objective, metadata in (("urgent", ()), ("", (("x-kvscout-priority", "20"),))):
            stop = gateway_pb2.StopConditions(max_tokens=1)
            name = '{"user": "objective"}' if objective else '{"user": "header"}'
            message = gateway_pb2.GenerateRequest(
                model=MODEL, token_ids=PROMPT, stop_conditions=stop, engine_fields=name, objective=objective
            )
            running = world.client.stub.Generate(message, timeout=DEADLINE_SECONDS, metadata=(*ADMIN, *metadata))
            calls.append(asyncio.ensure_future(_read(running)))
            await world.until_queued(1 + len(calls))
    await asyncio.gather(*calls)
    assert await world.statuses() == [200]
    assert world.served == ["header", "objective", "plain"]


async def _read(messages: Any) -> None:
    async for _ in messages:
        pass


@pytest.mark.parametrize("front", ["openai", "envoy"])
async def test_what_may_be_shed_is_shed_while_no_worker_keeps_its_target(world: World, front: str) -> None:
    world.engine.script = answer
    by_objective = {"x-gateway-inference-objective": "batch"}
    by_header = {"x-kvscout-priority": "-1", "x-slo-ttft-ms": "0.001"}
    for headers in (by_objective, by_header):
        status, answered = await world.post(front, "shed", headers=headers)
        assert status == 429
        assert int(answered["retry-after"]) >= 1
    # A priority of 0 is served all the same, and without a target one below 0 is.
    assert (await world.post(front, "kept", headers={"x-slo-ttft-ms": "0.001"}))[0] == 200
    assert (await world.post(front, "free", headers={"x-kvscout-priority": "-1"}))[0] == 200
    await world.until_idle()


@pytest.mark.parametrize(
    ("name", "value"), [("x-kvscout-priority", "high"), ("x-kvscout-deadline-ms", "-1"), ("x-slo-ttft-ms", "0")]
)
@pytest.mark.parametrize("front", ["openai", "envoy"])
async def test_a_malformed_header_is_refused_by_its_name(world: World, front: str, name: str, value: str) -> None:
    headers = {"authorization": "Bearer admin", name: value}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
    async with world.http.post(f"{world.urls[front]}/v1/completions", json=body, headers=headers) as response:
        document = await response.json()
    assert (response.status, document["error"]["param"]) == (400, name)
