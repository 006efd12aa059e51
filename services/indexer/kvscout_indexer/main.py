"""`kvscout-indexer`: flags and environment → one frozen config → serve."""

from __future__ import annotations

from typing import Any

import click

from kvscout_common.errors import ConfigError
from kvscout_common.http.metrics_server import registry_of
from kvscout_common.nats.config import nats_flags
from kvscout_common.process.heap import keep_mmap_threshold
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.flags import (
    SectionedCommand,
    client_flags,
    server_flags,
)
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.flags import indexer_flags

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
    "--token-file",
    "--no-kv-events",
    "--router-ttl",
    "--max-blocks",
    "--shard",
    "--peers",
    "--allow-event-endpoints",
    "--log-level",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
@indexer_flags()
@nats_flags()
@client_flags()
@server_flags("indexer", port=7051, metrics_port=9091)
def main(**values: Any) -> None:
    """Index the KV events of engines, and return how many leading blocks of a prompt each worker holds."""
    try:
        config = IndexerConfig.from_flags(values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    keep_mmap_threshold()
    run(config.server, lambda: build(config))


async def build(config: IndexerConfig) -> App:
    """Return the indexer as an app to serve."""
    from kvscout_common.registry.backends import Backends
    from kvscout_indexer.indexer import Indexer
    from kvscout_indexer.rpc.metrics import IndexerCollector
    from kvscout_indexer.rpc.servicer import SERVICE, IndexerServicer

    backends = Backends.of_process("kvscout-indexer", config.server, config.nats, config.admit)
    indexer = Indexer(config, backends)

    async def close() -> None:
        await indexer.close()
        await backends.close()

    return App(
        name="indexer",
        services=[(SERVICE, IndexerServicer(indexer, indexer.queries).add_to)],
        tasks={**backends.tasks, **indexer.tasks()},
        warm=indexer.warm,
        drain=indexer.drain,
        close=close,
        metrics=registry_of(IndexerCollector(indexer)),
        limits=indexer.registry.limits,
    )


if __name__ == "__main__":
    main()
