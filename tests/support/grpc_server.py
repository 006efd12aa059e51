"""An in-process gRPC server with kvscout's interceptors, for tests of what surrounds a servicer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.identity.identity import TokenTable
from kvscout_common.rpc.channel import open_channel
from kvscout_common.rpc.guard import Guard
from kvscout_common.transport import keepalive


@asynccontextmanager
async def serving(
    add: Callable[[grpc.aio.Server], None],
    *,
    tokens: TokenTable | None = None,
    security: ClientSecurity = PLAINTEXT,
    on_port: Callable[[int], object] = lambda port: None,
    native: bool = False,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a server, the extension's or grpcio's, that `add` adds a servicer to; `on_port` is told where, for
    further channels."""
    server: Any
    if native:
        from kvscout_common.rpc.native_server import NativeServer

        server = NativeServer(Guard(tokens), max_message_bytes=4 << 20, max_streams=1000)
        add(server)
        port = server.listen("127.0.0.1", 0)
    else:
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
