"""The OpenAI front's port, put together for one gateway."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from kvscout_common.http.byte_budget import SHARE
from kvscout_common.http.http import HttpHandler, HttpLimits
from kvscout_common.identity.identity import TokenTable
from kvscout_common.rpc.serving import HttpPort
from kvscout_gateway.fronts.dashboard.dashboard import Dashboard
from kvscout_gateway.fronts.dashboard.front import DashboardFront
from kvscout_gateway.http.router import OpenAiFront
from kvscout_gateway.fronts.openai.generation import Generation
from kvscout_gateway.fronts.openai.passthrough import Passthrough
from kvscout_gateway.fronts.openai.sessions import Affinity
from kvscout_gateway.fronts.shadow.front import ShadowFront
from kvscout_gateway.gateway import BODY_COPIES

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway


class OpenAiPort:
    """Makes the front once it is known who may ask."""

    def __init__(self, gateway: Gateway, metrics: CollectorRegistry) -> None:
        """Checks its part of the configuration.

        Raises:
            ConfigError: The sessions are not where they could be.
        """
        self._gateway = gateway
        self._metrics = metrics
        self._affinity = Affinity(gateway.config.session_affinity)
        config = gateway.config
        self._dashboard = Dashboard(gateway) if config.dashboard and config.http_port >= 0 else None

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """What runs beside the server, by name."""
        return self._dashboard.tasks() if self._dashboard is not None else {}

    def port(self) -> HttpPort:
        """What is to be served."""
        config = self._gateway.config
        # No body is longer than what its tenant's share has room for.
        most = min(config.server.max_message_bytes, self._gateway.budget.limit // SHARE // BODY_COPIES)
        limits = HttpLimits(body_bytes=most, write_seconds=config.client_write_seconds)
        return HttpPort(config.http_port, self._front, limits)

    def _front(self, tokens: TokenTable | None) -> HttpHandler:
        gateway = self._gateway

        def passes_keys() -> bool:
            return tokens is None and not gateway.engine_key.headers

        generation = Generation(gateway, self._affinity, passes_keys=passes_keys)
        passthrough = Passthrough(gateway, passes_keys=passes_keys)
        dashboard = None
        if self._dashboard is not None:
            dashboard = DashboardFront(self._dashboard)
        shadow = None
        if gateway.config.shadow is not None:
            shadow = ShadowFront(gateway, gateway.config.shadow, passes_keys=passes_keys)
        return OpenAiFront(
            gateway, generation, passthrough, self._metrics, tokens, dashboard=dashboard, shadow=shadow
        ).handle
