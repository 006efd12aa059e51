"""Web servers of tests, which leave no connection open when they end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from support.tcp_server import stop_accepting


@asynccontextmanager
async def web_server(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """An application that listens on loopback; gives its URL.

    Args:
        app: What answers.
        options: Of its `web.AppRunner`.
    """
    runner = web.AppRunner(app, **options)
    await runner.setup()
    listening = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listening).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await end_web_server(runner, listening)


async def end_web_server(runner: web.AppRunner, listening: socket.socket, *, at_once: bool = False) -> None:
    """Ends a server, and waits until its connections are closed.

    Args:
        runner: Runs it.
        listening: Its socket.
        at_once: Reset every connection, instead of letting requests end for as long as the runner allows.
    """
    await stop_accepting(listening)
    connections = runner.server.connections if runner.server is not None else []
    transports = [each.transport for each in connections if each.transport is not None]
    if at_once:
        for transport in transports:
            transport.abort()
    await runner.cleanup()
    # What was written and nobody reads would keep a connection open.
    for transport in transports:
        transport.abort()
    await asyncio.sleep(0)
