"""`kvscout-scheduler`: flags and environment → one frozen config → serve."""

from __future__ import annotations

import logging
from typing import Any

import click

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.metrics_server import registry_of
from kvscout_common.nats.config import nats_flags
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.flags import SectionedCommand, server_flags
from kvscout_scheduler.config import SchedulerConfig
from kvscout_scheduler.flags import lease_flag, scheduler_flags

log = logging.getLogger("kvscout.scheduler")


FIRST = (
    "--workers-file",
    "--workers-k8s",
    "--nats-server",
    "--host",
    "--port",
    "--metrics-port",
    "--auth-tokens",
    "--allow-anonymous",
    "--tls-cert",
    "--tls-key",
    "--router-mode",
    "--kv-overlap-score-weight",
    "--router-temperature",
    "--router-queue-threshold",
    "--active-decode-blocks-threshold",
    "--active-prefill-tokens-threshold",
    "--router-replica-sync",
    "--log-level",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
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
    from kvscout_scheduler.rpc.servicer import SERVICE
    from kvscout_scheduler.service import SchedulerService

    backends = Backends.of_process("kvscout-scheduler", config.server, config.nats)
    service = SchedulerService(config, backends)
    return App(
        name="scheduler",
        services=[(SERVICE, service.servicer.add_to)],
        tasks={**backends.tasks, **service.tasks()},
        warm=service.warm,
        drain=service.drain,
        close=backends.close,
        metrics=registry_of(service.collector),
        limits=backends.registry.limits,
    )


if __name__ == "__main__":
    main()
