"""Real services with tokens, a tenant that attacks them, and a tenant of which nothing may change or become known."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvscout.v1 import (
    bridge_pb2,
    bridge_pb2_grpc,
    events_pb2,
    gateway_pb2,
    gateway_pb2_grpc,
    indexer_pb2,
    indexer_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    workers_pb2,
)
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.rpc.channel import open_channel
from support.mocker_process import running_mocker
from support.nats_server import nats_server
from support.process_metrics import scrape
from support.processes import Running, eventually, running

HOSTILE, PROBE = "hostile", "probe"
SECRET = "secret-of-probe"
"""In the name and the address of a worker of the probe's tenant: no answer to the hostile one may have it."""
TOKENS = {
    "admin": ("admin", "*"),
    "probe": ("admin", PROBE),
    "hostile-viewer": ("viewer", HOSTILE),
    "hostile-worker": ("worker", HOSTILE),
    "hostile-client": ("client", HOSTILE),
    "hostile-admin": ("admin", HOSTILE),
}
NOBODY = "nobody"
"""Has no token."""
CALLERS = (NOBODY, *(name for name in TOKENS if name.startswith(HOSTILE)))
SERVICES = {
    "indexer": indexer_pb2.DESCRIPTOR,
    "scheduler": scheduler_pb2.DESCRIPTOR,
    "gateway": gateway_pb2.DESCRIPTOR,
    "bridge": bridge_pb2.DESCRIPTOR,
}
STUBS: dict[str, Any] = {
    "indexer": indexer_pb2_grpc.IndexerStub,
    "scheduler": scheduler_pb2_grpc.SchedulerStub,
    "gateway": gateway_pb2_grpc.GatewayStub,
    "bridge": bridge_pb2_grpc.BridgeStub,
}
REGISTRIES = ("gateway", "indexer", "scheduler")
"""Services that have workers registered."""
CALL_SECONDS = 20.0
MAX_RSS_BYTES = 700 << 20
"""Of a service: several times what it has with all that the hostile tenant can register and book."""
MAX_LOG_BYTES = 64 << 20
TROUBLE = re.compile(rb"Traceback|\bERROR\b|\bCRITICAL\b|never retrieved|never awaited")
BLOCKS = [11, 12, 13]


def token_of(caller: str) -> str:
    """Its bearer token."""
    return f"of-{caller}"


@dataclass(slots=True)
class Service:
    """A process, and how far its log was read."""

    name: str
    running: Running
    log: IO[bytes]
    read: int = 0

    def trouble(self) -> str:
        """What is new in its log that no caller may bring about; "" = nothing."""
        self.log.seek(self.read)
        text = self.log.read()
        self.read += len(text)
        found = TROUBLE.search(text)
        return text[max(0, found.start() - 500) : found.start() + 3_000].decode(errors="replace") if found else ""


