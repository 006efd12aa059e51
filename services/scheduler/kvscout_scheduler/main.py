"""`kvscout-scheduler`: flags and environment → one frozen config → serve."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from typing import Any

import click

from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.http.metrics_server import registry_of
from kvscout_common.nats.config import NatsConfig, nats_flags
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.config import ServerConfig
from kvscout_common.settings.flags import PERFORMANCE, SectionedCommand, flag, server_flags
from kvscout_scheduler.config import SchedulerConfig
from kvscout_scheduler.values.reservation import MAX_LEASE_SECONDS
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.thresholds import BusyThresholds

log = logging.getLogger("kvscout.scheduler")

SCRAPES_THAT_COUNT = 3
"""Rounds that may fail before what an engine said last counts no more."""


@click.command(cls=SectionedCommand)
@flag("--router-mode", default="kv-time", help="Selection policy of requests that name none.")
@flag(
    "--kv-overlap-score-weight",
    default=1.0,
    help="Weight of prefill relative to decode load; 0 ignores prefix caches.",
)
@flag("--router-temperature", default=0.0, help="0 = always the cheapest worker; above 0 = softmax over the costs.")
@flag(
    "--cpu-to-gpu-ratio",
    default=8.0,
    help="Policy device-aware-weighted: capacity of an accelerator relative to a CPU worker.",
)
@flag("--no-track-active-blocks", is_flag=True, help="Track active prefill tokens only, not active blocks.")
@flag("--router-track-output-blocks", is_flag=True, help="Count generated blocks reported by AddOutput.")
@flag(
    "--active-decode-blocks-threshold",
    type=float,
    help="A worker is busy above this fraction of its KV blocks; unset = off.",
)
@flag(
    "--active-prefill-tokens-threshold",
    type=int,
    help="A worker is busy above this number of active prefill tokens; unset = off.",
)
@flag("--worker-cooldown-seconds", default=10.0, help="Cool-down of a worker that failed a request.")
@flag(
    "--worker-grace-seconds",
    default=30.0,
    help="Time for which a worker whose registration expired keeps its bookings, in case it returns; "
    "removed workers lose them.",
)
@flag(
    "--lease-seconds",
    default=300.0,
    type=click.FloatRange(min=0, max=MAX_LEASE_SECONDS, min_open=True),
    help="Lease of bookings whose call does not set one.",
)
@flag(
    "--router-replica-sync",
    is_flag=True,
    help="Share bookings, thresholds and cool-downs with the other schedulers of the namespace, over NATS.",
)
@flag(
    "--replica-id",
    default="",
    help="Unique name of this scheduler replica, stable across restarts; unset = host name and port.",
)
@flag("--seed", type=int, help="Seed of the random generator; unset = from the system.")
@flag(
    "--max-active-requests",
    default=1_000_000,
    type=click.IntRange(min=1),
    section=PERFORMANCE,
    help="Maximum of bookings; more are refused.",
)
@flag(
    "--tenant-share",
    default=0.5,
    section=PERFORMANCE,
    help="Share of --max-active-requests that one tenant may hold while others have workers; 1 = all of it.",
)
@nats_flags()
@flag(
    "--scrape-engine-metrics",
    default=0.0,
    type=click.FloatRange(min=0),
    help="Interval of scraping engine metrics; 0 = off.",
)
@flag(
    "--engine-metrics-seconds",
    default=30.0,
    help="Validity of reported engine metrics; at least three intervals of --scrape-engine-metrics.",
)
@flag(
    "--router-queue-threshold",
    type=float,
    help="Queue requests while all workers have more active prefill tokens than this times "
    "max_num_batched_tokens; unset = no queue.",
)
@flag(
    "--router-queue-limit",
    default=1_024,
    type=click.IntRange(min=1),
    section=PERFORMANCE,
    help="Maximum of queued requests per model and role; more are refused.",
)
@server_flags("scheduler", port=7052, metrics_port=9092)
def main(**values: Any) -> None:
    """Select a worker for each request, and track the active load of all workers."""
    try:
        config = SchedulerConfig(
            server=ServerConfig.from_flags(values),
            nats=NatsConfig.from_flags(values),
            settings=SchedulerSettings(
                policy=values["router_mode"],
                overlap_score_weight=values["kv_overlap_score_weight"],
                router_temperature=values["router_temperature"],
                cpu_to_gpu_ratio=values["cpu_to_gpu_ratio"],
                track_active_blocks=not values["no_track_active_blocks"],
                track_output_blocks=values["router_track_output_blocks"],
                thresholds=BusyThresholds(
                    values["active_decode_blocks_threshold"], values["active_prefill_tokens_threshold"]
                ),
                cooldown_seconds=values["worker_cooldown_seconds"],
                lease_seconds=values["lease_seconds"],
                worker_grace_seconds=values["worker_grace_seconds"],
                engine_metrics_seconds=max(
                    values["engine_metrics_seconds"], SCRAPES_THAT_COUNT * values["scrape_engine_metrics"]
                ),
                max_active_requests=values["max_active_requests"],
                tenant_share=values["tenant_share"],
                queue_threshold=values["router_queue_threshold"],
                queue_limit=values["router_queue_limit"],
            ).validate(),
            seed=values["seed"],
            scrape_seconds=values["scrape_engine_metrics"],
            replica_id=_replica_id(values),
        )
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    if values["replica_id"] and not config.replica_id:
        log.warning("--replica-id has no effect without --router-replica-sync")
    run(config.server, lambda: build(config))


def _replica_id(values: dict[str, Any]) -> str:
    """Return the name among the replicas; "" = there are none."""
    if not values["router_replica_sync"]:
        return ""
    if not any(values["nats_server"]):
        raise ConfigError("needs --nats-server", field="router_replica_sync")
    # Without a port of its own the process distinguishes it from others on this host.
    return str(values["replica_id"] or f"{socket.gethostname()}:{values['port'] or f'pid-{os.getpid()}'}")


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
