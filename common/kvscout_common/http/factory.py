"""HTTP clients and servers of the transport that `--rpc-transport` names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvscout_common.http.http import HttpClient, HttpHandler, HttpLimits, HttpServer
from kvscout_common.transport import Transport, chosen


def connect(*, ca: bytes | None = None) -> HttpClient:
    """Return a client, on the running loop.

    Args:
        ca: PEM of whom to trust; None = whom this machine trusts.
    """
    if chosen() is Transport.NATIVE:
        from kvscout_common.http.native_http_client import NativeHttpClient

        return NativeHttpClient(ca)
    from kvscout_common.http.aiohttp_client import AiohttpClient

    return AiohttpClient(ca)


@asynccontextmanager
async def http_client() -> AsyncIterator[HttpClient]:
    """Return a client whose connections are closed on exit."""
    http = connect()
    try:
        yield http
    finally:
        await http.close()


def serve_http(handler: HttpHandler, limits: HttpLimits | None = None) -> HttpServer:
    """Return a server that does not listen yet, on the running loop."""
    if chosen() is Transport.NATIVE:
        from kvscout_common.http.native_http_server import NativeHttpServer

        return NativeHttpServer(handler, limits or HttpLimits())
    from kvscout_common.http.aiohttp_server import AiohttpServer

    return AiohttpServer(handler, limits or HttpLimits())
