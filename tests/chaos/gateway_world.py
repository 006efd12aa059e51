"""The processes of `make chaos-gateway`, and what they are asked.

Two prefill, two decode workers and an aggregated one, an indexer, a scheduler, two gateways, and an Envoy with the
shipped configuration that both gateways pick endpoints for.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml
from support.envoy_process import ENVOY, Settings
from support.free_ports import free_ports

from chaos.fronts import BLOCK_SIZE, MODEL, Front, GrpcFront, HttpFront, Wanted
from chaos.members import Member
from kvscout.v1 import gateway_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.rpc.channel import call, open_channel

ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "a0": "aggregated"}
GATEWAYS = ("g0", "g1")
ENVOY_NAME = "envoy"
LEASE_SECONDS = 3.0
"""For which a prefill engine keeps blocks that nobody comes for."""
AWAY = (0.3, 3.0)
"""Seconds for which somebody is stopped, or dead."""
GAUGES = {"process_open_fds": "descriptors", "kvscout_tasks": "tasks", "kvscout_rpc_calls": "calls"}
"""Of a service at rest: what must not grow."""


class EnvoyMember(Member):
    """An Envoy; it has no ready line.

    Args:
        config: Its file.
        admin_port: Where it says that it is ready.
    """

    def __init__(self, config: Path, admin_port: int) -> None:
        super().__init__(ENVOY_NAME, "")
        self.command = (str(ENVOY), "-c", str(config), "--concurrency", "1", "-l", "error", "--use-dynamic-base-id")
        self._admin = f"http://127.0.0.1:{admin_port}"

    async def until_ready(self, output: asyncio.StreamReader) -> None:
        """Waits until its listener is open."""

        def is_ready() -> bool:
            try:
                with urllib.request.urlopen(f"{self._admin}/ready", timeout=1.0) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        while not await asyncio.to_thread(is_ready):
            if not self.running:
                await self.ended()
            await asyncio.sleep(0.05)


@dataclass(slots=True)
class Failure:
    """A request that failed."""

    front: str
    through: str
    began: float
    ended: float
    begun: bool
    why: str


class World:
    """All processes, and what they are asked."""

    def __init__(self, folder: Path, rng: Random) -> None:
        self._folder = folder
        self._rng = rng
        ports = iter(free_ports(4 + 3 * len(GATEWAYS) + 3 * len(ROLES)))
        indexer, scheduler, self._envoy_port, admin = (next(ports) for _ in range(4))
        self.addresses = {"scheduler": f"127.0.0.1:{scheduler}"}
        self._http: dict[str, str] = {ENVOY_NAME: f"http://127.0.0.1:{self._envoy_port}"}
        self._pickers: list[str] = []
        workers = ("--workers-file", str(folder / "workers.yaml"), "--metrics-port", "0", "--log-level", "warning")
        self.services = {
            "indexer": Member("indexer", "kvscout_indexer.main", "--port", str(indexer), *workers),
            "scheduler": Member("scheduler", "kvscout_scheduler.main", "--port", str(scheduler), *workers),
        }
        helpers = ("--indexer", f"127.0.0.1:{indexer}", "--scheduler", f"127.0.0.1:{scheduler}")
        for name in GATEWAYS:
            self.services[name] = self._gateway(name, (next(ports), next(ports), next(ports)), (*helpers, *workers))
        self.engines = {name: self._engine(name, next(ports), next(ports), next(ports)) for name in ROLES}
        self._admin_port = admin
        self.services[ENVOY_NAME] = EnvoyMember(folder / "envoy.yaml", admin)
        self.struck: dict[str, list[tuple[float, float]]] = {name: [] for name in self.services}
        """When each service was not itself: from when to when."""
        self.endings: dict[str, Counter[str]] = {}
        self.failures: list[Failure] = []
        self.defects: list[str] = []
        """What services that are no more called errors."""

    def _gateway(self, name: str, ports: tuple[int, int, int], flags: Sequence[str]) -> Member:
        grpc_port, http_port, picker_port = ports
        self.addresses[name] = f"127.0.0.1:{grpc_port}"
        self._http[name] = f"http://127.0.0.1:{http_port}"
        self._pickers.append(f"127.0.0.1:{picker_port}")
        return Member(
            name, "kvscout_gateway.main", "--port", str(grpc_port), "--http-port", str(http_port),
            "--endpoint-picker-port", str(picker_port), "--endpoint-picker-sample-every", "4",
            "--engine-first-output-seconds", "1.5", "--engine-idle-seconds", "2", "--engine-connect-seconds", "1",
            "--migration-limit", "3", "--conditional-disagg", *flags,
        )  # fmt: skip

    def _engine(self, name: str, http: int, events: int, replay: int) -> tuple[Member, dict[str, Any]]:
        role = ROLES[name]
        ports = ("--port", str(http), "--events-port", str(events), "--replay-port", str(replay))
        handover = ("--kv-lease-seconds", str(LEASE_SECONDS), "--kv-transfer-timeout-seconds", "0.5")
        member = Member(
            name, "kvscout_mocker.main", *ports, *handover,
            "--role", role, "--model", MODEL, "--speedup", "5", "--num-gpu-blocks", "1024",
        )  # fmt: skip
        entry = {
            "worker_id": name, "model": MODEL, "engine": "mock", "role": role, "can_fallback": role == "decode",
            "http_endpoint": f"http://127.0.0.1:{http}", "block_size": BLOCK_SIZE, "total_kv_blocks": 1023,
            "event_endpoints": [
                {"dp_rank": 0, "endpoint": f"tcp://127.0.0.1:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
            ],
        }  # fmt: skip
        return member, entry

    def http_address(self, name: str) -> str:
        """Return host:port of a gateway's HTTP front."""
        return self._http[name].removeprefix("http://")

    @property
    def members(self) -> list[Member]:
        """All processes."""
        return [*(member for member, _ in self.engines.values()), *self.services.values()]

    async def start(self) -> None:
        """Engines first: who serves them is told where they are."""
        await asyncio.gather(*(member.start() for member, _ in self.engines.values()))
        entries = [entry for _, entry in self.engines.values()]
        (self._folder / "workers.yaml").write_text(yaml.safe_dump({"workers": entries}))
        # Prompts are computed where a decode worker has it done, never because a proxy goes there.
        served = [entry["http_endpoint"] for entry in entries if entry["role"] != "prefill"]
        envoy = Settings.shipped(self._pickers, [url.removeprefix("http://") for url in served])
        envoy.listen(self._envoy_port, admin_port=self._admin_port)
        (self._folder / "envoy.yaml").write_text(yaml.safe_dump(envoy.root))
        *others, proxy = self.services.values()
        await asyncio.gather(*(member.start() for member in others))
        await proxy.start()

    def fronts(self) -> list[Front]:
        """A client of each way in, two of Envoy's."""
        fronts: list[Front] = []
        for name in GATEWAYS:
            fronts.append(GrpcFront(name, self.addresses[name]))
            fronts.append(HttpFront(f"{name} http", name, self._http[name], begins_with_headers=False))
        for _ in GATEWAYS:
            fronts.append(HttpFront(ENVOY_NAME, ENVOY_NAME, self._http[ENVOY_NAME], begins_with_headers=True))
        return fronts

    async def ask(self, front: Front, seed: int) -> None:
        """One client: a request after the other until cancelled, each of them to its end."""
        rng = Random(seed)
        counts = self.endings.setdefault(front.name, Counter())
        while True:
            began = time.monotonic()
            ending = await front.ask(Wanted.drawn(rng))
            counts[ending.outcome] += 1
            if ending.outcome == "failed":
                now = time.monotonic()
                self.failures.append(Failure(front.name, front.through, began, now, ending.begun, ending.why))
                await asyncio.sleep(0.2)
            await asyncio.sleep(rng.uniform(0.0, 0.1))

    async def strike(self, name: str) -> str:
        """Kills and starts again, or stops for a while."""
        member = self.engines[name][0] if name in self.engines else self.services[name]
        kills, seconds = self._rng.random() < 0.5, self._rng.uniform(*AWAY)
        member.require_alive()
        self.defects += [f"{name}: {one}" for one in member.defects()] if kills else []
        began = time.monotonic()
        if kills:
            await member.kill()
            await asyncio.sleep(seconds)
            await member.start()
        else:
            await member.pause(seconds)
        if name in self.struck:
            self.struck[name].append((began, time.monotonic()))
        return f"{name} {'killed' if kills else 'stopped'} for {seconds:.1f} s"

    async def strike_for(self, names: list[str], seconds: float) -> None:
        """Strikes one of some after the other, at most one at a time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            name = self._rng.choice(names)
            print(f"  {seconds - (end - time.monotonic()):5.1f} s  {await self.strike(name)}", flush=True)
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))

    def offences(self) -> list[Failure]:
        """Requests that failed with nothing of an answer, through a service that was itself all the time."""
        return [
            failure
            for failure in self.failures
            if not failure.begun
            and not any(
                since <= failure.ended and until >= failure.began for since, until in self.struck[failure.through]
            )
        ]

    async def left(self) -> list[str]:
        """What is still booked or in flight."""
        found = []
        channel = open_channel(self.addresses["scheduler"])
        try:
            stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
            active = await call(stub.ListActiveRequests, scheduler_pb2.ListActiveRequestsRequest(), timeout=5.0)
            found += [f"booked: {one.request.request_id} on {one.worker.worker_id}" for one in active.requests]
            for role in (types_pb2.ROLE_AGGREGATED, types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE):
                request = scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=MODEL, role=role)
                for load in (await call(stub.GetPotentialLoads, request, timeout=5.0)).loads:
                    if load.active_requests or load.active_prefill_tokens or load.active_decode_blocks:
                        found.append(f"load: {load.worker.worker_id}")
        finally:
            await channel.close()
        for name in GATEWAYS:
            channel = open_channel(self.addresses[name])
            try:
                gateway: Any = gateway_pb2_grpc.GatewayStub(channel)
                status = await call(gateway.GetStatus, types_pb2.GetStatusRequest(tenant="*"), timeout=5.0)
                found += [f"in flight at {name}: {status.in_flight}"] if status.in_flight else []
            finally:
                await channel.close()
        return found

    async def held(self) -> dict[str, int]:
        """What each service holds at rest, by "service what"."""
        held: dict[str, int] = {}
        for name, member in self.services.items():
            if name == ENVOY_NAME:
                continue
            url = f"http://127.0.0.1:{member.ready['metrics_port']}/metrics"
            for line in (await asyncio.to_thread(_page, url)).splitlines():
                metric, _, value = line.partition(" ")
                if metric in GAUGES:
                    held[f"{name} {GAUGES[metric]}"] = int(float(value))
        return held


def _page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        text: str = answer.read().decode()
    return text
