"""A scheduler that hangs and goes on, with a gateway that went to its replica meanwhile: what runs stays booked."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack

from support.gateway_stack import MODEL, connected, fresh_prompt, mocker_worker, together
from support.mocker_process import running_mocker
from support.nats_server import nats_server
from support.processes import Running, eventually, running
from support.replica_client import ReplicaClient

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import Unavailable

SLOWLY = ("--speedup", "1", "--step-base-ms", "100")
REQUESTS = 6
ROUTED = 3
HANG_SECONDS = 1.5
WATCHED_SECONDS = 2.0
"""After it goes on: what the gateway sent it when it hung has long been read."""


async def test_what_a_gateway_booked_elsewhere_while_its_scheduler_hung_stays_booked_when_that_goes_on() -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        nats = await enter(nats_server())
        a, b = (ReplicaClient(name, nats.url) for name in "ab")
        for replica in (a, b):
            stack.push_async_callback(replica.close)
        _, _, mocker = await asyncio.gather(a.start(), b.start(), enter(running_mocker(*SLOWLY)))
        flags = ("--scheduler", a.address, "--scheduler", b.address, "--no-indexer", "--nats-server", nats.url)
        gateway: Running = (await enter(together(running("kvscout_gateway.main", *flags))))[0]
        client = await enter(
            connected(gateway, Running(gateway.process, {"port": b.address.rpartition(":")[2]}), gateway)
        )

        async def registered() -> bool:
            try:
                await client.register(mocker_worker("w0", mocker))
            except Unavailable:
                return False  # the registry is in NATS, which is being connected to
            return True

        await eventually(registered, what="a registration")
        for replica in (a, b):
            await eventually(replica.knows_workers(1), what="the worker")
        await client.generate(fresh_prompt(40))
        await client.until_idle()
        a.signal(signal.SIGSTOP)
        # All of them are sent to the one that hangs first.
        calls = [client.start(fresh_prompt(40), max_tokens=1000) for _ in range(REQUESTS)]
        # Callers of Route name their attempts, and free by them.
        routed = [f"routed {number}" for number in range(ROUTED)]
        await asyncio.gather(*(client.route(fresh_prompt(40), request_id=name, attempt_id=7) for name in routed))

        async def all_run() -> bool:
            return len(await client.active()) == REQUESTS + ROUTED

        stopped = time.monotonic()
        await eventually(all_run, what="the bookings at the other replica")
        await asyncio.sleep(max(0.0, stopped + HANG_SECONDS - time.monotonic()))
        a.signal(signal.SIGCONT)
        resumed = time.monotonic()
        seen = []
        while time.monotonic() < resumed + WATCHED_SECONDS:
            seen.append(len(await client.active()))
            await asyncio.sleep(0.05)
        assert seen[-1] == REQUESTS + ROUTED, f"bookings: {seen}"

        async def alike() -> bool:
            states = [
                await each.rpc("ListActiveRequests", scheduler_pb2.ListActiveRequestsRequest()) for each in (a, b)
            ]
            names = [{(r.request.request_id, r.request.attempt_id) for r in state.requests} for state in states]
            return names[0] == names[1] and len(names[0]) == REQUESTS + ROUTED

        await eventually(alike, what="the same at both replicas")
        for call in calls:
            call.cancel()
        for name in routed:
            freed = await client.stub.Free(scheduler_pb2.FreeRequest(model=MODEL, request_id=name, attempt_id=7))
            assert freed.outcome == scheduler_pb2.FREE_OUTCOME_FREED
        await client.until_idle()