@dataclass(slots=True)
class HostileWorld:
    """The services, as their callers see them."""

    services: dict[str, Service]
    channels: dict[tuple[str, str], grpc.aio.Channel]
    """By service and caller."""
    registered: dict[str, bytes] = field(default_factory=dict)
    """The probe's workers at each service that knows them, as they were at first."""

    def stub(self, service: str, make: Any, caller: str = "probe") -> Any:
        """A stub of a caller."""
        return make(self.channels[service, caller])

    async def prepare(self) -> None:
        """Registers the probe's workers; one has blocks and a request."""
        gateway, indexer, scheduler = self._stubs()
        address = f"http://127.0.0.1:9/{SECRET}"
        kept = workers_pb2.Worker(
            worker_id="probe-w", model="probe-m", tenant=PROBE, block_size=4, engine=workers_pb2.ENGINE_KIND_CUSTOM,
            transport=workers_pb2.EVENT_TRANSPORT_GRPC, total_kv_blocks=1000,
        )  # fmt: skip
        hidden = workers_pb2.Worker(
            worker_id=SECRET, model="hidden-m", tenant=PROBE, block_size=4, http_endpoint=address
        )
        for worker in (kept, hidden):
            request = workers_pb2.RegisterWorkerRequest(tenant=PROBE, worker=worker)
            await gateway.RegisterWorker(request, timeout=CALL_SECONDS)
        publish = indexer.PublishEvents(timeout=CALL_SECONDS)
        source = events_pb2.KvEventBatch(
            version=1, worker_id="probe-w", model="probe-m", tenant=PROBE, block_size=4, epoch=1
        )
        await publish.write(source)
        await publish.read()
        source.event_id = 0
        source.events.add().stored.MergeFrom(
            events_pb2.BlocksStored(engine_hashes=[101, 102, 103], local_hashes=BLOCKS)
        )
        await publish.write(source)
        await eventually(self._overlap, what="the probe's blocks")
        await publish.done_writing()
        await scheduler.SelectAndReserve(
            scheduler_pb2.SelectRequest(
                tenant=PROBE, model="probe-m", request_id="probe-r", block_hashes=BLOCKS, isl_tokens=12,
                lease_seconds=600,
            ),
            timeout=CALL_SECONDS,
        )  # fmt: skip
        thresholds = types_pb2.SetBusyThresholdsRequest(
            tenant=PROBE, model="probe-m", active_prefill_tokens_threshold=5_000
        )
        await scheduler.SetBusyThresholds(thresholds, timeout=CALL_SECONDS)
        self.registered = {service: await self._workers(service) for service in REGISTRIES}

    def _stubs(self) -> tuple[Any, Any, Any]:
        gateway, indexer, scheduler = (self.stub(name, STUBS[name]) for name in REGISTRIES)
        return gateway, indexer, scheduler

    async def _workers(self, service: str) -> bytes:
        answer = await self.stub(service, STUBS[service]).ListWorkers(
            workers_pb2.ListWorkersRequest(tenant=PROBE), timeout=CALL_SECONDS
        )
        return b"".join(entry.worker.SerializeToString(deterministic=True) for entry in answer.workers)

    async def _overlap(self) -> bool:
        request = indexer_pb2.FindMatchesRequest(tenant=PROBE, model="probe-m", block_hashes=BLOCKS)
        overlaps = (await self._stubs()[1].FindMatches(request, timeout=CALL_SECONDS)).overlaps
        return (list(overlaps.worker_ids), list(overlaps.device_blocks)) == (["probe-w"], [len(BLOCKS)])

    async def check(self) -> None:
        """Looks whether all is well.

        Raises:
            AssertionError: It is not.
        """
        for service in self.services.values():
            name, process = service.name, service.running.process
            trouble = service.trouble()
            assert not trouble, f"log of {name}: … {trouble} …"
            assert process.returncode is None, f"{name} ended with {process.returncode}"
            assert service.read < MAX_LOG_BYTES, f"{name} has logged {service.read >> 20} MB"
            rss = psutil.Process(process.pid).memory_info().rss
            assert rss < MAX_RSS_BYTES, f"{name} takes {rss >> 20} MB"
            health = health_pb2_grpc.HealthStub(self.channels[name, NOBODY])
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, f"{name} serves no more"
        await asyncio.gather(self._check_operator(), self._check_probe())

    async def _check_operator(self) -> None:
        """Who runs the services sees all that the hostile tenant has brought about."""
        everyone = types_pb2.GetStatusRequest(tenant="*")
        all_workers = workers_pb2.ListWorkersRequest(tenant="*")
        of_hostile = scheduler_pb2.ListActiveRequestsRequest(tenant=HOSTILE)
        stubs = {name: self.stub(name, make, "admin") for name, make in STUBS.items()}
        await asyncio.gather(
            *(stub.GetStatus(everyone, timeout=CALL_SECONDS) for stub in stubs.values()),
            *(stubs[name].ListWorkers(all_workers, timeout=CALL_SECONDS) for name in REGISTRIES),
            stubs["scheduler"].ListActiveRequests(of_hostile, timeout=CALL_SECONDS),
            *(scrape(service.running) for service in self.services.values()),
        )

    async def _check_probe(self) -> None:
        gateway, _, scheduler = self._stubs()
        for service, before in self.registered.items():
            assert await self._workers(service) == before, f"the probe's workers have changed at {service}"
        assert await self._overlap(), "the probe's blocks have changed"
        named = scheduler_pb2.RequestRef(tenant=PROBE, model="probe-m", request_id="probe-r")
        renewal = scheduler_pb2.RenewRequest(tenant=PROBE, requests=[named], lease_seconds=600)
        assert not (await scheduler.Renew(renewal, timeout=CALL_SECONDS)).unknown, "the probe's request has ended"
        asked = scheduler_pb2.ListActiveRequestsRequest(tenant=PROBE)
        active = (await scheduler.ListActiveRequests(asked, timeout=CALL_SECONDS)).requests
        assert [(a.request.request_id, a.worker.worker_id) for a in active] == [("probe-r", "probe-w")]
        loads = scheduler_pb2.SchedulerGetPotentialLoadsRequest(tenant=PROBE, model="probe-m")
        (load,) = (await scheduler.GetPotentialLoads(loads, timeout=CALL_SECONDS)).loads
        assert (load.active_requests, load.busy, load.draining, load.cooldown_seconds) == (1, False, False, 0.0)
        of_model = types_pb2.GetBusyThresholdsRequest(tenant=PROBE, model="probe-m")
        read = await scheduler.GetBusyThresholds(of_model, timeout=CALL_SECONDS)
        assert read.thresholds.active_prefill_tokens_threshold == 5_000
        route = gateway_pb2.RouteRequest(tenant=PROBE, model="probe-m", block_hashes=BLOCKS, block_size=4)
        assert (await gateway.Route(route, timeout=CALL_SECONDS)).worker.worker_id == "probe-w"


