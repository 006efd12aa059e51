"""Clients of every kind, each a loop until it is cancelled; what services answer while others are away is no matter."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import grpc
from chaos.fronts import Front, GrpcFront, HttpFront, Wanted

from kvscout.v1 import gateway_pb2, indexer_pb2, scheduler_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import call
from soak_stack.world import ADAPTER, MODEL, SGLANG_PAIR, VLLM_PAIR, World

CALL_SECONDS = 10.0
BUSY_PAUSE_SECONDS = 0.06
"""At most, between two requests of a client: machines are to be busy, not jammed."""
SHORT_LEASE_SECONDS = 1
FORGOTTEN = 0.05
"""Share of the routed requests that nobody frees: their leases end."""
WATCHED = 3
"""Messages of a watch that are read before it is left."""
_MODELS = (MODEL, MODEL, MODEL, ADAPTER, VLLM_PAIR, SGLANG_PAIR)


class Load:
    """All clients.

    Args:
        world: Whom they ask.
        rng: Of what they ask.
        pause_seconds: At most, between two requests of a client.
    """

    def __init__(self, world: World, rng: Random, pause_seconds: float = BUSY_PAUSE_SECONDS) -> None:
        self._world = world
        self._rng = rng
        self._pause_seconds = pause_seconds
        self._ids = itertools.count()
        self.counts: Counter[str] = Counter()
        """By what was asked and how it ended."""

    async def during(self, meanwhile: Coroutine[Any, Any, None]) -> None:
        """Asks while something else happens, and leaves what is asked then."""
        fronts = self._fronts()
        jobs: list[Callable[[], Coroutine[Any, Any, None]]] = [self._route, self._find, self._stream, self._watch]
        asking = [asyncio.create_task(self._ask(front)) for front in fronts]
        asking += [asyncio.create_task(self._again(job)) for job in jobs]
        try:
            await meanwhile
        finally:
            for task in asking:
                task.cancel()
            outcomes = await asyncio.gather(*asking, return_exceptions=True)
            await asyncio.gather(*(front.close() for front in fronts))
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _fronts(self) -> list[Front]:
        fronts: list[Front] = []
        world = self._world
        for number, (address, url) in enumerate(zip(world.gateway_addresses, world.http_urls, strict=True)):
            fronts.append(GrpcFront(f"gateway-{number}", address))
            fronts.append(HttpFront("completion", f"gateway-{number}", url, begins_with_headers=False))
        return fronts

    async def _ask(self, front: Front) -> None:
        """Generations, one after the other; one in ten is left before its end."""
        kind = front.name.rpartition(" ")[2]
        while True:
            wanted = Wanted.drawn(self._rng, self._rng.choice(_MODELS))
            self.counts[f"{kind} {(await front.ask(wanted)).outcome}"] += 1
            await self._pause()

    async def _again(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        name = job.__name__.strip("_")
        while True:
            try:
                await job()
                self.counts[f"{name} whole"] += 1
            except (KvscoutError, grpc.aio.AioRpcError):
                self.counts[f"{name} failed"] += 1
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, self._pause_seconds))

    async def _route(self) -> None:
        """The life of a request that its client runs by itself."""
        gateway = self._rng.choice(self._world.gateways)
        ref = scheduler_pb2.RequestRef(model=MODEL, request_id=f"routed-{next(self._ids)}", attempt_id=1)
        request = gateway_pb2.RouteRequest(
            model=MODEL, token_ids=self._prompt(), request_id=ref.request_id, attempt_id=1,
            lease_seconds=SHORT_LEASE_SECONDS,
        )  # fmt: skip
        await call(gateway.Route, request, timeout=CALL_SECONDS)
        named = ref.SerializeToString()
        mark = scheduler_pb2.MarkPrefillCompleteRequest.FromString(named)
        await call(gateway.MarkPrefillComplete, mark, timeout=CALL_SECONDS)
        if self._rng.random() >= FORGOTTEN:
            await call(gateway.Free, scheduler_pb2.FreeRequest.FromString(named), timeout=CALL_SECONDS)

    async def _find(self) -> None:
        """A FindMatches, of an adapter that nobody has too."""
        adapter = self._rng.choice(("", ADAPTER, f"adapter-{next(self._ids)}"))
        request = indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=self._prompt(), lora_name=adapter)
        await call(self._rng.choice(self._world.indexers).stub.FindMatches, request, timeout=CALL_SECONDS)

    async def _stream(self) -> None:
        """A stream of FindMatches that is left in the midst of it."""
        prompts = [indexer_pb2.FindMatchesRequest(model=MODEL, token_ids=self._prompt(), id=n) for n in range(WATCHED)]
        stream: Any = self._rng.choice(self._world.indexers).stub.StreamFindMatches()
        try:
            await stream.write(indexer_pb2.StreamFindMatchesRequest(requests=prompts))
            async with asyncio.timeout(CALL_SECONDS):
                await stream.read()
        except TimeoutError:
            self.counts["stream silent"] += 1
        finally:
            stream.cancel()

    async def _watch(self) -> None:
        """Somebody looks at loads and decisions for a while."""
        scheduler = self._rng.choice(self._world.schedulers)
        watches: list[Any] = [
            scheduler.WatchLoads(scheduler_pb2.WatchLoadsRequest(model=MODEL, min_interval_ms=10)),
            scheduler.WatchDecisions(scheduler_pb2.WatchDecisionsRequest(tenant="*")),
        ]
        try:
            async with asyncio.timeout(1.0):
                for watch in watches:
                    for _ in range(WATCHED):
                        await watch.read()
        except TimeoutError:
            self.counts["watch silent"] += 1
        finally:
            for watch in watches:
                watch.cancel()

    def _prompt(self) -> list[int]:
        return Wanted.drawn(self._rng).prompt
