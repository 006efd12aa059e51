"""Connections of which one end is gone without a word: what hangs on them ends, and what is well is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from support.gateway_stack import MODEL, connected, fresh_prompt, mocker_worker, together
from support.grpc_server import serving
from support.mocker_process import running_mocker
from support.processes import eventually, running
from support.tcp_relay import TcpRelay, tcp_relay

from kvscout.v1 import gateway_pb2, scheduler_pb2, scheduler_pb2_grpc
from kvscout_common.rpc import channel
from kvscout_common.transport import keepalive

FREED_SECONDS = 40.0
"""10 s, and patience for a busy machine; without heartbeats it is minutes."""
HEALTHY = "healthy"
PARTITIONS: dict[str, tuple[str, ...]] = {"both": ("up", "down"), "up": ("up",), "down": ("down",)}
"""What is lost."""

GONE = ("both", "up")
"""How a gateway is not heard of any more; one that hears nothing is there all the same, and says so again and again."""


async def test_what_a_half_open_gateway_has_booked_is_freed_and_an_idle_one_is_never_cut() -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        slow = ("--speedup", "1", "--step-base-ms", "100")
        scheduler, indexer, mocker = await enter(
            together(running("kvscout_scheduler.main"), running("kvscout_indexer.main"), running_mocker(*slow))
        )
        relays: dict[str, TcpRelay] = {name: await enter(tcp_relay(scheduler.address)) for name in (HEALTHY, *GONE)}
        started = await enter(
            together(
                *(
                    running("kvscout_gateway.main", "--scheduler", relay.address, "--indexer", indexer.address)
                    for relay in relays.values()
                )
            )
        )
        clients = {
            name: await enter(connected(gateway, scheduler, indexer))
            for name, gateway in zip(relays, started, strict=True)
        }
        calls = []
        for client in clients.values():
            await client.register(mocker_worker("w0", mocker))
            calls.append(client.start(fresh_prompt(40), max_tokens=1000))
        watching = clients[HEALTHY]

        async def owners() -> set[str]:
            return {each.owner_id for each in await watching.active()}

        async def all_booked() -> bool:
            return len(await owners()) == len(clients)

        await eventually(all_booked, what="a booking of each gateway")
        for name in GONE:
            relays[name].swallow(*PARTITIONS[name])

        async def only_the_healthy_one() -> bool:
            return len(await owners()) == 1

        await eventually(only_the_healthy_one, deadline_seconds=FREED_SECONDS, what="the end of the others' bookings")
        status = await clients[HEALTHY].status()
        assert relays[HEALTHY].connections == 1
        schedulers = [helper for helper in status.helpers if helper.kind == gateway_pb2.HELPER_KIND_SCHEDULER]
        assert [helper.last_error for helper in schedulers] == [""]
        for call in calls:
            call.cancel()
        for relay in relays.values():
            relay.heal()


@pytest.mark.parametrize("directions", list(PARTITIONS.values()), ids=list(PARTITIONS))
async def test_a_stream_over_a_half_open_connection_ends_on_both_sides(
    directions: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = {"grpc.keepalive_time_ms": 300, "grpc.keepalive_timeout_ms": 3000, "grpc.http2.ping_timeout_ms": 3000}
    soon["grpc.http2.min_ping_interval_without_data_ms"] = 60
    for module, name in ((channel, "CLIENT_OPTIONS"), (keepalive, "SERVER_OPTIONS")):
        options = tuple((key, soon.get(key, value)) for key, value in getattr(keepalive, name))
        monkeypatch.setattr(module, name, options)
    watcher_left = asyncio.Event()

    class Watched(scheduler_pb2_grpc.SchedulerServicer):
        async def WatchLoads(self, request: Any, context: Any) -> AsyncIterator[scheduler_pb2.WatchLoadsResponse]:
            try:
                yield scheduler_pb2.WatchLoadsResponse()
                await asyncio.Event().wait()
            finally:
                watcher_left.set()

    ports: list[int] = []
    servicer: Any = Watched()  # type: ignore[abstract]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            serving(
                lambda server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server),
                on_port=ports.append,
            )
        )
        relay = await stack.enter_async_context(tcp_relay(f"127.0.0.1:{ports[0]}"))
        watching = channel.open_channel(relay.address)
        stack.push_async_callback(watching.close)
        call: Any = scheduler_pb2_grpc.SchedulerStub(watching).WatchLoads(scheduler_pb2.WatchLoadsRequest(model=MODEL))
        await call.read()
        # Idle for several pings: it is well, and nobody counts them as too many.
        await asyncio.sleep(2.0)
        assert not call.done()
        assert not watcher_left.is_set()
        relay.swallow(*directions)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async with asyncio.timeout(60):
                await call.read()
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(60):
            await watcher_left.wait()
