"""An in-process gRPC server with kvscout's interceptors, for tests of what surrounds a servicer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from kvscout_common import keepalive
from kvscout_common.channel import PLAINTEXT, ClientSecurity, open_channel
from kvscout_common.guard import Guard
from kvscout_common.identity import TokenTable


@asynccontextmanager
async def serving(
    add: Callable[[grpc.aio.Server], None],
    *,
    tokens: TokenTable | None = None,
    security: ClientSecurity = PLAINTEXT,
    on_port: Callable[[int], object] = lambda port: None,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server that `add` adds a servicer to; `on_port` is told where, for further channels."""
    server = grpc.aio.server(interceptors=(Guard(tokens),), options=keepalive.SERVER_OPTIONS)
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    on_port(port)
    channel = open_channel(f"127.0.0.1:{port}", security)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(None)
