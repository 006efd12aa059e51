"""Routes through which an engine reports on itself: health, metrics, event sources."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvscout_mocker.config import MockerConfig
from kvscout_mocker.engine.metrics import engine_registry
from kvscout_mocker.engine.publisher import SEND_HWM
from kvscout_mocker.engine.rank import Rank


class EngineRoutes:
    """`/health`, `/metrics`, `/kv_event_sources` and `/reset_prefix_cache`.

    Args:
        config: Configuration of the process.
        ranks: In order of their number.
    """

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank]) -> None:
        self._config = config
        self._ranks = ranks
        self._registry = engine_registry(config, ranks)

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
            ]
        )

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Return 200 while the engines step: a crashed one ends the process."""
        return web.Response()

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """Return Prometheus text."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def kv_event_sources(self, _: web.Request) -> web.StreamResponse:
        """Return each rank's resolved publisher configuration, keyed by rank, as vLLM ≥ 0.31."""
        return web.json_response(
            {
                str(rank.dp_rank): {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": rank.publisher.endpoint,
                    "replay_endpoint": rank.publisher.replay_endpoint or None,
                    "buffer_steps": self._config.buffer_steps,
                    "hwm": SEND_HWM,
                    "topic": rank.publisher.topic,
                }
                for rank in self._ranks
            }
        )

    async def reset_prefix_cache(self, _: web.Request) -> web.StreamResponse:
        """Forget all cached blocks; `success` is false if a rank is busy and keeps its own."""
        done = [rank.engine.reset_prefix_cache() for rank in self._ranks]
        return web.json_response({"success": all(done)})
