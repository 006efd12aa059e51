"""Web servers of tests, which leave no connection open when they end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ACCEPTING_TURNS = 5
"""Turns of the loop from when a connection is taken until the server knows it."""


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
        await stop_accepting(listening)
        await runner.cleanup()


async def stop_accepting(listening: socket.socket) -> None:
    """Comes before a server ends: a connection that asyncio is just taking then would stay open, and nobody have it.

    Args:
        listening: Its socket.
    """
    asyncio.get_running_loop().remove_reader(listening)
    for _ in range(ACCEPTING_TURNS):
        await asyncio.sleep(0)
