"""Workers that serve and of which no indexer hears: real helpers and engines, the gateway in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from support.gateway_stack import CALL_SECONDS, GatewayClient, fresh_prompt, mocker_worker, together
from support.mocker_process import running_mocker
from support.processes import eventually, running

from kvscout.v1 import indexer_pb2, types_pb2, workers_pb2
from kvscout_common.rpc.channel import call, open_channel
from kvscout_common.rpc.guard import Guard
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.main import build
from kvscout_gateway.upstreams.indexer import blindness, check

BLIND = indexer_pb2.SOURCE_STATE_BLIND
LIVE = indexer_pb2.SOURCE_STATE_LIVE
DISCONNECTED = indexer_pb2.SOURCE_STATE_DISCONNECTED


class World:
    """A gateway of this process, its helpers, and two engines."""

    def __init__(self, client: GatewayClient, *, indexer: str, metrics: CollectorRegistry, silent: str) -> None:
        self.client = client
        self.indexer = indexer
        self._metrics = metrics
        self.silent = silent
        """Where nobody publishes."""

    async def states(self) -> dict[str, indexer_pb2.SourceStatus]:
        """What the indexer shows, by worker."""
        status = await call(self.client.indexer.GetStatus, types_pb2.GetStatusRequest(), timeout=CALL_SECONDS)
        return {source.worker.worker_id: source for source in status.sources}

    async def warnings(self) -> list[str]:
        """What the gateway says of blind workers."""
        return [one for one in (await self.client.status()).service.warnings if "blind" in one]

    def blind_ranks(self) -> float | None:
        """The gateway's gauge for the indexer."""
        return self._metrics.get_sample_value("kvscout_blind_worker_ranks", {"indexer": self.indexer})

    async def until_blind(self, worker_id: str) -> None:
        """Waits until the indexer shows a worker as blind."""

        async def blind() -> bool:
            return (await self.states())[worker_id].state == BLIND

        await eventually(blind, what=f"{worker_id} blind")


@asynccontextmanager
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """Workers "silent", "idle" and "control", registered where nobody publishes, and "heard", whose events come."""
    monkeypatch.setattr(check, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(blindness, "BLIND_SECONDS", 0.0)
    processes = (
        running("kvscout_indexer.main"),
        running("kvscout_scheduler.main"),
        running_mocker(),
        running_mocker(),
    )
    # Bound and not listened on, so that nobody else can publish there meanwhile.
    with closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))
        silent = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        async with together(*processes) as (indexer, scheduler, first, second):
            app = await build(
                GatewayConfig(
                    indexers=((indexer.address,),),
                    schedulers=(scheduler.address,),
                    indexer_timeout_seconds=2.0,
                )
            )
            server = grpc.aio.server(interceptors=(Guard(),))
            for _, add in app.services:
                add(server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            client = GatewayClient(f"127.0.0.1:{port}", scheduler.address, indexer.address)
            assert app.close is not None
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(make(), name=name) for name, make in app.tasks.items()]
                    for worker_id, mocker in (
                        ("heard", second),
                        ("silent", first),
                        ("idle", first),
                        ("control", first),
                    ):
                        worker = mocker_worker(worker_id, mocker)
                        if worker_id != "heard":
                            where = workers_pb2.EventEndpoint(endpoint=silent)
                            del worker.event_endpoints[:]
                            worker.event_endpoints.append(where)
                        await client.register(worker)
                    yield World(client, indexer=indexer.address, metrics=app.metrics, silent=silent)
                    for task in tasks:
                        task.cancel()
            finally:
                await client.close()
                await server.stop(None)
                await app.close()


async def is_serving(address: str) -> bool:
    async with open_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_a_worker_that_serves_and_is_never_heard_is_blind_and_the_gateway_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch) as here:
        client = here.client

        # Without a complete block, and broken off: neither brings events for certain.
        await client.generate(fresh_prompt(15), pinned_worker_id="silent")
        broken_off = client.start(fresh_prompt(160), pinned_worker_id="silent", max_tokens=20_000)
        async for message in broken_off:
            if message.token_ids:
                break
        broken_off.cancel()
        await client.until_idle()
        # One that does, later: it was told with all that there was to tell of the others.
        await client.generate(fresh_prompt(160), pinned_worker_id="control")
        await here.until_blind("control")
        states = await here.states()
        assert {states[worker].reason for worker in ("silent", "idle")} == {f"nothing answers at {here.silent}"}

        prompt = fresh_prompt(160)
        for worker in ("silent", "heard"):
            for _ in range(3):  # the last two are cached
                await client.generate(prompt, pinned_worker_id=worker)
        await here.until_blind("silent")
        states = await here.states()
        assert states["silent"].reason == (
            f"1 request was served and no event ever came: are KV events switched on at {here.silent}?"
        )
        assert (states["heard"].state, states["idle"].state) == (LIVE, DISCONNECTED)
        assert await is_serving(here.indexer)

        async def warned() -> list[str] | None:
            warnings = sorted(await here.warnings())
            return warnings if len(warnings) > 1 else None

        assert await eventually(warned) == [
            f"worker {worker}/0 is blind at indexer {here.indexer}: {states[worker].reason}"
            for worker in ("control", "silent")
        ]
        assert here.blind_ranks() == 2.0

        # Once it is registered where it publishes, it is as any other.
        mended = (await client.known())["heard"].worker
        mended.worker_id = "silent"
        await client.register(mended)

        async def seen() -> bool:
            warnings = await here.warnings()
            return (await here.states())["silent"].state == LIVE and not any("silent" in one for one in warnings)

        await eventually(seen)
        assert here.blind_ranks() == 1.0
