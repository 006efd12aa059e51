"""`kvscout-scheduler`: flags and environment → one frozen config → serve."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import click

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.http.metrics_server import registry_of
from kvscout_common.nats.config import nats_flags
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.flags import SectionedCommand, server_flags
from kvscout_scheduler.config import SchedulerConfig
from kvscout_scheduler.flags import lease_flag, scheduler_flags

log = logging.getLogger("kvscout.scheduler")


@click.command(cls=SectionedCommand)
@scheduler_flags()
@lease_flag
@nats_flags()
@server_flags("scheduler", port=7052, metrics_port=9092)
def main(**values: Any) -> None:
    """Select a worker for each request, and track the active load of all workers."""
    try:
        config = SchedulerConfig.from_flags(values)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    if values["replica_id"] and not config.replica_id:
        log.warning("--replica-id has no effect without --router-replica-sync")
    run(config.server, lambda: build(config))


async def build(config: SchedulerConfig) -> App:
    """Return the scheduler as an app to serve."""
    from kvscout_common.registry.backends import Backends
    from kvscout_common.registry.registry import Registry
    from kvscout_scheduler.load.workers import MAX_ENDS
    from kvscout_scheduler.rpc.metrics import SchedulerCollector
    from kvscout_scheduler.rpc.servicer import SERVICE, SchedulerServicer
    from kvscout_scheduler.scheduler import Scheduler
    from kvscout_scheduler.scraper import EngineScraper

    registry = Registry(time.monotonic)
    try:
        scheduler = Scheduler(
            config.settings, clock=time.monotonic, rng=random.Random(config.seed), limits=registry.limits
        )
    except ConfigError:
        raise
    except InvalidArgument as error:
        raise ConfigError(error.message, field="router_mode") from error
    registry.listen(scheduler.workers)
    link = config.nats.link("kvscout-scheduler") if config.nats is not None else None
    replicas = None
    if config.replica_id and link is not None:
        from kvscout_scheduler.replicas.replicas import Replicas
        from kvscout_scheduler.replicas.replication import Replication

        replication = Replication(scheduler, config.replica_id)
        registry.listen(replication.ownership)
        replicas = Replicas(scheduler, replication, link)
    backends = Backends(registry, config.server, link)
    backends.discover()
    servicer = SchedulerServicer(scheduler, registry, backends, replicas)

    async def expire() -> None:
        while True:
            ended = scheduler.expire()
            # Others go on between two slices of many.
            await asyncio.sleep(0 if ended >= MAX_ENDS else config.settings.expiry_seconds)

    async def warm() -> None:
        await backends.warm()
        if replicas is not None:
            await replicas.link.join()

    async def drain() -> None:
        scheduler.drain()
        await servicer.drain_streams()
        if replicas is not None:
            await replicas.link.leave()

    tasks = {**backends.tasks, "booking-leases": expire, **({"nats": link.run} if link is not None else {})}
    if replicas is not None:
        tasks["replicas"] = replicas.link.run
    if config.scrape_seconds:
        tasks["engine-metrics"] = EngineScraper(scheduler, registry, config.scrape_seconds).run
    return App(
        name="scheduler",
        services=[
            (SERVICE, servicer.add_to),
        ],
        tasks=tasks,
        warm=warm,
        drain=drain,
        close=link.close if link is not None else None,
        metrics=registry_of(SchedulerCollector(scheduler, replicas)),
        limits=registry.limits,
    )


if __name__ == "__main__":
    main()
