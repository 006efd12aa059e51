"""Configuration of the bridge."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvscout_blocks.publish.event_stream import STREAM_MAX_AGE_SECONDS
from kvscout_blocks.publish.publication import MAX_BUFFERED_BYTES
from kvscout_common.endpoints import Allowed
from kvscout_common.nats.config import NatsConfig
from kvscout_common.settings.config import ServerConfig
from kvscout_common.worker import Transport, WorkerSpec

LEASE_SECONDS = 15


@dataclass(frozen=True, slots=True)
class BridgeConfig:
    """Configuration of one bridge process."""

    server: ServerConfig = field(default_factory=ServerConfig)
    nats: NatsConfig = field(default_factory=NatsConfig)
    worker: WorkerSpec | None = None
    """The engine that the flags name; None: the workers file names them all."""
    allowed_endpoints: frozenset[Allowed] = frozenset()
    """Event endpoints that are opened beside TCP connections."""
    transport: Transport = Transport.JETSTREAM
    """NATS_CORE or JETSTREAM."""
    local_indexer: bool = True
    """True if requests for lost events are answered."""
    max_buffered_bytes: int = MAX_BUFFERED_BYTES
    """Batches that wait for NATS."""
    stream_max_age_seconds: float = STREAM_MAX_AGE_SECONDS
    """Retention of a stream that is not there yet."""
    register_workers: bool = True
    """True if the engines are registered in NATS, and their leases kept."""
    lease_seconds: int = LEASE_SECONDS
    """After so long without this bridge its engines are no longer registered."""
    advertised: str = ""
    """host:port under which others reach this bridge's gRPC server; "" = its own, if it is bound to one."""
