"""What must be so once nobody asks: nothing booked or in flight, replicas alike, indexes the engines' truth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.channel import call
from kvscout_common.worker import DEFAULT_TENANT
from soak_stack.world import CALL_SECONDS, MODEL, SGLANG_PAIR, VLLM_PAIR, World

SETTLE_SECONDS = 40.0
"""Longest wait for it: of a killed gateway's bookings the scheduler waits ten for the owner, and replays back off."""
HELD = 16
"""Bookings by which replicas are compared."""
HELD_SECONDS = 60
_ROLES = (types_pb2.ROLE_AGGREGATED, types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE)


async def settled(world: World, window: int) -> list[str]:
    """Waits for it; what is wrong after all."""
    if not await _within(world.has_engines_only):
        return ["not every service knows the engines, and nobody else"]
    if left := await _left(lambda: in_use(world)):
        return left
    wrong = await replicas_compared(world, window)
    wrong += await _left(lambda: differences(world))
    return wrong


async def in_use(world: World) -> list[str]:
    """What is still booked or in flight, anywhere, and tenants of whom nobody is left."""
    everybody, found = types_pb2.GetStatusRequest(tenant="*"), []
    for number, scheduler in enumerate(world.schedulers):
        status = await call(scheduler.GetStatus, everybody, timeout=CALL_SECONDS)
        for pool in status.pools:
            if pool.tenant != DEFAULT_TENANT:
                found.append(f"scheduler-{number}: a pool of {pool.tenant}")
            if pool.active_requests or pool.queued:
                found.append(f"scheduler-{number}: {pool.active_requests} booked of {pool.model}")
        for load in await _loads(scheduler):
            if load.active_requests or load.active_prefill_tokens or load.active_decode_blocks:
                found.append(f"scheduler-{number}: load of {load.worker.worker_id}")
    for number, gateway in enumerate(world.gateways):
        status = await call(gateway.GetStatus, everybody, timeout=CALL_SECONDS)
        found += [f"gateway-{number}: {status.in_flight} in flight"] if status.in_flight else []
    return found


async def replicas_compared(world: World, window: int) -> list[str]:
    """Books some requests, which all schedulers must have alike, and frees them, after which none may have any."""
    gateway, names = world.gateways[0], [f"held-{window}-{number}" for number in range(HELD)]
    for number, name in enumerate(names):
        route = gateway_pb2.RouteRequest(
            model=MODEL, token_ids=range(16 * number, 16 * number + 200), request_id=name, lease_seconds=HELD_SECONDS
        )
        await call(gateway.Route, route, timeout=CALL_SECONDS)
    wrong = await _left(lambda: _unlike(world, len(names)))
    for name in names:
        await call(gateway.Free, scheduler_pb2.FreeRequest(model=MODEL, request_id=name), timeout=CALL_SECONDS)
    wrong += await _left(lambda: in_use(world))
    for number, scheduler in enumerate(world.schedulers):
        known = await call(scheduler.GetReplicas, scheduler_pb2.GetReplicasRequest(), timeout=CALL_SECONDS)
        wrong += [f"scheduler-{number}: diverged from {each.replica_id}" for each in known.replicas if each.divergences]
    return wrong


async def _unlike(world: World, booked: int) -> list[str]:
    states = [await _state(scheduler) for scheduler in world.schedulers]
    return [
        f"scheduler-{number} has not what scheduler-0 has: {state} and {states[0]}"
        for number, state in enumerate(states)
        if state != states[0] or len(state[0]) != booked
    ]


async def _state(scheduler: Any) -> tuple[dict[str, tuple[Any, ...]], list[tuple[Any, ...]]]:
    active = await call(scheduler.ListActiveRequests, scheduler_pb2.ListActiveRequestsRequest(), timeout=CALL_SECONDS)
    requests = {
        one.request.request_id: (one.worker.worker_id, one.worker.dp_rank, one.phase, one.blocks, one.uncached_tokens)
        for one in active.requests
    }
    return requests, [
        (load.worker.worker_id, load.active_requests, load.active_prefill_tokens, load.active_decode_blocks)
        for load in await _loads(scheduler)
    ]


async def _loads(scheduler: Any) -> list[Any]:
    loads = []
    for model in (MODEL, VLLM_PAIR, SGLANG_PAIR):
        for role in _ROLES if model != MODEL else _ROLES[:1]:
            request = scheduler_pb2.SchedulerGetPotentialLoadsRequest(model=model, role=role)
            loads += (await call(scheduler.GetPotentialLoads, request, timeout=CALL_SECONDS)).loads
    return loads


async def differences(world: World) -> list[str]:
    """Where an index and an engine's cache differ."""
    found = []
    for name, engine in world.engines.items():
        truth = await engine.blocks()
        if truth is None:
            # As vLLM, an engine tells of what it evicted with its next step, even if that is long after.
            await _asked_once(world, engine.worker.model)
        for indexer in world.indexers:
            copies = await indexer.copies(name)
            if truth is None or copies is None:
                found.append(f"{indexer.member.name} or {name} cannot tell")
            elif copies != truth:
                missing, extra = len(truth.keys() - copies.keys()), len(copies.keys() - truth.keys())
                found.append(
                    f"{indexer.member.name}: of {len(truth)} blocks of {name} {missing} are missing, {extra} too many"
                )
    return found


async def _asked_once(world: World, model: str) -> None:
    stop = gateway_pb2.StopConditions(max_tokens=1)
    request = gateway_pb2.GenerateRequest(model=model, token_ids=range(1, 40), stop_conditions=stop)
    async for _ in world.gateways[0].Generate(request, timeout=CALL_SECONDS):
        pass


async def _left(wrong: Callable[[], Awaitable[list[str]]]) -> list[str]:
    """What is wrong for as long as may be waited."""
    found: list[str] = []

    async def right() -> bool:
        nonlocal found
        found = await wrong()
        return not found

    await _within(right)
    return found


async def _within(condition: Callable[[], Awaitable[bool]]) -> bool:
    began = time.monotonic()
    while True:
        try:
            if await condition():
                return True
        except KvscoutError as error:
            if time.monotonic() - began > SETTLE_SECONDS:
                raise AssertionError(f"not settled within {SETTLE_SECONDS:g} s: {error}") from error
        if time.monotonic() - began > SETTLE_SECONDS:
            return False
        await asyncio.sleep(0.1)
