"""Three real services and one bucket: what any of them is told holds for all, whatever goes away."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.gateway_stack import fresh_prompt, together
from support.mocker_process import MockerProcess, running_mocker
from support.nats_relay import NatsRelay
from support.nats_server import NatsServer, nats_server
from support.processes import Running, eventually, running

from kvscout.v1 import (
    gateway_pb2,
    gateway_pb2_grpc,
    indexer_pb2_grpc,
    scheduler_pb2_grpc,
    types_pb2,
    workers_pb2,
)
from kvscout_common.enum_words import word_of
from kvscout_common.errors import NotFound, Unavailable
from kvscout_common.rpc.channel import call, open_channel

SECONDS = 20.0


@dataclass(slots=True)
class Services:
    """Indexer, scheduler and gateway of one namespace."""

    nats: NatsServer
    processes: dict[str, Running]
    stubs: dict[str, Any]
    workers_file: Path

    async def rpc(self, service: str, method: str, request: Any) -> Any:
        """Calls a service."""
        return await call(getattr(self.stubs[service], method), request, timeout=SECONDS)

    async def listed(self, service: str) -> dict[str, str]:
        """Source of each worker that a service lists."""
        answer = await self.rpc(service, "ListWorkers", workers_pb2.ListWorkersRequest(tenant="*"))
        return {e.worker.worker_id: word_of(workers_pb2.RegistrationSource, e.source) for e in answer.workers}

    async def until_listed(self, *worker_ids: str, source: str = "nats") -> None:
        """Waits until every service lists exactly these."""

        async def everywhere() -> bool:
            return all([await self.listed(s) == dict.fromkeys(worker_ids, source) for s in self.stubs])

        await eventually(everywhere, what=f"{worker_ids} everywhere")

    async def register(self, service: str, worker_id: str, *, lease_seconds: int = 0, **fields: Any) -> None:
        """Registers a worker at a service."""
        fields = {"model": "mock", "block_size": 16, **fields}
        worker = workers_pb2.Worker(worker_id=worker_id, **fields)
        request = workers_pb2.RegisterWorkerRequest(worker=worker, lease_seconds=lease_seconds)
        await self.rpc(service, "RegisterWorker", request)

    async def warnings(self, service: str) -> list[str]:
        """What a service warns of."""
        status = await self.rpc(service, "GetStatus", types_pb2.GetStatusRequest(tenant="*"))
        return [warning for warning in status.service.warnings if "extension" not in warning]

    async def until_quiet(self) -> None:
        """Waits until no service warns of anything."""

        async def quiet() -> bool:
            return not any([await self.warnings(service) for service in self.stubs])

        await eventually(quiet, what="no warnings")


@asynccontextmanager
async def running_services(folder: Path) -> AsyncIterator[Services]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(nats_server())
        nats = ("--nats-server", server.url, "--namespace", "test")
        workers_file = folder / "workers.yaml"
        workers_file.write_text("workers: []\n")
        indexer, scheduler = await stack.enter_async_context(
            together(running("kvscout_indexer.main", *nats), running("kvscout_scheduler.main", *nats))
        )
        helpers = ("--indexer", indexer.address, "--scheduler", scheduler.address, "--indexer-timeout-ms", "2000")
        gateway = await stack.enter_async_context(
            running("kvscout_gateway.main", *nats, *helpers, "--workers-file", str(workers_file))
        )
        stubs: dict[str, Any] = {}
        for name, process, make in (
            ("indexer", indexer, indexer_pb2_grpc.IndexerStub),
            ("scheduler", scheduler, scheduler_pb2_grpc.SchedulerStub),
            ("gateway", gateway, gateway_pb2_grpc.GatewayStub),
        ):
            channel: grpc.aio.Channel = open_channel(process.address)
            stack.push_async_callback(channel.close)
            stubs[name] = make(channel)
        services = Services(
            server, {"indexer": indexer, "scheduler": scheduler, "gateway": gateway}, stubs, workers_file
        )
        await services.until_quiet()
        yield services


async def test_a_worker_registered_anywhere_is_served_everywhere(tmp_path: Path) -> None:
    async with running_services(tmp_path) as services, running_mocker() as mocker:
        # No event endpoints: the indexer asks the engine for them.
        await services.register(
            "scheduler", "w0", http_endpoint=mocker.url, engine=workers_pb2.ENGINE_KIND_MOCK, lease_seconds=60
        )
        await services.until_listed("w0")
        await _until_cached(services, mocker)
        await services.rpc("indexer", "DrainWorker", workers_pb2.DrainWorkerRequest(worker_id="w0"))

        async def drained() -> bool:
            answer = await services.rpc("gateway", "ListWorkers", workers_pb2.ListWorkersRequest())
            return bool(answer.workers[0].worker.draining)

        await eventually(drained)
        kept = workers_pb2.KeepAliveRequest(worker_ids=["w0", "ghost"])
        answer = await services.rpc("gateway", "KeepAlive", kept)
        assert list(answer.unknown_worker_ids) == ["ghost"]
        await services.rpc("gateway", "RemoveWorker", workers_pb2.RemoveWorkerRequest(worker_id="w0"))
        await services.until_listed()


async def _until_cached(services: Services, mocker: MockerProcess) -> None:
    """A prompt that the engine has computed is found where it is."""
    prompt = fresh_prompt(64)
    await mocker.complete(list(prompt), max_tokens=1)

    async def routed() -> bool:
        try:
            route = await services.rpc("gateway", "Route", gateway_pb2.RouteRequest(model="mock", token_ids=prompt))
        except NotFound:
            return False  # the gateway has not heard of it yet
        return bool(route.overlap_blocks == 4)

    await eventually(routed, what="4 blocks of overlap")


async def test_nats_may_die_and_come_back_empty(tmp_path: Path) -> None:
    async with running_services(tmp_path) as services:
        await services.register("gateway", "lasting")
        await services.register("gateway", "dead", lease_seconds=10)
        await services.register("indexer", "alive", lease_seconds=10)
        await services.until_listed("alive", "dead", "lasting")
        await services.nats.kill(signal.SIGKILL)

        async def told() -> bool:
            return all([any("NATS" in w for w in await services.warnings(s)) for s in services.stubs])

        await eventually(told, what="warnings of every service")
        with pytest.raises(Unavailable, match="NATS"):
            await services.register("gateway", "late")
        await services.until_listed("alive", "dead", "lasting")
        shutil.rmtree(services.nats.store)
        await services.nats.start()
        await services.until_quiet()
        await services.until_listed("alive", "dead", "lasting")

        async def only_the_dead_went() -> bool:
            answer = await services.rpc("scheduler", "KeepAlive", workers_pb2.KeepAliveRequest(worker_ids=["alive"]))
            if answer.unknown_worker_ids:
                await services.register("scheduler", "alive", lease_seconds=10)
            listed = [set(await services.listed(service)) for service in services.stubs]
            assert all({"alive", "lasting"} <= names for names in listed), listed
            return all(names == {"alive", "lasting"} for names in listed)

        await eventually(only_the_dead_went, what="the dead worker gone")


async def test_workers_of_the_gateways_file_reach_the_others_through_the_bucket(tmp_path: Path) -> None:
    async with running_services(tmp_path) as services:
        services.workers_file.write_text("workers: [{worker_id: f, model: mock, block_size: 16, transport: none}]\n")

        async def everywhere() -> bool:
            return [await services.listed(s) for s in services.stubs] == [{"f": "nats"}, {"f": "nats"}, {"f": "file"}]

        await eventually(everywhere)
        services.workers_file.write_text("workers: []\n")
        await services.until_listed()


async def test_the_gateway_tells_of_a_helper_that_does_not_follow(tmp_path: Path) -> None:
    async with running_services(tmp_path) as services, running("kvscout_indexer.main") as stranger:
        nats = ("--nats-server", services.nats.url, "--namespace", "test")
        helpers = ("--indexer", stranger.address, "--scheduler", services.processes["scheduler"].address)
        async with running("kvscout_gateway.main", *nats, *helpers) as gateway:
            channel = open_channel(gateway.address)
            services.stubs = {"gateway": gateway_pb2_grpc.GatewayStub(channel)}
            await services.register("gateway", "w")

            async def told() -> bool:
                return any("does not follow" in warning for warning in await services.warnings("gateway"))

            await eventually(told)
            await channel.close()


async def test_a_call_that_comes_before_the_first_connection_waits_for_it() -> None:
    stubs: dict[str, Any] = {
        "indexer": indexer_pb2_grpc.IndexerStub,
        "scheduler": scheduler_pb2_grpc.SchedulerStub,
        "gateway": gateway_pb2_grpc.GatewayStub,
    }
    async with nats_server() as server, AsyncExitStack() as stack:
        relay = NatsRelay(server.port, 0, lambda subject: False)
        await relay.start()
        stack.push_async_callback(relay.close)
        relay.answers.clear()
        flags = ("--nats-server", relay.url)
        started = await stack.enter_async_context(
            together(*(running(f"kvscout_{name}.main", *flags) for name in stubs))
        )
        registering = []
        for (name, stub), process in zip(stubs.items(), started, strict=True):
            channel = open_channel(process.address)
            stack.push_async_callback(channel.close)
            worker = workers_pb2.Worker(worker_id=name, model="m", block_size=16)
            request = workers_pb2.RegisterWorkerRequest(worker=worker)
            registering.append(asyncio.create_task(call(stub(channel).RegisterWorker, request, timeout=SECONDS)))
            # An answer to what was asked later: the call has come.
            await call(stub(channel).ListWorkers, workers_pb2.ListWorkersRequest(), timeout=SECONDS)
        assert not any(task.done() for task in registering)
        relay.answers.set()
        assert all(answer.created for answer in await asyncio.gather(*registering))


async def test_services_start_and_stop_without_their_nats() -> None:
    async with nats_server() as server:
        await server.kill()
        flags = ("--nats-server", server.url)
        modules = ("kvscout_indexer.main", "kvscout_scheduler.main", "kvscout_gateway.main")
        async with together(*(running(module, *flags) for module in modules)) as started:
            assert [process.ready["ready"] for process in started] == [True] * 3
            # One that had its NATS and lost it must end, too.
            await server.start()
            channel = open_channel(started[0].address)
            stub: indexer_pb2_grpc.IndexerAsyncStub = indexer_pb2_grpc.IndexerStub(channel)

            async def quiet() -> bool:
                status = await call(stub.GetStatus, types_pb2.GetStatusRequest(tenant="*"), timeout=SECONDS)
                return not any("NATS" in warning for warning in status.service.warnings)

            await eventually(quiet)
            await channel.close()
            await server.kill()
            assert [await process.stop() for process in started] == [0, 0, 0]


async def test_a_service_is_not_healthy_before_it_knows_the_workers(tmp_path: Path) -> None:
    async with running_services(tmp_path) as services, AsyncExitStack() as stack:
        await services.register("scheduler", "lasting")
        services.nats.pause()
        flags = ("--nats-server", services.nats.url, "--namespace", "test")
        late = await stack.enter_async_context(running("kvscout_scheduler.main", *flags))
        channel = open_channel(late.address)
        stack.push_async_callback(channel.close)
        scheduler = scheduler_pb2_grpc.SchedulerStub(channel)
        try:
            assert not await _serves(channel)
        finally:
            services.nats.resume()
        await eventually(lambda: _serves(channel), what="a healthy scheduler")
        listed = await call(scheduler.ListWorkers, workers_pb2.ListWorkersRequest(), timeout=SECONDS)
        assert [entry.worker.worker_id for entry in listed.workers] == ["lasting"]


async def test_without_nats_a_service_is_healthy_all_the_same_after_a_while() -> None:
    async with AsyncExitStack() as stack:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            nats = f"nats://127.0.0.1:{nobody.getsockname()[1]}"
            late = await stack.enter_async_context(running("kvscout_scheduler.main", "--nats-server", nats))
            channel = open_channel(late.address)
            stack.push_async_callback(channel.close)
            assert not await _serves(channel)
            await eventually(lambda: _serves(channel), what="a healthy scheduler")


async def _serves(channel: grpc.aio.Channel) -> bool:
    found = await call(health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest(), timeout=SECONDS)
    return bool(found.status == health_pb2.HealthCheckResponse.SERVING)
