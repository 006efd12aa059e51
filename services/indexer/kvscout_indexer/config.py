"""Configuration of the indexer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvscout_common.endpoints import Allowed, address_problem
from kvscout_common.errors import ConfigError
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.nats.config import NatsConfig
from kvscout_common.settings.config import ServerConfig
from kvscout_common.shards import WHOLE, Shard
from kvscout_common.worker import Transport, WorkerSpec

MOST_INGEST_THREADS = 4
"""Threads that are used unless more are asked for: beyond, they wait for one another at the index of one model."""


def usual_ingest_threads() -> int:
    """Return how many threads read engines' sockets by default: other cores are left for queries."""
    return max(1, min(MOST_INGEST_THREADS, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Configuration of one indexer process."""

    server: ServerConfig = field(default_factory=ServerConfig)
    nats: NatsConfig | None = None
    """None = runs without NATS."""
    stream_max_age_seconds: float = 3600.0
    """Retention of streams made here."""
    snapshot_threshold: int = 1_000_000
    """Messages of a stream between two snapshots."""
    reset_states: bool = False
    """Clear streams, snapshots and consumers of the namespace at start."""
    peers: tuple[str, ...] = ()
    """host:port of other indexers, called in this order for the state of a worker that is new here."""
    client: ClientSecurity = PLAINTEXT
    """Client security towards peers and bridges."""
    max_blocks: int = 0
    """Bound of each block index, in held blocks; 0 = none."""
    router_ttl_seconds: float = 120.0
    """Seconds for which blocks whose history was lost stay predicted, and without events those of routed prompts."""
    max_predicted_blocks: int = 1_048_576
    """Predictions kept in each index."""
    prune_target_ratio: float = 0.8
    """Share of `max_predicted_blocks` that is left after pruning."""
    kv_events: bool = True
    """False = no events are read: what is known of the workers is predicted from routing decisions."""
    router_predicted_ttl_seconds: float | None = None
    """Seconds for which, beside events, blocks of routed prompts stay predicted; None = they are not."""
    shard: Shard = WHOLE
    """The workers that are indexed; others are registered only."""
    ingest_threads: int = field(default_factory=usual_ingest_threads)
    """Native threads that read engines' ZMQ sockets."""
    allowed_endpoints: frozenset[Allowed] = frozenset()
    """Event endpoints that are opened beside TCP connections."""

    def admit(self, spec: WorkerSpec) -> None:
        """Refuse a worker whose events would be read over ZMQ from an endpoint that is not allowed.

        Raises:
            InvalidArgument: Naming the field.
        """
        if spec.transport is Transport.ZMQ:
            spec.require_allowed(self.allowed_endpoints)

    @property
    def routed_ttl_seconds(self) -> float | None:
        """Return how long blocks of routed prompts stay predicted; None = they are not."""
        return self.router_predicted_ttl_seconds if self.kv_events else self.router_ttl_seconds

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> IndexerConfig:
        """Take the values of `flags.indexer_flags` and of those that servers share.

        Raises:
            ConfigError: If they contradict one another; names the flag.
        """
        return cls(
            server=ServerConfig.from_flags(values),
            nats=NatsConfig.from_flags(values),
            peers=_peers(values["peers"]),
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
            ingest_threads=values["ingest_threads"] or usual_ingest_threads(),
            allowed_endpoints=frozenset(values["allow_event_endpoints"]),
        )


def _peers(given: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of peers.

    Raises:
        ConfigError: One is not host:port.
    """
    peers = tuple(address for each in given for address in each.split(",") if address)
    for address in peers:
        if problem := address_problem(address):
            raise ConfigError(f"{address!r} {problem}", field="peers")
    return peers
