"""The processes of `make soak-stack`: NATS, two of each service, a bridge, and engines of every kind.

Of the two of each service the first lives through the whole run, and is what memory is measured of; the second is
killed, stopped and started again, as one engine and NATS are.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from chaos.indexers import Indexer
from chaos.members import Member, kill_all
from support.free_ports import free_ports
from support.nats_server import NatsServer
from support.processes import eventually

from kvscout.v1 import gateway_pb2_grpc, scheduler_pb2_grpc, types_pb2, workers_pb2
from kvscout_common.errors import Unavailable
from kvscout_common.rpc.channel import call, open_channel
from soak_stack.figures import Figures

MODEL, VLLM_PAIR, SGLANG_PAIR = "mock", "vllm-pair", "sglang-pair"
"""Of aggregated engines, of a prefill and a decode engine of vLLM, of the same of SGLang."""
ADAPTER = "style"
"""A LoRA adapter that an engine has loaded: requests name it as their model."""
BLOCK_SIZE = 16
CACHE_BLOCKS = 512
"""Of a rank: full in seconds, so that what the index holds is as much in every window."""
CALL_SECONDS = 20.0
GAUGES = {
    "kvscout_tasks": "tasks",
    "kvscout_rpc_calls": "calls",
    "kvscout_python_allocations": "allocations",
    "kvscout_index_bytes": "index bytes",
}
_ROLES = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE, "": types_pb2.ROLE_AGGREGATED}
_KINDS = {"sglang": workers_pb2.ENGINE_KIND_SGLANG, "vllm": workers_pb2.ENGINE_KIND_MOCK}


class Engine:
    """A mocker, on other ports each time that it starts.

    Args:
        name: Its worker id.
        model: What it serves.
        ranks: Data-parallel ones.
        role: "" = aggregated.
        api: "vllm" or "sglang".
        adapters: Which it has loaded.
    """

    def __init__(
        self, name: str, model: str = MODEL, *, ranks: int = 1, role: str = "", api: str = "vllm", adapters: str = ""
    ) -> None:
        loaded = ("--lora", adapters) if adapters else ()
        self.member = Member(
            name, "kvscout_mocker.main", "--port", "0", "--events-port", "0", "--replay-port", "0",
            "--bootstrap-port", "0", "--model", model, "--dp-size", str(ranks), "--role", role or "aggregated",
            "--api", api, "--speedup", "20", "--num-gpu-blocks", str(CACHE_BLOCKS), "--buffer-steps", "500",
            "--block-size", str(BLOCK_SIZE), *loaded,
        )  # fmt: skip
        self._worker = workers_pb2.Worker(
            worker_id=name, model=model, role=_ROLES[role], engine=_KINDS[api], block_size=BLOCK_SIZE, dp_size=ranks,
            total_kv_blocks=CACHE_BLOCKS - 1, can_fallback=role == "decode",
            adapters=[workers_pb2.Adapter(name=adapters, lora_id=1)] if adapters else [],
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Of its HTTP API."""
        return f"http://127.0.0.1:{self.member.ready['http_port']}"

    @property
    def worker(self) -> workers_pb2.Worker:
        """Its registration."""
        worker = workers_pb2.Worker()
        worker.CopyFrom(self._worker)
        worker.http_endpoint = self.url
        for rank in self.member.ready["ranks"]:
            worker.event_endpoints.add(dp_rank=rank["dp_rank"], endpoint=rank["events"], replay_endpoint=rank["replay"])
        if worker.engine == workers_pb2.ENGINE_KIND_SGLANG and worker.role == types_pb2.ROLE_PREFILL:
            worker.bootstrap_host, worker.bootstrap_port = "127.0.0.1", self.member.ready["bootstrap_port"]
        return worker

    async def blocks(self) -> dict[int, int] | None:
        """Copies of each block that its ranks hold, by the engine's hash; None = some are not published yet."""
        ranks = json.loads(await asyncio.to_thread(page, f"{self.url}/mock/kv_blocks"))
        found = Counter[int]()
        for rank in ranks.values():
            if rank["unpublished"]:
                return None
            found.update({int(block): copies for block, copies in rank["blocks"].items()})
        return dict(found)


