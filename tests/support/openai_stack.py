"""The OpenAI front of a gateway in this process, in front of engines that do what a test says; no helper answers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from kvscout_common.http.factory import serve_http
from kvscout_common.http.http import HttpServer
from kvscout_common.identity.identity import TokenTable
from kvscout_common.registry.backends import Backends
from kvscout_common.worker import WorkerSpec
from kvscout_gateway.config import GatewayConfig
from kvscout_gateway.engines.timeouts import EngineTimeouts
from kvscout_gateway.gateway import Gateway
from kvscout_gateway.http.port import GatewayHttp
from kvscout_gateway.upstreams.scheduler.remote import RemoteScheduler
from support.web_servers import web_server

MODEL = "m"
TIMEOUTS = EngineTimeouts(connect_seconds=20.0)
"""A machine that is busy with other tests must not look like an engine that cannot be reached."""
NOBODY = "127.0.0.1:1"
"""Where no scheduler is: the workers take turns."""


class Received(NamedTuple):
    """A request as an engine got it."""

    method: str
    target: str
    headers: dict[str, str]
    """By names in lower case."""
    body: bytes


Script: TypeAlias = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class Engine:
    """An engine of any path; keeps what came."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self.received: list[Received] = []
        self.aborted = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(request.method, request.raw_path, headers, body))
        try:
            return await self.script(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise


@asynccontextmanager
async def engine(script: Script) -> AsyncIterator[Engine]:
    """An engine that listens."""
    made = Engine(script)
    app = web.Application(client_max_size=1 << 27)
    app.router.add_route("*", "/{path:.*}", made.handle)
    async with web_server(app, handler_cancellation=True, shutdown_timeout=0.1) as made.url:
        yield made


@dataclass(slots=True)
class Front:
    """A front and a client of it."""

    url: str
    http: aiohttp.ClientSession
    gateway: Gateway
    server: HttpServer
    metrics: CollectorRegistry = field(default_factory=CollectorRegistry)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a POST; what is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, **{"Content-Type": "application/json", **headers})

    async def request(
        self, method: str, path: str, data: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of any request; an underscore in a header's name stands for a hyphen."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.request(
            method, self.url + path, data=data and io.BytesIO(data), headers=named
        ) as response:
            received = {name.lower(): value for name, value in response.headers.items()}
            return response.status, received, await response.read()

    def sample(self, name: str, **labels: str) -> float | None:
        """A metric of the gateway."""
        return self.metrics.get_sample_value(name, labels)


def spec(worker_id: str, url: str, **fields: Any) -> WorkerSpec:
    """A worker."""
    return WorkerSpec(worker_id, **{"model": MODEL, "block_size": 16, "http_endpoint": url, **fields})


def scheduler_of(gateway: Gateway) -> RemoteScheduler:
    """The schedulers of a gateway that has none of its own."""
    assert isinstance(gateway.scheduler, RemoteScheduler)
    return gateway.scheduler


@asynccontextmanager
async def front(*workers: WorkerSpec, tokens: TokenTable | None = None, **config: Any) -> AsyncIterator[Front]:
    """A front with these workers.

    Args:
        workers: Registered.
        tokens: Clients' keys.
        config: Of the gateway.
    """
    metrics = CollectorRegistry()
    settings = GatewayConfig(indexers=(), schedulers=(NOBODY,), **{"http_port": 0, "timeouts": TIMEOUTS, **config})
    gateway = Gateway(settings, metrics, Backends.of_process("kvscout-gateway", settings.server, None))
    for worker in workers:
        gateway.registry.register(worker)
    port = GatewayHttp(gateway, metrics).port()
    server = serve_http(port.make(tokens), port.limits)
    url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(gateway.close)
        stack.push_async_callback(server.stop, 0.0)
        http = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield Front(url, http, gateway, server, metrics)


def says(body: bytes, status: int = 200, **headers: str) -> Script:
    """Answers so, at once."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": "application/json", **named})

    return script


def streams(*chunks: bytes, then: Callable[[web.Request], Awaitable[None]] | None = None) -> Script:
    """Answers a stream of events in these chunks; `then` is awaited before its end."""

    async def script(request: web.Request, _: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        if then is not None:
            await then(request)
        return response

    return script


async def breaks(request: web.Request) -> None:
    """Loses the connection."""
    assert request.transport is not None
    request.transport.abort()


async def hangs(_: web.Request) -> None:
    """Says nothing more."""
    await asyncio.Event().wait()


def event(document: Any) -> bytes:
    """One event of a stream, as vLLM writes it."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def delta(text: str, finish: str | None = None) -> bytes:
    """A chunk of a chat completion."""
    return event({"id": "1", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


USAGE = event({"id": "1", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}})
DONE = b"data: [DONE]\n\n"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
