"""`make chaos-gateway`: workers, helpers and gateways killed and stopped at random under load.

Two prefill, two decode workers and an aggregated one, an indexer, a scheduler and two gateways; clients ask both, each
for its own. At any moment at most one engine is away, so that every request has a live worker: none that had not yet
been answered in part may fail, unless its own gateway was struck. When the faults end, what is booked and held must be
nothing within the owner timeout, and no process may keep descriptors. CHAOS_SEED repeats the choice of faults.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import grpc
import yaml
from free_ports import free_ports

from chaos.members import Member, kill_all
from kvscout.v1 import gateway_pb2, gateway_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.channel import call, open_channel

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("CHAOS_SEED", SystemRandom().randrange(2**32)))
MODEL, BLOCK_SIZE = "mock", 16
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode", "a0": "aggregated"}
CLIENTS = 4
"""Of each gateway."""
CALL_SECONDS = 30.0
LEASE_SECONDS = 3.0
"""For which a prefill engine keeps blocks that nobody comes for."""
OWNER_SECONDS = 10.0
SETTLE_SECONDS = OWNER_SECONDS + 20.0
"""The owner timeout, and what a busy machine adds."""
IDLE_SECONDS = 5.0
"""After which idle connections are closed."""
SPARE_DESCRIPTORS = 8
"""More than before is a leak."""
AWAY = (0.3, 3.0)
"""Seconds for which somebody is stopped, or dead."""


@dataclass(slots=True)
class Failure:
    """A request that failed."""

    gateway: str
    began: float
    ended: float
    tokens: int
    text: str


class World:
    """All processes, and what they are asked."""

    def __init__(self, folder: Path, rng: Random) -> None:
        self._folder = folder
        self._rng = rng
        ports = iter(free_ports(2 + 2 + 3 * len(ROLES)))
        indexer, scheduler, *gateways = (next(ports) for _ in range(4))
        self.addresses = {"scheduler": f"127.0.0.1:{scheduler}"} | {
            f"g{index}": f"127.0.0.1:{port}" for index, port in enumerate(gateways)
        }
        self.engines = {name: self._engine(name, next(ports), next(ports), next(ports)) for name in ROLES}
        workers = ("--workers-file", str(folder / "workers.yaml"), "--metrics-port", "-1", "--log-level", "warning")
        helpers = ("--indexer", f"127.0.0.1:{indexer}", "--scheduler", f"127.0.0.1:{scheduler}")
        patience = (
            "--engine-first-output-seconds",
            "1.5",
            "--engine-idle-seconds",
            "2",
            "--engine-connect-seconds",
            "1",
        )
        self.services = {
            "indexer": Member("indexer", "kvscout_indexer.main", "--port", str(indexer), *workers),
            "scheduler": Member("scheduler", "kvscout_scheduler.main", "--port", str(scheduler), *workers),
        } | {
            f"g{index}": Member(
                f"g{index}", "kvscout_gateway.main", "--port", str(port), "--http-port", "0",
                *helpers, *patience, *workers, "--migration-limit", "3", "--conditional-disagg",
            )
            for index, port in enumerate(gateways)
        }  # fmt: skip
        self.struck: dict[str, list[tuple[float, float]]] = {name: [] for name in self.services}
        """When each service was not itself: from when to when."""
        self.answered = Counter[str]()
        self.failures: list[Failure] = []

    @property
    def members(self) -> list[Member]:
        """All processes."""
        return [*(member for member, _ in self.engines.values()), *self.services.values()]

    async def start(self) -> None:
        """Engines first: who serves them is told where they are."""
        await asyncio.gather(*(member.start() for member, _ in self.engines.values()))
        entries = [entry for _, entry in self.engines.values()]
        (self._folder / "workers.yaml").write_text(yaml.safe_dump({"workers": entries}))
        await asyncio.gather(*(member.start() for member in self.services.values()))

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

    async def ask(self, gateway: str, seed: int) -> None:
        """One client: a request after the other until cancelled, each of them to its end."""
        rng, channel = Random(seed), open_channel(self.addresses[gateway])
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        try:
            while True:
                await self._request(stub, gateway, rng)
                await asyncio.sleep(rng.uniform(0.0, 0.1))
        finally:
            await channel.close()

    async def _request(self, stub: Any, gateway: str, rng: Random) -> None:
        topic = rng.randrange(8)
        prompt = [topic * 10_000 + position for position in range(rng.randint(1, 40) * BLOCK_SIZE)]
        prompt += [rng.randrange(100_000, 900_000) for _ in range(rng.randint(1, 64))]
        request = gateway_pb2.GenerateRequest(
            model=MODEL, token_ids=prompt, stop_conditions=gateway_pb2.StopConditions(max_tokens=rng.randint(1, 30))
        )
        began, tokens = time.monotonic(), 0
        cancelled_after = rng.randint(1, 5) if rng.random() < 0.1 else 0
        running = stub.Generate(request, timeout=CALL_SECONDS, wait_for_ready=True)
        try:
            async for message in running:
                tokens += len(message.token_ids)
                if cancelled_after and tokens >= cancelled_after:
                    running.cancel()
                    self.answered["cancelled"] += 1
                    return
            self.answered["whole"] += 1
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
            self.failures.append(Failure(gateway, began, time.monotonic(), tokens, text))
            await asyncio.sleep(0.2)

    async def strike(self, name: str, member: Member) -> str:
        """Kills and starts again, or stops for a while."""
        kills, seconds = self._rng.random() < 0.5, self._rng.uniform(*AWAY)
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
            member = self.engines[name][0] if name in self.engines else self.services[name]
            print(f"  {seconds - (end - time.monotonic()):5.1f} s  {await self.strike(name, member)}", flush=True)
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))

    def offences(self) -> list[Failure]:
        """Requests that failed with nothing of an answer, on a gateway that was itself all the time."""
        return [
            failure
            for failure in self.failures
            if not failure.tokens
            and not any(
                since <= failure.ended and until >= failure.began for since, until in self.struck[failure.gateway]
            )
        ]

    async def left(self) -> list[str]:
        """What is still booked, held or in flight; "" parts are nothing."""
        found = []
        channel = open_channel(self.addresses["scheduler"])
        try:
            stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
            active = await call(stub.ListActiveRequests, scheduler_pb2.ListActiveRequestsRequest(), timeout=5.0)
            found += [f"booked: {one.request.request_id} on {one.worker.worker_id}" for one in active.requests]
            for role in (types_pb2.ROLE_AGGREGATED, types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE):
                request = scheduler_pb2.PotentialLoadsRequest(model=MODEL, role=role)
                for load in (await call(stub.GetPotentialLoads, request, timeout=5.0)).loads:
                    if load.active_requests or load.active_prefill_tokens or load.active_decode_blocks:
                        found.append(f"load: {load.worker.worker_id}")
        finally:
            await channel.close()
        for name in ("g0", "g1"):
            channel = open_channel(self.addresses[name])
            try:
                gateway: Any = gateway_pb2_grpc.GatewayStub(channel)
                status = await call(gateway.GetStatus, types_pb2.GetStatusRequest(tenant="*"), timeout=5.0)
                found += [f"in flight at {name}: {status.in_flight}"] if status.in_flight else []
            finally:
                await channel.close()
        return found

    def descriptors(self) -> dict[str, int]:
        """Open files of each service."""
        return {name: len(os.listdir(f"/proc/{member.pid}/fd")) for name, member in self.services.items()}


async def run(seconds: float, seed: int) -> list[str]:
    """One run; what is wrong afterwards."""
    rng = Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvscout-chaos-") as folder:
        world = World(Path(folder), rng)
        seeds = itertools.count(rng.randrange(2**31))
        try:
            await world.start()
            clients = [(name, next(seeds)) for name in ("g0", "g1") for _ in range(CLIENTS)]
            await _load(world, clients, asyncio.sleep(2.0))
            await asyncio.sleep(IDLE_SECONDS)
            before = world.descriptors()
            strikes = (
                world.strike_for(list(ROLES), seconds),
                world.strike_for(["indexer", "scheduler"], seconds),
                world.strike_for(["g0", "g1"], seconds),
            )
            await _load(world, clients, asyncio.gather(*strikes))
            for member in world.members:
                member.require_alive()
            wrong = [f"failed with nothing said: {failure}" for failure in world.offences()]
            wrong += await _settled(world)
            await asyncio.sleep(IDLE_SECONDS)
            after = world.descriptors()
            wrong += [
                f"{name} has {after[name]} descriptors, {before[name]} before"
                for name in after
                if after[name] > before[name] + SPARE_DESCRIPTORS
            ]
            partly = sum(failure.tokens > 0 for failure in world.failures)
            silent = len(world.failures) - partly
            print(f"  {dict(world.answered)}; failed: {partly} after a first token, {silent} before it")
            print(f"  descriptors {before} → {after}")
            return wrong
        finally:
            await kill_all(world.members)


async def _load(world: World, clients: list[tuple[str, int]], meanwhile: Any) -> None:
    """Clients ask while something else happens, and end what they asked."""
    asking = [asyncio.create_task(world.ask(name, seed)) for name, seed in clients]
    try:
        await meanwhile
    finally:
        for task in asking:
            task.cancel()
        for outcome in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def _settled(world: World) -> list[str]:
    began = time.monotonic()
    while left := await world.left():
        if time.monotonic() - began > SETTLE_SECONDS:
            return left
        await asyncio.sleep(0.2)
    print(f"  nothing left after {time.monotonic() - began:.1f} s", flush=True)
    return []


async def main() -> int:
    """One run; 0 if nothing is wrong."""
    print(f"CHAOS_SEED={SEED} CHAOS_SECONDS={SECONDS:g}", flush=True)
    wrong = await run(SECONDS, SEED)
    for line in wrong:
        print(f"  WRONG {line}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
