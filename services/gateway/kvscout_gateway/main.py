"""`kvscout-gateway`: flags and environment → one frozen config → serve."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvscout_common.errors import ConfigError
from kvscout_common.nats.config import nats_flags
from kvscout_common.rpc.serving import App, run
from kvscout_common.settings.flags import (
    SectionedCommand,
    client_flags,
    server_flags,
)
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.flags import address_flags, gateway_flags, lease_flag

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvscout_gateway.gateway import Gateway


FIRST = (
    "--workers-file",
    "--workers-k8s",
    "--indexer",
    "--no-indexer",
    "--scheduler",
    "--nats-server",
    "--host",
    "--port",
    "--http-port",
    "--metrics-port",
    "--auth-tokens",
    "--allow-anonymous",
    "--tls-cert",
    "--tls-key",
    "--tokenizer",
    "--session-affinity",
    "--engine-key-file",
    "--endpoint-picker-port",
    "--shadow",
    "--log-level",
)
"""Flags that --help shows."""


@click.command(cls=SectionedCommand, first=FIRST)
@address_flags()
@gateway_flags()
@lease_flag
@client_flags()
@nats_flags()
@server_flags("gateway", port=7050, metrics_port=9093)
def main(**values: Any) -> None:
    """Route LLM requests to the workers that have their prompts cached, and run them."""
    try:
        config = GatewayConfig.from_flags(values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    run(config.server, lambda: build(config))


async def build(config: GatewayConfig) -> App:
    """Return the gateway as an app to serve."""
    from prometheus_client import CollectorRegistry

    from kvscout_common.registry.backends import Backends
    from kvscout_gateway.gateway import Gateway

    metrics = CollectorRegistry()
    backends = Backends.of_process("kvscout-gateway", config.server, config.nats)
    gateway = Gateway(config, metrics, backends)

    async def close() -> None:
        await gateway.close()
        await backends.close()

    app = gateway_app(config, gateway, metrics)
    return replace(app, tasks={**backends.tasks, **app.tasks}, close=close)


def gateway_app(config: GatewayConfig, gateway: Gateway, metrics: CollectorRegistry) -> App:
    """Return a gateway as an app; the workers and NATS are run and closed by their owner.

    Args:
        config: The gateway's.
        gateway: Not running yet.
        metrics: Registry of its metrics.
    """
    from kvscout_gateway.fronts.grpc.servicer import SERVICE, GatewayServicer
    from kvscout_gateway.http.port import GatewayHttp

    side_ports = []
    if config.endpoint_picker is not None:
        from kvscout_gateway.fronts.endpoint_picker.front import endpoint_picker

        side_ports.append(endpoint_picker(config.endpoint_picker, gateway.front_context, metrics, gateway.on_drain))
    http = GatewayHttp(gateway, metrics)
    return App(
        name="gateway",
        services=[(SERVICE, GatewayServicer(gateway).add_to)],
        bound=gateway.bound,
        tasks={**gateway.tasks(), **http.tasks()},
        warm=gateway.warm,
        leave=gateway.leave,
        drain=gateway.drain,
        close=gateway.close,
        metrics=metrics,
        limits=gateway.registry.limits,
        budget=gateway.budget,
        side_ports=side_ports,
        http=http.port() if config.http_port >= 0 else None,
    )


if __name__ == "__main__":
    main()
