"""The client side of gRPC: channels with TLS and tokens, and errors mapped back to our own."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import grpc

from kvscout_common.errors import Cancelled, KvscoutError, Unavailable
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity, TokenFile
from kvscout_common.transport import Transport, chosen
from kvscout_common.transport.keepalive import CLIENT_OPTIONS, TIME_MS
from kvscout_common.transport.statuses import ANSWERED_TRAILER, CAUSE_TRAILER, from_status

T = TypeVar("T")
_NOT_CONNECTED = re.compile(r"failed to connect to all addresses; .*?:(\S+): Failed to connect to remote host: (.*)")
"""What grpc says where nothing listens."""


def open_channel(
    address: str,
    security: ClientSecurity = PLAINTEXT,
    *,
    max_message_bytes: int = 64 * 1024 * 1024,
    server_name: str = "",
    keepalive_ms: int | None = None,
) -> grpc.aio.Channel:
    """Open a channel to a service; it connects lazily and reconnects by itself.

    Args:
        address: host:port.
        security: TLS files and token.
        max_message_bytes: Largest message sent or received.
        server_name: What the server's certificate must be for; "" = the host of the address.
        keepalive_ms: Silence after which the server is pinged; None = `keepalive.TIME_MS`.
    """
    if chosen() is Transport.NATIVE:
        native: Any = _native_channel(address, security, max_message_bytes, server_name, keepalive_ms or TIME_MS)
        channel: grpc.aio.Channel = native
        return channel
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A helper that comes back is used again within a second, not after grpc's two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        *CLIENT_OPTIONS,
    ]
    if keepalive_ms is not None:
        options = [(name, keepalive_ms if name == "grpc.keepalive_time_ms" else value) for name, value in options]
    interceptors: list[grpc.aio.ClientInterceptor] = []
    pems = security.pems()
    if security.token_file is not None:
        interceptors = list(bearer_interceptors(TokenFile(Path(security.token_file))))
    if pems is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    ca, certificate, key = pems
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


def _native_channel(
    address: str, security: ClientSecurity, max_message_bytes: int, server_name: str, keepalive_ms: int
) -> Any:
    # Imported here: the extension may not be there.
    from kvscout_common.rpc.native_channel import NativeChannel, client_tls

    token = None if security.token_file is None else TokenFile(Path(security.token_file)).token
    pems = security.pems()
    tls = client_tls(*pems) if pems is not None else None
    return NativeChannel(
        address,
        max_message_bytes=max_message_bytes,
        tls=tls,
        token=token,
        server_name=server_name,
        keepalive_ms=keepalive_ms,
    )


def bearer_interceptors(file: TokenFile) -> tuple[grpc.aio.ClientInterceptor, ...]:
    """Client interceptors that add a bearer token to every call, one for each shape of call."""

    def with_token(details: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {file.token()}")
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )

    class UnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
        async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            return await continuation(with_token(client_call_details), request)

    class UnaryStream(grpc.aio.UnaryStreamClientInterceptor):
        async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
            return await continuation(with_token(client_call_details), request)

    class StreamUnary(grpc.aio.StreamUnaryClientInterceptor):
        async def intercept_stream_unary(
            self, continuation: Any, client_call_details: Any, request_iterator: Any
        ) -> Any:
            return await continuation(with_token(client_call_details), request_iterator)

    class StreamStream(grpc.aio.StreamStreamClientInterceptor):
        async def intercept_stream_stream(
            self, continuation: Any, client_call_details: Any, request_iterator: Any
        ) -> Any:
            return await continuation(with_token(client_call_details), request_iterator)

    return UnaryUnary(), UnaryStream(), StreamUnary(), StreamStream()


def to_error(error: grpc.aio.AioRpcError) -> KvscoutError:
    """Our exception for a failed call."""
    trailers = dict(error.trailing_metadata() or ())
    retry_after: float | None = None
    try:
        retry_after = float(trailers["retry-after"])
    except (KeyError, ValueError):
        pass  # absent, or a date: some proxies send those
    raised = str(trailers.get(ANSWERED_TRAILER, ""))
    cause = str(trailers.get(CAUSE_TRAILER, ""))
    details = _NOT_CONNECTED.sub(
        lambda found: f"cannot connect to {unquote(found[1])}: {found[2]}", error.details() or ""
    )
    ours = from_status(error.code(), details, retry_after_seconds=retry_after, raised=raised, cause=cause)
    ours.answered = ANSWERED_TRAILER in trailers
    if isinstance(ours, Cancelled) and not ours.answered:
        # What grpc's server says of a call that came while it was stopping and that nobody has looked at. (A call
        # that is cancelled on this side ends with asyncio's CancelledError.)
        return Unavailable("the service stopped before it took the call")
    return ours


async def call(method: Callable[..., Awaitable[T]], request: Any, *, timeout: float | None = None) -> T:
    """Call a unary rpc of a stub.

    Args:
        method: Such as `stub.FindMatches`.
        request: Its request message.
        timeout: Deadline in seconds; None = none.

    Raises:
        KvscoutError: Whatever the server answered, or Unavailable / DeadlineExceeded.
    """
    try:
        return await method(request, timeout=timeout)
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error


async def stream(
    method: Callable[..., Any], request: Any, *, timeout: float | None = None
) -> AsyncGenerator[Any, None]:
    """Call a server-streaming rpc of a stub and yield its answers; cancel it when the caller stops early.

    Raises:
        KvscoutError: As `call`.
    """
    running = method(request, timeout=timeout)
    try:
        async for response in running:
            yield response
    except grpc.aio.AioRpcError as error:
        raise to_error(error) from error
    finally:
        running.cancel()