class World:
    """All processes."""

    def __init__(self, folder: Path) -> None:
        self.nats = NatsServer(folder)
        self.bridged = Engine("e1")
        """A bridge registers it and brings its events."""
        self.registered = [
            Engine("e0", ranks=2, adapters=ADAPTER),
            Engine("e2", api="sglang"),
            *(Engine(f"v{role[0]}", VLLM_PAIR, role=role) for role in ("prefill", "decode")),
            *(Engine(f"s{role[0]}", SGLANG_PAIR, role=role, api="sglang") for role in ("prefill", "decode")),
        ]
        self.engines = {engine.member.name: engine for engine in (self.bridged, *self.registered)}
        self._observed = ("--metrics-port", "0", "--log-level", "warning", "--nats-server", self.nats.url)
        ports = free_ports(8)
        # What their engines no longer have to replay, one that starts anew is told by the other.
        self.indexers = [
            Indexer(number, "--peers", f"127.0.0.1:{peer}", *self._observed, port=port)
            for number, (port, peer) in enumerate(zip(ports[6:], reversed(ports[6:]), strict=True))
        ]
        self._schedulers = [f"127.0.0.1:{port}" for port in ports[:2]]
        self.gateway_addresses = [f"127.0.0.1:{port}" for port in ports[2:4]]
        self.http_urls = [f"http://127.0.0.1:{port}" for port in ports[4:6]]
        self.services = {f"indexer-{number}": indexer.member for number, indexer in enumerate(self.indexers)}
        self._add_schedulers(ports[:2])
        self._add_gateways(ports[2:4], ports[4:6])
        self._channels: list[Any] = []
        self.gateways: list[Any] = []
        self.schedulers: list[Any] = []

    def _add_schedulers(self, ports: list[int]) -> None:
        for number, port in enumerate(ports):
            name = f"scheduler-{number}"
            replica = ("--router-replica-sync", "--replica-id", name, "--worker-grace-seconds", "2")
            self.services[name] = Member(name, "kvscout_scheduler.main", "--port", str(port), *replica, *self._observed)

    def _add_gateways(self, ports: list[int], http_ports: list[int]) -> None:
        helpers = [flag for indexer in self.indexers for flag in ("--indexer", f"127.0.0.1:{indexer.port}")]
        helpers += [flag for address in self._schedulers for flag in ("--scheduler", address)]
        timeouts = ("--engine-first-output-seconds", "3", "--engine-idle-seconds", "3", "--migration-limit", "3")
        for number, (port, http_port) in enumerate(zip(ports, http_ports, strict=True)):
            self.services[f"gateway-{number}"] = Member(
                f"gateway-{number}", "kvscout_gateway.main", "--port", str(port), "--http-port", str(http_port),
                *timeouts, *helpers, *self._observed,
            )  # fmt: skip

    def _add_bridge(self) -> None:
        worker = self.bridged.worker
        [events] = worker.event_endpoints
        self.services["bridge"] = Member(
            "bridge", "kvscout_bridge.main", "--port", "0", "--transport", "jetstream", "--engine", "mock",
            "--worker-id", worker.worker_id, "--model", MODEL, "--block-size", str(BLOCK_SIZE),
            "--http-endpoint", worker.http_endpoint, "--event-endpoint", events.endpoint,
            "--replay-endpoint", events.replay_endpoint, *self._observed,
        )  # fmt: skip

    @property
    def members(self) -> dict[str, Member]:
        """Every process but NATS, by name."""
        return {**self.services, **{name: engine.member for name, engine in self.engines.items()}}

    @property
    def stubs(self) -> list[Any]:
        """Of every service that knows workers."""
        indexers: list[Any] = [indexer.stub for indexer in self.indexers]
        return [*indexers, *self.schedulers, *self.gateways]

    async def start(self) -> None:
        """Starts everything; returns when every service knows every engine."""
        await asyncio.gather(self.nats.start(), *(engine.member.start() for engine in self.engines.values()))
        self._add_bridge()
        await asyncio.gather(*(member.start() for member in self.services.values()))
        self.gateways = [gateway_pb2_grpc.GatewayStub(self._channel(address)) for address in self.gateway_addresses]
        self.schedulers = [scheduler_pb2_grpc.SchedulerStub(self._channel(address)) for address in self._schedulers]
        for engine in self.registered:
            await self.register(engine.worker)
        await eventually(self.has_engines_only, what="the workers")

    async def close(self) -> None:
        """Ends everything."""
        await asyncio.gather(*(channel.close() for channel in self._channels))
        await asyncio.gather(*(indexer.close() for indexer in self.indexers))
        await kill_all(list(self.members.values()))
        await self.nats.kill()

    def _channel(self, address: str) -> Any:
        channel = open_channel(address)
        self._channels.append(channel)
        return channel

    async def register(self, worker: workers_pb2.Worker, *, lease_seconds: int = 0) -> None:
        """Registers a worker, for every service."""
        request = workers_pb2.RegisterWorkerRequest(tenant=worker.tenant, worker=worker, lease_seconds=lease_seconds)
        await call(self.gateways[0].RegisterWorker, request, timeout=CALL_SECONDS)

    async def has_engines_only(self) -> bool:
        """Whether every service knows the engines, and no other worker."""
        request = workers_pb2.ListWorkersRequest(tenant="*")
        for stub in self.stubs:
            try:
                listed = await call(stub.ListWorkers, request, timeout=CALL_SECONDS)
            except Unavailable:
                return False
            if {entry.worker.worker_id for entry in listed.workers} != set(self.engines):
                return False
        return True

    async def figures(self) -> dict[str, Figures]:
        """Of every process, as it is now."""
        return {name: await asyncio.to_thread(_figures, member) for name, member in self.members.items()}


def page(url: str) -> str:
    """What a page says; blocks."""
    with urllib.request.urlopen(url, timeout=CALL_SECONDS) as answer:
        text: str = answer.read().decode()
    return text


def _figures(member: Member) -> Figures:
    process = psutil.Process(member.pid)
    figures = {
        "RSS": float(process.memory_info().rss),
        "descriptors": float(process.num_fds()),
        "threads": float(process.num_threads()),
    }
    if "metrics_port" not in member.ready:
        return figures
    lines = page(f"http://127.0.0.1:{member.ready['metrics_port']}/metrics").splitlines()
    samples = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    figures["series"] = float(len(samples))
    for name, _, value in samples:
        if what := GAUGES.get(name.partition("{")[0]):
            figures[what] = figures.get(what, 0.0) + float(value)
    if "index bytes" in figures:
        figures["RSS but index"] = figures["RSS"] - figures.pop("index bytes")
    return figures
