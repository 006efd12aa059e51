"""An engine that behaves, or misbehaves, as a test says: vLLM's completions in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from aiohttp import web

from support.web_servers import web_server

Script: TypeAlias = "Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]"


class ScriptedEngine:
    """Runs `script` for each request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        """Bodies that came."""
        self.headers: list[Mapping[str, str]] = []
        self.aborted = 0
        """Requests whose client went away."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers)
        try:
            return await self.script(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise


@asynccontextmanager
async def scripted_engine(script: Script) -> AsyncIterator[ScriptedEngine]:
    """A scripted engine that listens."""
    engine = ScriptedEngine(script)
    app = web.Application(client_max_size=1 << 26)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, engine.handle)
    async with web_server(app, handler_cancellation=True, shutdown_timeout=0.1) as engine.url:
        yield engine


async def begin(request: web.Request) -> web.StreamResponse:
    """The head of a stream of events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, **document: Any) -> None:
    """One event."""
    await response.write(b"data: " + json.dumps(document).encode() + b"\n\n")


async def send_tokens(response: web.StreamResponse, *token_ids: int, finish: str | None = None) -> None:
    """A chunk of output."""
    await send(response, choices=[{"token_ids": list(token_ids), "text": "", "finish_reason": finish}])


async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """What a healthy engine does: tokens 1, 2, 3, ..., then the usage."""
    response = await begin(request)
    for token in range(1, body["max_tokens"] + 1):
        await send_tokens(response, token, finish="length" if token == body["max_tokens"] else None)
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    await send(response, choices=[], usage=usage)
    await response.write(b"data: [DONE]\n\n")
    return response


async def drop(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Closes the connection without an answer, as a process that dies."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Never says anything."""
    await asyncio.Event().wait()
    raise AssertionError


def refuse(status: int, message: str, **headers: str) -> Script:
    """Answers an error in OpenAI's shape."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message, "code": status}}, status=status, headers=headers)

    return script
