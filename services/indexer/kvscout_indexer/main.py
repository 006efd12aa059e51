"""`kvscout-indexer`: flags and environment → one frozen config → serve."""

from __future__ import annotations

from typing import Any

import click

from kvscout_common.errors import ConfigError
from kvscout_common.http.metrics_server import registry_of
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.nats.config import NatsConfig, nats_flags
from kvscout_common.process.heap import keep_mmap_threshold
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.config import ServerConfig
from kvscout_common.settings.flags import (
    PERFORMANCE,
    SectionedCommand,
    client_flags,
    event_endpoints_flag,
    flag,
    server_flags,
)
from kvscout_common.shards import Shard
from kvscout_indexer.config import IndexerConfig


@click.command(cls=SectionedCommand)
@flag(
    "--router-ttl",
    default=120.0,
    type=click.FloatRange(min=0, min_open=True),
    help="Lifetime of predicted blocks after lost history; with --no-kv-events, of the blocks of routed prompts.",
)
@flag(
    "--no-kv-events",
    is_flag=True,
    help="Read no events: assume for --router-ttl that workers hold the prompts routed to them.",
)
@flag(
    "--router-predicted-ttl",
    default=None,
    type=click.FloatRange(min=0, min_open=True),
    help="Lifetime of predictions from routing, in addition to events; unset = off.",
)
@flag("--shard", default="0/1", help="I/N: index only the workers of shard I (from 0) of N.")
@flag(
    "--max-blocks",
    default=0,
    type=click.IntRange(min=0),
    section=PERFORMANCE,
    help="Maximum of held blocks per index; 0 = none. Above it the least recently used prefixes are "
    "dropped until an engine uses them again: overlaps may then be too short, never too long.",
)
@flag(
    "--router-max-tree-size",
    default=1_048_576,
    type=click.IntRange(min=1),
    section=PERFORMANCE,
    help="Maximum of predicted blocks per index.",
)
@flag(
    "--router-prune-target-ratio",
    default=0.8,
    type=click.FloatRange(0, 1, min_open=True),
    section=PERFORMANCE,
    help="Share of --router-max-tree-size left after pruning.",
)
@flag(
    "--peers",
    multiple=True,
    help="host:port of another indexer that can supply the state of newly read workers; repeat for several.",
)
@flag(
    "--stream-max-age",
    default=3600.0,
    type=click.FloatRange(min=1),
    help="Retention of events in JetStream streams created by this indexer.",
)
@flag(
    "--router-snapshot-threshold",
    default=1_000_000,
    type=click.IntRange(min=1),
    help="JetStream messages between two snapshots of a model's indexes; earlier if events get old.",
)
@flag(
    "--router-reset-states",
    is_flag=True,
    help="At start, clear the JetStream streams, snapshots and consumers of the namespace.",
)
@event_endpoints_flag()
@nats_flags()
@client_flags()
@server_flags("indexer", port=7051, metrics_port=9091)
def main(**values: Any) -> None:
    """Index the KV events of engines, and return how many leading blocks of a prompt each worker holds."""
    try:
        config = IndexerConfig(
            server=ServerConfig.from_flags(values),
            nats=NatsConfig.from_flags(values),
            peers=tuple(address for given in values["peers"] for address in given.split(",") if address),
            client=ClientSecurity.from_flags(
                values["tls_ca"], values["tls_client_cert"], values["tls_client_key"], values["token_file"]
            ),
            stream_max_age_seconds=values["stream_max_age"],
            snapshot_threshold=values["router_snapshot_threshold"],
            reset_states=values["router_reset_states"],
            max_blocks=values["max_blocks"],
            router_ttl_seconds=values["router_ttl"],
            max_predicted_blocks=values["router_max_tree_size"],
            prune_target_ratio=values["router_prune_target_ratio"],
            kv_events=not values["no_kv_events"],
            router_predicted_ttl_seconds=values["router_predicted_ttl"],
            shard=Shard.parse(values["shard"], flag="shard"),
            allowed_endpoints=frozenset(values["allow_event_endpoints"]),
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    keep_mmap_threshold()
    run(config.server, lambda: build(config))


async def build(config: IndexerConfig) -> App:
    """Return the indexer as an app to serve."""
    from kvscout_indexer.indexer import Indexer
    from kvscout_indexer.rpc.metrics import IndexerCollector
    from kvscout_indexer.rpc.servicer import SERVICE, IndexerServicer

    indexer = Indexer(config)
    return App(
        name="indexer",
        services=[(SERVICE, IndexerServicer(indexer, indexer.queries).add_to)],
        tasks=indexer.tasks(),
        warm=indexer.warm,
        drain=indexer.drain,
        close=indexer.close,
        metrics=registry_of(IndexerCollector(indexer)),
        limits=indexer.registry.limits,
    )


if __name__ == "__main__":
    main()
