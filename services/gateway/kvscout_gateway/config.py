"""What the gateway can be told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvscout_common.channel import PLAINTEXT, ClientSecurity
from kvscout_common.config import ServerConfig
from kvscout_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Configuration of one gateway process."""

    server: ServerConfig = field(default_factory=ServerConfig)
    security: ClientSecurity = PLAINTEXT
    """How it calls indexers and schedulers."""
    indexers: tuple[str, ...] = ("127.0.0.1:50051",)
    """Addresses in order of preference; empty = routing on load alone."""
    schedulers: tuple[str, ...] = ("127.0.0.1:50052",)
    """Addresses in order of preference; the first healthy one decides."""
    indexer_timeout_seconds: float = 0.02
    """An indexer slower than this is not waited for: the request is routed on load alone."""
    scheduler_timeout_seconds: float = 1.0
    migration_limit: int = 1
    """Tries on another worker after one failed before its first token."""
    engine_connect_seconds: float = 2.0
    engine_idle_seconds: float = 300.0
    """Longest silence of an engine within one request."""
    max_in_flight: int = 10_000
    """Requests that Generate runs at once; more are refused."""
    lease_seconds: int = 300
    """Lease of the gateway's own bookings; renewed while a request runs."""


def addresses(flag: str, given: Sequence[str]) -> tuple[str, ...]:
    """Checked host:port addresses, in order.

    Raises:
        ConfigError: If one is no address, or given twice; names the flag.
    """
    for address in given:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{address!r} is not host:port", field=flag)
    if len(set(given)) < len(given):
        raise ConfigError("names an address twice", field=flag)
    return tuple(given)
