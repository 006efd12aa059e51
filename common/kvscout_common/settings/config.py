"""Configuration that every server shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvscout_common.endpoints import is_loopback
from kvscout_common.errors import ConfigError
from kvscout_common.observability import tracing
from kvscout_common.transport import Transport, chosen


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a TLS server."""

    certificate: Path
    key: Path
    client_ca: Path | None
    """Client certificates must be signed by this CA; None = clients need none."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of one gRPC server: address, security, observability, stop."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 = any free port; the ready line names it."""
    metrics_port: int = -1
    """-1 = no metrics endpoint, 0 = any free port."""
    metrics_worker_ranks: int = 64
    """Worker ranks with series of their own; the others are summed."""
    workers_file: Path | None = None
    workers_dns: tuple[str, ...] = ()
    """`dns://name:port?fields` whose addresses are workers."""
    workers_k8s: tuple[str, ...] = ()
    """Label selectors, or `pool/NAME`, whose pods are workers."""
    kubeconfig: Path | None = None
    """Access to the Kubernetes API; None = as a pod does, or kubectl."""
    auth_tokens: Path | None = None
    allow_anonymous: bool = False
    metrics_auth: bool = False
    """Metrics need a token of `auth_tokens` that is for all tenants."""
    tls: TlsFiles | None = None
    max_message_bytes: int = 64 * 1024 * 1024
    request_memory_bytes: int = 512 * 1024 * 1024
    """Memory for requests that are still coming or not yet passed on; no tenant may hold more than half of it."""
    max_concurrent_streams: int = 1000
    """Calls that one connection may have open; a client holds further ones back."""
    max_connection_age_seconds: float = 0.0
    """About so long a connection takes new calls; 0 = for ever."""
    grace_seconds: float = 120.0
    """Time that running calls have to end by themselves once the server stops."""
    shutdown_delay_seconds: float | None = None
    """Time before that in which health says NOT_SERVING and calls are still taken; None = as its ports need it."""
    transport: Transport = field(default_factory=chosen)
    log_level: str = "info"
    log_format: str = "text"
    otlp_endpoint: str = ""
    """Endpoint that traces are sent to; "" = there are none."""
    trace_ratio: float = 1.0
    """Share of the requests without a trace that begin one."""

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> ServerConfig:
        """Take the values of `flags.server_flags`.

        Raises:
            ConfigError: If they contradict one another; names the flag.
        """
        certificate, key, client_ca = values["tls_cert"], values["tls_key"], values["tls_client_ca"]
        if bool(certificate) != bool(key):
            raise ConfigError("--tls-cert and --tls-key go together", field="tls_cert")
        if client_ca and not certificate:
            raise ConfigError("needs --tls-cert", field="tls_client_ca")
        host = values["host"]
        if not is_loopback(host) and values["auth_tokens"] is None and not values["allow_anonymous"]:
            raise ConfigError(
                f"{host} is not a loopback address: give --auth-tokens, or --allow-anonymous on a trusted network",
                field="host",
            )
        if values["metrics_auth"] and values["auth_tokens"] is None:
            raise ConfigError("needs --auth-tokens", field="metrics_auth")
        if values["request_memory_bytes"] < 2 * values["max_message_bytes"]:
            raise ConfigError("must be at least twice --max-message-bytes", field="request_memory_bytes")
        if values["otlp_endpoint"]:
            tracing.check_endpoint(values["otlp_endpoint"])
        return cls(
            host=host,
            port=values["port"],
            metrics_port=values["metrics_port"],
            metrics_worker_ranks=values["metrics_worker_ranks"],
            workers_file=values["workers_file"],
            workers_dns=tuple(values.get("workers_dns", ())),
            workers_k8s=tuple(values.get("workers_k8s", ())),
            kubeconfig=values.get("kubeconfig"),
            auth_tokens=values["auth_tokens"],
            allow_anonymous=values["allow_anonymous"],
            metrics_auth=values["metrics_auth"],
            tls=TlsFiles(certificate, key, client_ca) if certificate else None,
            max_message_bytes=values["max_message_bytes"],
            request_memory_bytes=values["request_memory_bytes"],
            max_concurrent_streams=values["max_concurrent_streams"],
            max_connection_age_seconds=values["max_connection_age_seconds"],
            grace_seconds=values["grace_seconds"],
            shutdown_delay_seconds=values["shutdown_delay_seconds"],
            transport=Transport(values["rpc_transport"]),
            log_level=values["log_level"],
            log_format=values["log_format"],
            otlp_endpoint=values["otlp_endpoint"],
            trace_ratio=values["trace_ratio"],
        )
