"""The engine's HTTP server: what it tells of itself, and errors in OpenAI's shape; `openai_api` generates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvscout_common.errors import InternalError, InvalidArgument, KvscoutError, NotFound, ResourceExhausted, Unavailable
from kvscout_mocker.answers import Document
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.metrics import engine_registry
from kvscout_mocker.publisher import SEND_HWM
from kvscout_mocker.rank import Rank

MAX_BODY_BYTES = 64 * 1024 * 1024
_STATUS: dict[type[KvscoutError], tuple[int, str]] = {
    InvalidArgument: (400, "BadRequestError"),
    NotFound: (404, "NotFoundError"),
    ResourceExhausted: (503, "ServiceUnavailableError"),
    Unavailable: (503, "ServiceUnavailableError"),
    InternalError: (500, "InternalServerError"),
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application() -> web.Application:
    """An aiohttp application without routes that answers errors as vLLM does."""
    return web.Application(middlewares=[_openai_errors], client_max_size=MAX_BODY_BYTES)


class EngineRoutes:
    """What an engine tells of itself: health, metrics, event sources.

    Args:
        config: Of the process.
        ranks: In order of their number.
    """

    def __init__(self, config: MockerConfig, ranks: Sequence[Rank]) -> None:
        self._config = config
        self._ranks = ranks
        self._registry = engine_registry(config, ranks)

    def add_to(self, app: web.Application) -> None:
        """Adds the routes to an application."""
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
            ]
        )

    async def health(self, _: web.Request) -> web.StreamResponse:
        """200 while the engines step: a crashed one ends the process."""
        return web.Response()

    async def metrics(self, _: web.Request) -> web.StreamResponse:
        """Prometheus text."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def kv_event_sources(self, _: web.Request) -> web.StreamResponse:
        """Each rank's resolved publisher configuration, keyed by rank, as vLLM ≥ 0.31."""
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


async def json_body(http: web.Request) -> object:
    """The body of a request.

    Raises:
        InvalidArgument: It is not JSON.
    """
    try:
        body: object = json.loads(await http.read())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"is not JSON: {error}", field="body") from None
    return body


def error_document(error: KvscoutError) -> Document:
    """An error of the tree in OpenAI's shape, for a body or for an event within a stream."""
    status, kind = status_of(error)
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": status}}


def status_of(error: KvscoutError) -> tuple[int, str]:
    """The HTTP status of an error and what vLLM calls its kind."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


@web.middleware
async def _openai_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ConnectionResetError:
        # The client went while it was being written to: nobody is there to be told, and nothing has failed.
        raise asyncio.CancelledError from None
    except web.HTTPException as error:
        kind = error.reason.replace(" ", "") + "Error"
        document = {"error": {"message": error.reason, "type": kind, "param": None, "code": error.status}}
        return web.json_response(document, status=error.status)
    except tuple(_STATUS) as error:
        retry = error.retry_after_seconds
        headers = {} if retry is None else {"Retry-After": str(max(1, round(retry)))}
        return web.json_response(error_document(error), status=status_of(error)[0], headers=headers)
