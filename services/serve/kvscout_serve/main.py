"""`kvscout serve`: flags and environment → one frozen config → gateway, indexer and scheduler in one process."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from kvscout_common.errors import InvalidArgument
from kvscout_common.nats.config import nats_flags
from kvscout_common.process.heap import keep_mmap_threshold
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.flags import SectionedCommand, client_flags, flag, server_flags
from kvscout_gateway.flags import gateway_flags
from kvscout_indexer.flags import indexer_flags
from kvscout_scheduler.flags import scheduler_flags
from kvscout_serve.config import ServeConfig

FIRST = (
    "--workers-file",
    "--workers-k8s",
    "--nats-server",
    "--host",
    "--port",
    "--http-port",
    "--metrics-port",
    "--auth-tokens",
    "--allow-anonymous",
    "--tls-cert",
    "--tls-key",
    "--router-mode",
    "--tokenizer",
    "--session-affinity",
    "--no-kv-events",
    "--max-blocks",
    "--engine-key-file",
    "--endpoint-picker-port",
    "--shadow",
    "--log-level",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
@flag(
    "--indexer",
    multiple=True,
    help="Indexer host:port, or dns://name:port, to use in place of the one in this process; prefix I/N= for shard I "
    "of N; repeat in order of preference.",
)
@flag("--no-indexer", is_flag=True, help="Run without an indexer: route by load alone.")
@flag(
    "--scheduler",
    multiple=True,
    help="Scheduler host:port, or dns://name:port, to use in place of the one in this process; repeat in order of "
    "preference.",
)
@flag(
    "--lease-seconds",
    type=click.IntRange(3, 3600),
    help="Lease of bookings whose call does not set one; unset = 300, and 30 for those of this gateway without a "
    "stream.",
)
@gateway_flags()
@indexer_flags()
@scheduler_flags()
@nats_flags()
@client_flags()
@server_flags("serve", port=7050, metrics_port=9093)
def main(**values: Any) -> None:
    """Route LLM requests with gateway, indexer and scheduler in this one process."""
    source = click.get_current_context().get_parameter_source
    given = [name for name in values if source(name) is ParameterSource.COMMANDLINE]
    try:
        config = ServeConfig.from_flags(values, given)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    keep_mmap_threshold()
    run(config.server, lambda: build(config))


async def build(config: ServeConfig) -> App:
    """Return the services as one app."""
    from kvscout_serve.process import Process

    return Process(config).app()


if __name__ == "__main__":
    main()
