"""Configuration of one process with several services."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvscout_common.errors import ConfigError
from kvscout_common.nats.config import NatsConfig
from kvscout_common.settings.config import ServerConfig
from kvscout_common.settings.flags import names_of
from kvscout_common.shards import WHOLE
from kvscout_gateway.config import GatewayConfig
from kvscout_indexer.config import IndexerConfig
from kvscout_indexer.flags import indexer_flags
from kvscout_scheduler.config import SchedulerConfig
from kvscout_scheduler.flags import scheduler_flags


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
    def from_flags(cls, values: Mapping[str, Any], given: Collection[str] = ()) -> ServeConfig:
        """Take the values of the command's flags.

        Args:
            values: By name.
            given: Names of those on the command line, which must concern a service of this process.

        Raises:
            ConfigError: If they contradict one another; names the flag.
        """
        if values["indexer"] and values["no_indexer"]:
            raise ConfigError("cannot be combined with --indexer", field="no_indexer")
        lease = values["lease_seconds"]
        defaults = {"gateway": GatewayConfig().lease_seconds, "scheduler": SchedulerConfig().settings.lease_seconds}

        def values_of(service: str) -> dict[str, Any]:
            return {**values, "lease_seconds": lease if lease is not None else defaults[service]}

        indexer = scheduler = None
        if values["indexer"] or values["no_indexer"]:
            _require_none(given, names_of(indexer_flags()), "--indexer" if values["indexer"] else "--no-indexer")
        else:
            indexer = IndexerConfig.from_flags(values)
            if indexer.shard != WHOLE:
                raise ConfigError(
                    "the indexer of this process has all workers; shards are indexers behind --indexer", field="shard"
                )
        if values["scheduler"]:
            _require_none(given, names_of(scheduler_flags()), "--scheduler")
        else:
            scheduler = SchedulerConfig.from_flags(values_of("scheduler"))
        return cls(GatewayConfig.from_flags(values_of("gateway")), indexer, scheduler)


def _require_none(given: Collection[str], flags: Collection[str], instead: str) -> None:
    """Refuse flags of a service that is not in this process.

    Raises:
        ConfigError: One is given.
    """
    for name in sorted(frozenset(flags).intersection(given)):
        raise ConfigError(f"has no effect with {instead}", field=name)
