"""Configuration of one process with several services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvscout_common.nats.config import NatsConfig
from kvscout_common.settings.config import ServerConfig
from kvscout_gateway.config import GatewayConfig
from kvscout_indexer.config import IndexerConfig
from kvscout_scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A gateway, and which of its upstreams are in its process."""

    gateway: GatewayConfig
    indexer: IndexerConfig | None
    """None = indexers behind rpcs, or none at all."""
    scheduler: SchedulerConfig | None
    """None = schedulers behind rpcs."""

    @property
    def server(self) -> ServerConfig:
        """Return how the process is served."""
        return self.gateway.server

    @property
    def nats(self) -> NatsConfig | None:
        """Return the connection to NATS; None = runs without."""
        return self.gateway.nats

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> ServeConfig:
        """Take the values of the command's flags.

        Raises:
            ConfigError: If they contradict one another; names the flag.
        """
        lease = values["lease_seconds"]
        defaults = {"gateway": GatewayConfig().lease_seconds, "scheduler": SchedulerConfig().settings.lease_seconds}

        def values_of(service: str) -> dict[str, Any]:
            return {**values, "lease_seconds": lease if lease is not None else defaults[service]}

        local_indexer = not values["indexer"] and not values["no_indexer"]
        return cls(
            GatewayConfig.from_flags(values_of("gateway")),
            IndexerConfig.from_flags(values) if local_indexer else None,
            SchedulerConfig.from_flags(values_of("scheduler")) if not values["scheduler"] else None,
        )
