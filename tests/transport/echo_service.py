"""A service for tests of transports: what it does is said by its requests, which are JSON; it notes how calls ended.

One process serves it over both transports, so that what a client sees of one can be compared with the other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import grpc

from kvscout_common.errors import InvalidArgument, ResourceExhausted
from kvscout_common.identity.identity import current_identity
from kvscout_common.identity.pem import Pem
from kvscout_common.rpc.guard import Guard
from kvscout_common.rpc.handlers import Synchronous

SERVICE = "kvscout.test.Echo"
TRAILERS = (("why", "so"), ("raw-bin", b"\0\xff"))
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class Echo:
    """The handlers; every request is a JSON object, with padding behind a NUL."""

    def __init__(self) -> None:
        self.running = 0
        self.cancelled = 0

    def add_to(self, server: Any) -> None:
        """Adds the service to a server of either transport."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Synchronous": Synchronous(self.synchronous).one_answer(),
            "SynchronousEach": Synchronous(self.synchronous).an_answer_each(),
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Download": grpc.unary_stream_rpc_method_handler(self.download),
            "Both": grpc.stream_stream_rpc_method_handler(self.both),
        }
        server.add_registered_method_handlers(SERVICE, handlers)
        if isinstance(server, grpc.aio.Server):
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def synchronous(self, request: bytes) -> bytes:
        """The request comes back, unless it wants an error."""
        _raise(_orders(request))
        return request + current_identity().tenant.encode()

    async def unary(self, request: bytes, context: Any) -> bytes:
        """One answer."""
        async with self._noted():
            orders = _orders(request)
            await self._suffer(orders, context)
            metadata = dict(context.invocation_metadata())
            seen = {name: str(metadata[name]) for name in orders.get("show", ()) if name in metadata}
            who = current_identity().tenant if orders.get("who") else ""
            return json.dumps(seen).encode() + who.encode() + bytes(orders.get("bytes", 0))

    async def download(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """As many answers as were wished for."""
        async with self._noted():
            orders = _orders(request)
            for number in range(orders.get("count", 0)):
                if number == orders.get("fail_at"):
                    await self._suffer(orders, context)
                yield str(number).encode() + b"\0" * orders.get("bytes", 0)
            if orders.get("fail_at") is None:
                await self._suffer(orders, context)

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Each request comes back, until one of them fails."""
        async with self._noted():
            async for request in requests:
                orders = _orders(request)
                await self._suffer(orders, context)
                if not orders.get("swallow"):
                    yield request

    async def _suffer(self, orders: dict[str, Any], context: Any) -> None:
        _raise(orders)
        match orders.get("fail"):
            case "abort":
                await context.abort(
                    grpc.StatusCode.ABORTED, "stop", trailing_metadata=(("why", "so"), ("raw-bin", b"\0\xff"))
                )
            case "hang":
                await asyncio.Event().wait()

    @asynccontextmanager
    async def _noted(self) -> AsyncIterator[None]:
        self.running += 1
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def _raise(orders: dict[str, Any]) -> None:
    match orders.get("fail"):
        case "invalid":
            raise InvalidArgument("is wrong: 100 % naïve\n", field="orders")
        case "exhausted":
            raise ResourceExhausted("too much", retry_after_seconds=1.5)
        case "defect":
            raise RuntimeError("a defect")


def _orders(request: bytes) -> dict[str, Any]:
    orders: dict[str, Any] = json.loads(request.rstrip(b"\0") or b"{}")
    return orders


class Served(NamedTuple):
    """A server of one transport."""

    server: Any
    echo: Echo
    port: int


@asynccontextmanager
async def native(
    pem: Pem | None = None,
    *,
    port: int = 0,
    max_streams: int = 1000,
    max_connections: int = 10_000,
    max_age_seconds: float | None = None,
    guard: Guard | None = None,
) -> AsyncIterator[Served]:
    """The service over the native transport."""
    # Imported here, as everywhere: the extension may not be there.
    from kvscout_common.rpc.native_server import NativeServer

    server = NativeServer(
        guard or Guard(),
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_streams=max_streams,
        max_connections=max_connections,
        max_age_seconds=max_age_seconds,
    )
    echo = Echo()
    echo.add_to(server)
    port = server.listen("127.0.0.1", port, pem)
    try:
        yield Served(server, echo, port)
    finally:
        await server.stop(0)


@asynccontextmanager
async def grpcio(*, guard: Guard | None = None) -> AsyncIterator[Served]:
    """The service over grpc.aio."""
    options = (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    )
    server = grpc.aio.server(interceptors=(guard or Guard(),), options=options)
    echo = Echo()
    echo.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Served(server, echo, port)
    finally:
        await server.stop(0)


def native_channel(port: int, *, host: str = "127.0.0.1", **options: Any) -> Any:
    """A channel of the native transport."""
    from kvscout_common.rpc.native_channel import NativeChannel

    return NativeChannel(f"{host}:{port}", max_message_bytes=MAX_MESSAGE_BYTES, **options)


def grpcio_channel(port: int) -> Any:
    """A channel of grpc.aio."""
    options = (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    )
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)


SERVERS = {"native": native, "grpcio": grpcio}


@asynccontextmanager
async def everyone() -> AsyncIterator[dict[str, tuple[Any, Echo]]]:
    """A channel of each transport to a server of each, by "client→server"."""
    async with AsyncExitStack() as stack:
        servers = {
            "native": await stack.enter_async_context(native()),
            "grpcio": await stack.enter_async_context(grpcio()),
        }
        clients = {"native": native_channel, "grpcio": grpcio_channel}
        pairs = {}
        for name, served in servers.items():
            for client, connect in clients.items():
                pairs[f"{client}→{name}"] = (await stack.enter_async_context(connect(served.port)), served.echo)
        yield pairs
