"""The HTTP port of one gateway: its fronts, put together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from kvscout_common.errors import NotFound
from kvscout_common.http.byte_budget import SHARE
from kvscout_common.http.http import HttpCall, HttpHandler, HttpLimits
from kvscout_common.http.metrics_server import MetricsPage
from kvscout_common.http.web_origins import WebOrigins
from kvscout_common.identity.identity import TokenTable
from kvscout_common.rpc.serving import HttpPort
from kvscout_gateway.fronts.access import Caller
from kvscout_gateway.fronts.client_paths import MODELS
from kvscout_gateway.fronts.dashboard.dashboard import Dashboard
from kvscout_gateway.fronts.dashboard.front import EVENTS, DashboardFront
from kvscout_gateway.fronts.openai.generation import Generation
from kvscout_gateway.fronts.openai.models import Models
from kvscout_gateway.fronts.openai.passthrough import Passthrough
from kvscout_gateway.fronts.openai.thresholds import Thresholds
from kvscout_gateway.fronts.shadow.front import ShadowFront
from kvscout_gateway.http.router import METRICS, THRESHOLDS, Answer, Router, metrics_answer
from kvscout_gateway.values.dialects import API_DIALECTS

if TYPE_CHECKING:
    from kvscout_gateway.gateway import Gateway


class GatewayHttp:
    """Makes the router once it is known who may ask."""

    def __init__(self, gateway: Gateway, metrics: CollectorRegistry, *, dashboard: Dashboard | None = None) -> None:
        """Check its part of the configuration.

        Args:
            gateway: What it serves.
            metrics: Shown at /metrics.
            dashboard: In place of the one that the configuration asks for.

        Raises:
            ConfigError: The sessions are not where they could be.
        """
        self._gateway = gateway
        self._metrics = metrics
        config = gateway.config
        if dashboard is None and config.dashboard and config.http_port >= 0:
            dashboard = Dashboard(gateway)
        self._dashboard = dashboard

    def tasks(self) -> dict[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs beside the server, by name."""
        return self._dashboard.tasks() if self._dashboard is not None else {}

    def port(self) -> HttpPort:
        """Return what is to be served."""
        config, budget = self._gateway.config, self._gateway.budget
        # No body is longer than what its tenant's share has room for.
        most = min(config.server.max_message_bytes, budget.limit // SHARE // self._gateway.body_copies)
        limits = HttpLimits(body_bytes=most, write_seconds=config.client_write_seconds)
        return HttpPort(config.http_port, self.handler, limits)

    def handler(self, tokens: TokenTable | None) -> HttpHandler:
        """Return what answers requests.

        Args:
            tokens: Clients' API keys; None = everybody may do everything.
        """
        gateway, config, context = self._gateway, self._gateway.config, self._gateway.front_context

        def passes_keys() -> bool:
            return tokens is None and not gateway.engine_key.headers

        generation = Generation(context, passes_keys=passes_keys)
        dashboard = DashboardFront(self._dashboard) if self._dashboard is not None else None
        passed_on: Answer = Passthrough(context, passes_keys=passes_keys).answer
        answers: dict[str, Answer] = {
            **dict.fromkeys(API_DIALECTS, generation.answer),
            MODELS: Models(gateway.catalog, gateway.engines).answer,
            THRESHOLDS: Thresholds(gateway.scheduler, gateway.charge).answer,
            EVENTS: dashboard.watch if dashboard is not None else _no_dashboard,
            METRICS: metrics_answer(MetricsPage(self._metrics, config.server.metrics_worker_ranks)),
        }
        if config.shadow is not None:
            shadow = ShadowFront(context, config.shadow, gateway.shadow_report, passes_keys=passes_keys)
            passed_on = shadow.answer
            answers |= dict.fromkeys((*API_DIALECTS, MODELS), passed_on)
        return Router(
            answers,
            passed_on=passed_on,
            page=dashboard.show if dashboard is not None else None,
            tokens=tokens,
            origins=WebOrigins(guarded=tokens is not None, host=config.server.host, allowed=config.cors_origins),
            client_paths=config.client_paths,
            failure_log=gateway.failure_log,
            leaving=lambda: gateway.leaving,
        ).handle


async def _no_dashboard(call: HttpCall, caller: Caller) -> None:
    raise NotFound("there is no dashboard: the gateway runs with --no-dashboard")
