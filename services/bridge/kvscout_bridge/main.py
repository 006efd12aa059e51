"""`kvscout-bridge`: flags and environment → one frozen config → serve."""

from __future__ import annotations

from typing import Any

import click

from kvscout_bridge.config import LEASE_SECONDS, BridgeConfig
from kvscout_common.endpoints import WILDCARDS, address_problem, bracketed
from kvscout_common.errors import ConfigError, InvalidArgument
from kvscout_common.http.metrics_server import registry_of
from kvscout_common.nats.config import DEFAULT_SERVER, NatsConfig, nats_flags
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.config import ServerConfig
from kvscout_common.settings.flags import (
    BEHAVIOUR,
    PERFORMANCE,
    SectionedCommand,
    ValueOf,
    event_endpoints_flag,
    flag,
    server_flags,
)
from kvscout_common.worker import (
    DEFAULT_TENANT,
    CopyMode,
    EngineKind,
    EventEndpoint,
    Role,
    Transport,
    WorkerSpec,
)

ENGINE = "Engine"


FIRST = (
    "--worker-id",
    "--model",
    "--block-size",
    "--engine",
    "--http-endpoint",
    "--event-endpoint",
    "--replay-endpoint",
    "--workers-file",
    "--transport",
    "--nats-server",
    "--host",
    "--port",
    "--metrics-port",
    "--advertise",
    "--auth-tokens",
    "--allow-anonymous",
    "--log-level",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
@flag("--worker-id", section=ENGINE, help="Worker id of the engine; without it --workers-file lists the engines.")
@flag("--model", section=ENGINE, help="Model of the engine.")
@flag("--block-size", type=click.IntRange(min=1), section=ENGINE, help="Tokens per KV block.")
@flag("--tenant", default=DEFAULT_TENANT, section=ENGINE, help="Tenant of the engine.")
@flag("--engine", default="vllm", type=ValueOf(EngineKind), section=ENGINE, help="Kind of engine.")
@flag("--role", default="aggregated", type=ValueOf(Role), section=ENGINE, help="Role of the engine.")
@flag(
    "--http-endpoint",
    default="",
    section=ENGINE,
    help="Base URL of the engine's HTTP API; without --event-endpoint the event endpoints are read from there, or with "
    "--engine trtllm the events themselves, by polling.",
)
@flag(
    "--event-endpoint",
    multiple=True,
    section=ENGINE,
    help="Event endpoint of a rank, such as tcp://localhost:5557; repeat for further ranks, in order.",
)
@flag(
    "--replay-endpoint",
    multiple=True,
    section=ENGINE,
    help="Replay endpoint of a rank; repeat in the order of --event-endpoint.",
)
@flag("--topic", default="", section=ENGINE, help="Prefix of the topics to subscribe to.")
@flag("--bind-events", is_flag=True, section=ENGINE, help="Bind the event endpoints: the engine connects to them.")
@flag("--dp-start-rank", default=0, type=click.IntRange(min=0), section=ENGINE, help="Rank of the first endpoint.")
@flag("--eagle", is_flag=True, section=ENGINE, help="Blocks are EAGLE windows.")
@flag("--copies", default="count", type=ValueOf(CopyMode), section=ENGINE, help="Counting of repeated Stored events.")
@flag(
    "--total-kv-blocks", default=0, type=click.IntRange(min=0), section=ENGINE, help="Device cache size; 0 = unknown."
)
@flag(
    "--transport",
    default="jetstream",
    type=click.Choice([Transport.NATS_CORE.value, Transport.JETSTREAM.value]),
    section=BEHAVIOUR,
    help="nats-core: not retained, lost events are requested from this bridge; jetstream: retained in a stream.",
)
@flag(
    "--enable-local-indexer/--no-enable-local-indexer",
    default=True,
    section=BEHAVIOUR,
    help="Serve lost events from each engine's state and latest batches.",
)
@flag(
    "--stream-max-age",
    default=3600.0,
    type=click.FloatRange(min=1),
    section=BEHAVIOUR,
    help="Retention of events in JetStream streams created by this bridge.",
)
@flag(
    "--register/--no-register",
    default=True,
    section=BEHAVIOUR,
    help="Register the engines in NATS and renew their leases.",
)
@flag(
    "--lease-seconds",
    default=LEASE_SECONDS,
    type=click.IntRange(1, 86_400),
    section=BEHAVIOUR,
    help="Time after which registrations end when this bridge is gone.",
)
@flag(
    "--advertise", default="", section=BEHAVIOUR, help="host:port under which others reach this bridge's gRPC server."
)
@flag(
    "--max-buffered-bytes",
    default=64 * 1024 * 1024,
    type=click.IntRange(min=1024),
    section=PERFORMANCE,
    help="Maximum size of buffered events while NATS is down; above it the engine's state replaces them.",
)
@event_endpoints_flag()
@nats_flags(default=(DEFAULT_SERVER,))
@server_flags("bridge", port=7053, metrics_port=9094, discovers=False)
def main(**values: Any) -> None:
    """Bring the KV events of an engine to NATS, and answer indexers that lost some of them."""
    try:
        nats = NatsConfig.from_flags(values)
        if nats is None:
            raise ConfigError("a bridge needs NATS", field="nats_server")
        server = ServerConfig.from_flags(values)
        config = BridgeConfig(
            server=server,
            nats=nats,
            worker=worker_of(values),
            allowed_endpoints=frozenset(values["allow_event_endpoints"]),
            transport=Transport(values["transport"]),
            local_indexer=values["enable_local_indexer"],
            max_buffered_bytes=values["max_buffered_bytes"],
            stream_max_age_seconds=values["stream_max_age"],
            register_workers=values["register"],
            lease_seconds=values["lease_seconds"],
            advertised=_advertised(values["advertise"]),
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    run(config.server, lambda: build(config))


def _advertised(address: str) -> str:
    problem = address and address_problem(address)
    if problem:
        raise ConfigError(problem, field="advertise")
    return address


def worker_of(values: dict[str, Any]) -> WorkerSpec | None:
    """Return the engine that the flags name; None where the workers file names them.

    Raises:
        ConfigError: Neither names one, a flag is missing or wrong.
    """
    if not values["worker_id"]:
        if values["workers_file"] is None:
            raise ConfigError("name the engine, or give --workers-file", field="worker_id")
        return None
    for name in ("model", "block_size"):
        if not values[name]:
            raise ConfigError("is needed with --worker-id", field=name)
    if not values["event_endpoint"] and not values["http_endpoint"]:
        raise ConfigError("give it, or --http-endpoint, which reports it", field="event_endpoint")
    endpoints, replays, first = values["event_endpoint"], values["replay_endpoint"], values["dp_start_rank"]
    if replays and len(replays) != len(endpoints):
        raise ConfigError(f"{len(replays)} for {len(endpoints)} of --event-endpoint", field="replay_endpoint")
    spec = WorkerSpec(
        worker_id=values["worker_id"],
        model=values["model"],
        block_size=values["block_size"],
        tenant=values["tenant"],
        role=values["role"],
        engine=values["engine"],
        http_endpoint=values["http_endpoint"],
        dp_start_rank=first,
        dp_size=max(1, len(endpoints)),
        event_endpoints=tuple(
            EventEndpoint(rank, endpoint, replays[number] if replays else "", values["topic"], values["bind_events"])
            for number, (rank, endpoint) in enumerate(enumerate(endpoints, first))
        ),
        total_kv_blocks=values["total_kv_blocks"],
        eagle=values["eagle"],
        copies=values["copies"],
    )
    try:
        spec.validate().require_allowed(values["allow_event_endpoints"])
    except InvalidArgument as error:
        raise ConfigError(error.message, field=error.field) from error
    return spec


async def build(config: BridgeConfig) -> App:
    """Return the bridge as an app to serve."""
    from kvscout.v1 import bridge_pb2, bridge_pb2_grpc
    from kvscout_bridge.bridge import Bridge
    from kvscout_bridge.metrics import BridgeCollector
    from kvscout_bridge.servicer import BridgeServicer

    bridge = Bridge(config)
    servicer = BridgeServicer(bridge)

    def bound(port: int) -> None:
        """Advertise the address of the gRPC server, if it is known; over NATS the bridge is reached in any case."""
        if not config.advertised and config.server.host not in WILDCARDS:
            bridge.registrations.reached_at(f"{bracketed(config.server.host)}:{port}")

    return App(
        name="bridge",
        services=[
            (
                bridge_pb2.DESCRIPTOR.services_by_name["Bridge"].full_name,
                lambda server: bridge_pb2_grpc.add_BridgeServicer_to_server(servicer, server),
            )
        ],
        bound=bound,
        tasks=bridge.tasks(),
        drain=bridge.drain,
        close=bridge.close,
        metrics=registry_of(BridgeCollector(bridge)),
        limits=bridge.registry.limits,
    )


if __name__ == "__main__":
    main()
