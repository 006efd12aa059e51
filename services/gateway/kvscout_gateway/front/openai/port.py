"""The OpenAI front's port, put together for one gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvscout_common.identity import TokenTable
from kvscout_common.serving import HttpPort
from kvscout_common.transport.http import HttpHandler, HttpLimits
from kvscout_gateway.front.openai.front import OpenAiFront
from kvscout_gateway.front.openai.generation import Generation
from kvscout_gateway.front.openai.passthrough import Passthrough
from kvscout_gateway.front.openai.sessions import Affinity

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

    def port(self) -> HttpPort:
        """What is to be served."""
        config = self._gateway.config
        limits = HttpLimits(body_bytes=config.server.max_message_bytes, write_seconds=config.client_write_seconds)
        return HttpPort(config.http_port, self._front, limits)

    def _front(self, tokens: TokenTable | None) -> HttpHandler:
        gateway = self._gateway

        def passes_keys() -> bool:
            return tokens is None and not gateway.engine_key.headers

        generation = Generation(gateway, self._affinity, passes_keys=passes_keys)
        passthrough = Passthrough(gateway, passes_keys=passes_keys)
        return OpenAiFront(gateway, generation, passthrough, self._metrics, tokens).handle