@asynccontextmanager
async def hostile_world() -> AsyncIterator[HostileWorld]:
    """All services for the length of a block; they must end with 0 then. One has real work: the hostile's mocker."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvscout-fuzz-")))
        entries = (
            f"{{token: {token_of(name)}, role: {role}, tenant: '{tenant}'}}" for name, (role, tenant) in TOKENS.items()
        )
        for name, text in {
            "tokens.yaml": f"tokens: [{', '.join(entries)}]",
            **{n: token_of(n) for n in TOKENS},
        }.items():
            (folder / name).touch(mode=0o600)
            (folder / name).write_text(text)
        services: dict[str, Service] = {}

        async def serve(name: str, *flags: str) -> str:
            log = stack.enter_context((folder / f"{name}.log").open("w+b"))
            tokens = ("--auth-tokens", str(folder / "tokens.yaml"))
            started = await stack.enter_async_context(running(f"kvscout_{name}.main", *tokens, *flags, stderr=log))
            services[name] = Service(name, started, log)
            return started.address

        nats = await stack.enter_async_context(nats_server(jetstream=False))
        mocker = await stack.enter_async_context(running_mocker("--model", "mock"))
        indexer = await serve("indexer")
        scheduler = await serve("scheduler")
        own = ("--token-file", str(folder / "admin"))
        await serve("gateway", "--indexer", indexer, "--scheduler", scheduler, *own, "--indexer-timeout-ms", "2000")
        await serve(
            "bridge", "--nats-server", nats.url, "--transport", "nats-core", "--no-register", "--tenant", HOSTILE,
            "--worker-id", "live", "--model", "mock", "--block-size", "16",
            "--event-endpoint", mocker.ranks[0]["events"], "--replay-endpoint", mocker.ranks[0]["replay"],
        )  # fmt: skip
        channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        for name, service in services.items():
            for caller in (NOBODY, *TOKENS):
                security = ClientSecurity(token_file=folder / caller) if caller in TOKENS else ClientSecurity()
                channels[name, caller] = channel = open_channel(service.running.address, security)
                stack.push_async_callback(channel.close)
        world = HostileWorld(services, channels)
        worker = workers_pb2.Worker(
            worker_id="live", model="mock", tenant=HOSTILE, block_size=16, engine=workers_pb2.ENGINE_KIND_MOCK,
            http_endpoint=mocker.url,
        )  # fmt: skip
        await world.stub("gateway", gateway_pb2_grpc.GatewayStub, "hostile-admin").RegisterWorker(
            workers_pb2.RegisterWorkerRequest(tenant=HOSTILE, worker=worker), timeout=CALL_SECONDS
        )
        await world.prepare()
        yield world
