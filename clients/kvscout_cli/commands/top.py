"""`kvscout top`: what are the workers doing now?"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click
from rich.live import Live

from kvscout.v1 import scheduler_pb2, scheduler_pb2_grpc
from kvscout_cli.connection import Services, option, services_flags
from kvscout_cli.lifetime import run
from kvscout_cli.output import stdout
from kvscout_cli.top_view import Moment, frame
from kvscout_client import WorkerLoad
from kvscout_client.decode import load as load_from_proto
from kvscout_common.channel import call, open_channel, stream
from kvscout_common.doctor.snapshot import RankName, Service, Snapshot
from kvscout_common.errors import KvscoutError
from kvscout_common.flags import SectionedCommand
from kvscout_common.registry import ALL_TENANTS

DECISIONS = 10
RETRY_SECONDS = 1.0


@click.command(cls=SectionedCommand)
@option("--interval", default=1.0, show_default=True, type=click.FloatRange(min=0.1), help="Seconds between two looks.")
@option("--once", is_flag=True, help="Print one frame and end; so it does where it is not shown on a terminal.")
@services_flags
def command(services: Services, *, interval: float, once: bool) -> None:
    """Show workers, load, hit rate, events and the last decisions, live, until Ctrl-C.

    \b
        kvscout top
        kvscout top --once
    """
    console = stdout()
    if once or not console.is_terminal:
        console.print(frame(run(_look(services)), None, ()))
        return

    async def show() -> None:
        decisions: deque[scheduler_pb2.WatchDecisionsResponse] = deque(maxlen=DECISIONS)
        before, now = None, await _look(services)
        async with _watching(services, now.snapshot, decisions):
            with Live(frame(now, None, ()), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    await asyncio.sleep(interval)
                    before, now = now, await _look(services)
                    live.update(frame(now, before, list(decisions)), refresh=True)

    run(show(), until_signalled=True)


async def _look(services: Services) -> Moment:
    snapshot = await services.snapshot(engines=False)
    told = list(snapshot.told(scheduler_pb2.SchedulerGetStatusResponse))
    loads = await _loads(services, *told[0]) if told else {}
    return Moment(time.monotonic(), snapshot, loads)


async def _loads(
    services: Services, scheduler: Service, status: scheduler_pb2.SchedulerGetStatusResponse
) -> dict[RankName, WorkerLoad]:
    """The load of every worker rank, as one scheduler has it."""
    channel = open_channel(scheduler.address, services.security)
    stub: scheduler_pb2_grpc.SchedulerAsyncStub = scheduler_pb2_grpc.SchedulerStub(channel)
    found: dict[RankName, WorkerLoad] = {}
    try:
        for pool in status.pools:
            request = scheduler_pb2.SchedulerGetPotentialLoadsRequest(
                model=pool.model, tenant=pool.tenant, role=pool.role
            )
            answer = await call(stub.GetPotentialLoads, request, timeout=services.timeout_seconds)
            for load in map(load_from_proto, answer.loads):
                found[RankName(pool.tenant, *load.worker)] = load
    except KvscoutError:
        return found  # it has just gone: the next look says so
    finally:
        await channel.close()
    return found


@asynccontextmanager
async def _watching(
    services: Services, snapshot: Snapshot, decisions: deque[scheduler_pb2.WatchDecisionsResponse]
) -> AsyncIterator[None]:
    """Has the schedulers tell of their decisions, the newest first."""

    async def watch(scheduler: Service, tenant: str) -> None:
        channel = open_channel(scheduler.address, services.security)
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        try:
            while True:
                try:
                    request = scheduler_pb2.WatchDecisionsRequest(tenant=tenant)
                    async for decision in stream(stub.WatchDecisions, request):
                        decisions.appendleft(decision)
                except KvscoutError:
                    await asyncio.sleep(RETRY_SECONDS)  # the next frame shows that it does not answer
        finally:
            await channel.close()

    tenants = {
        pool.tenant for _, status in snapshot.told(scheduler_pb2.SchedulerGetStatusResponse) for pool in status.pools
    }
    if services.tenant != ALL_TENANTS:
        tenants = {services.tenant}
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(watch(service, tenant))
            for service, _ in snapshot.told(scheduler_pb2.SchedulerGetStatusResponse)
            for tenant in sorted(tenants)
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
