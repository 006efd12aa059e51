"""What changes while clients ask: guests come and go, adapters are loaded, processes are restarted."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import grpc

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2, workers_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import call
from soak_stack.world import ADAPTER, BLOCK_SIZE, CALL_SECONDS, MODEL, World

LEASE_SECONDS = 2
"""Of a guest."""
GUEST_SECONDS = 0.3
"""Between the arrival of two guests, on average."""
STRIKE_SECONDS = (0.5, 3.0)
"""Between two restarts."""
AWAY_SECONDS = (0.1, 1.0)


class Churn:
    """Everything that comes and goes.

    Args:
        world: Where.
        rng: Of what comes when.
    """

    def __init__(self, world: World, rng: Random) -> None:
        self._world = world
        self._rng = rng
        self._ids = itertools.count()
        self.counts: Counter[str] = Counter()
        self._strikes = itertools.cycle([self._scheduler, self._indexer, self._gateway, self._engine, self._nats])
        self.replaced = frozenset({"scheduler-1", "indexer-1", "gateway-1", "e2"})
        """Processes that are started anew."""
        self.defects: list[str] = []
        """What those that are no more called errors."""

    async def for_seconds(self, seconds: float) -> None:
        """Lets things change for so long; returns when everybody is there again, but guests whose lease runs."""
        ends_at = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(self._guests(ends_at), self._restarts(ends_at))

    async def _guests(self, ends_at: float) -> None:
        async with asyncio.TaskGroup() as staying:
            while asyncio.get_running_loop().time() < ends_at:
                staying.create_task(self._tried("guest", self._guest))
                staying.create_task(self._tried("adapter", self._adapter))
                await asyncio.sleep(self._rng.uniform(0.0, 2 * GUEST_SECONDS))

    async def _tried(self, what: str, change: Callable[[], Awaitable[None]]) -> None:
        try:
            await change()
            self.counts[what] += 1
        except (KvscoutError, grpc.aio.AioRpcError):
            # One of those that it needs is away: its lease ends.
            self.counts[f"{what} in vain"] += 1

    async def _guest(self) -> None:
        """A new worker, of a new tenant as often as not: it serves, and goes, or is not heard of any more."""
        number, rng, gateway = next(self._ids), self._rng, self._world.gateways[0]
        worker = self._world.engines["e0"].worker
        worker.worker_id = f"guest-{number}"
        worker.tenant = rng.choice(("default", f"tenant-{number}"))
        ref = workers_pb2.RemoveWorkerRequest(tenant=worker.tenant, worker_id=worker.worker_id)
        await self._world.register(worker, lease_seconds=LEASE_SECONDS)
        keep = workers_pb2.KeepAliveRequest(tenant=ref.tenant, worker_ids=[ref.worker_id])
        await call(gateway.KeepAlive, keep, timeout=CALL_SECONDS)
        prompt = self._prompt(number)
        generate = gateway_pb2.GenerateRequest(
            model=rng.choice((MODEL, ADAPTER)), tenant=ref.tenant, token_ids=prompt,
            stop_conditions=gateway_pb2.StopConditions(max_tokens=4), pinned_worker_id=ref.worker_id,
        )  # fmt: skip
        async for _ in gateway.Generate(generate, timeout=CALL_SECONDS):
            pass
        find = indexer_pb2.FindMatchesRequest(model=MODEL, tenant=ref.tenant, token_ids=prompt)
        await call(self._world.indexers[0].stub.FindMatches, find, timeout=CALL_SECONDS)
        if rng.random() < 0.3:
            drain = workers_pb2.DrainWorkerRequest(tenant=ref.tenant, worker_id=ref.worker_id)
            await call(gateway.DrainWorker, drain, timeout=CALL_SECONDS)
        if rng.random() < 0.7:
            await call(gateway.RemoveWorker, ref, timeout=CALL_SECONDS)

    async def _adapter(self) -> None:
        """An engine loads an adapter, a request for it is placed there, and it is unloaded."""
        number, gateway = next(self._ids), self._world.gateways[0]
        worker = self._world.engines["e0"].worker
        name = f"adapter-{number}"
        loaded = workers_pb2.UpdateWorkerRequest(worker=worker)
        loaded.worker.adapters.add(name=name, lora_id=2 + number)
        await call(gateway.UpdateWorker, loaded, timeout=CALL_SECONDS)
        try:
            route = gateway_pb2.RouteRequest(
                model=MODEL, lora_name=name, token_ids=self._prompt(number), request_id=name, lease_seconds=1
            )
            await call(gateway.Route, route, timeout=CALL_SECONDS)
            free = scheduler_pb2.FreeRequest(model=MODEL, request_id=name)
            await call(gateway.Free, free, timeout=CALL_SECONDS)
        finally:
            await call(gateway.UpdateWorker, workers_pb2.UpdateWorkerRequest(worker=worker), timeout=CALL_SECONDS)

    @staticmethod
    def _prompt(number: int) -> list[int]:
        return [number * 1_000 + position for position in range(4 * BLOCK_SIZE)]

    async def _restarts(self, ends_at: float) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*STRIKE_SECONDS))
            if asyncio.get_running_loop().time() > ends_at:
                return
            strike = next(self._strikes)
            await strike()
            self.counts[f"restart {strike.__name__.strip('_')}"] += 1

    async def _scheduler(self) -> None:
        await self._restart("scheduler-1")

    async def _indexer(self) -> None:
        await self._restart("indexer-1")

    async def _gateway(self) -> None:
        await self._restart("gateway-1")

    async def _engine(self) -> None:
        """Dies, and comes back elsewhere with an empty cache."""
        await self._restart("e2")
        await self._world.register(self._world.engines["e2"].worker)

    async def _nats(self) -> None:
        await self._world.nats.kill()
        await asyncio.sleep(self._rng.uniform(*AWAY_SECONDS))
        await self._world.nats.start()

    async def _restart(self, name: str) -> None:
        member = self._world.members[name]
        member.require_alive()
        self.defects += [f"{name}: {one}" for one in member.defects()]
        await member.kill()
        await asyncio.sleep(self._rng.uniform(*AWAY_SECONDS))
        await member.start()
