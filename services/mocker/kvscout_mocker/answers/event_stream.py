"""Answers made of server-sent events."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from kvscout_mocker.server import Document

PING_SECONDS = 0.1
DONE = b"data: [DONE]\n\n"


async def begin_stream(http: web.Request) -> web.StreamResponse:
    """Send the head."""
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(http)
    return response


def break_off(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Break the body off: its status is out already, and this is the one unmistakable way to fail."""
    if http.transport is not None:
        http.transport.abort()
    return response


async def only_pings(http: web.Request) -> web.StreamResponse:
    """Send pings until the client goes away."""
    response = await begin_stream(http)
    while True:
        await response.write(b": ping\n\n")
        await asyncio.sleep(PING_SECONDS)


def sse(document: Document) -> bytes:
    """Return one event as bytes."""
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def named_sse(name: str, document: Document) -> bytes:
    """Return one event with a name, as bytes."""
    return b"event: " + name.encode() + b"\n" + sse(document)
