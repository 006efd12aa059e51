"""The client side of gRPC: channels with TLS and tokens, and errors mapped back to our own."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import grpc

from kvscout_common.errors import Cancelled, ConfigError, KvscoutError, Unavailable
from kvscout_common.identity.tls import MAX_BYTES
from kvscout_common.process.followed_file import POLL_SECONDS, FollowedFile, read_file
from kvscout_common.statuses import ANSWERED_TRAILER, from_status
from kvscout_common.transport import Transport, chosen
from kvscout_common.transport.keepalive import CLIENT_OPTIONS

T = TypeVar("T")
StrPath: TypeAlias = str | os.PathLike[str]

MAX_TOKEN_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """How a client proves who it is and checks whom it talks to. Empty = plaintext, anonymous."""

    ca: StrPath | None = None
    """CA of the server's certificate; turns TLS on."""
    certificate: StrPath | None = None
    key: StrPath | None = None
    token_file: StrPath | None = None

    @classmethod
    def from_flags(
        cls,
        tls_ca: Path | None,
        tls_client_cert: Path | None,
        tls_client_key: Path | None,
        token_file: Path | None,
    ) -> ClientSecurity:
        """Takes the values of `flags.client_flags`.

        Raises:
            ConfigError: If certificate and key do not come together, or come without a CA.
        """
        if bool(tls_client_cert) != bool(tls_client_key):
            raise ConfigError("--tls-client-cert and --tls-client-key go together", field="tls_client_cert")
        if tls_client_cert and not tls_ca:
            raise ConfigError("needs --tls-ca", field="tls_client_cert")
        return cls(tls_ca, tls_client_cert, tls_client_key, token_file)

    def pems(self) -> tuple[bytes, bytes | None, bytes | None] | None:
        """What the files of CA, certificate and key hold; None = plaintext.

        Raises:
            ConfigError: One cannot be read.
        """
        if self.ca is None:
            return None
        ca = read_file(Path(self.ca), flag="tls_ca", max_bytes=MAX_BYTES)
        certificate, key = (
            read_file(Path(path), flag=flag, max_bytes=MAX_BYTES) if path else None
            for path, flag in ((self.certificate, "tls_client_cert"), (self.key, "tls_client_key"))
        )
        return ca, certificate, key


PLAINTEXT = ClientSecurity()


def open_channel(
    address: str,
    security: ClientSecurity = PLAINTEXT,
    *,
    max_message_bytes: int = 64 * 1024 * 1024,
    server_name: str = "",
) -> grpc.aio.Channel:
    """Opens a channel to a kvscout service; connects lazily and reconnects by itself.

    Args:
        address: host:port.
        security: TLS files and token.
        max_message_bytes: Largest message sent or received.
        server_name: What the server's certificate must be for; "" = the host of the address.
    """
    if chosen() is Transport.NATIVE:
        native: Any = _native_channel(address, security, max_message_bytes, server_name)
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


def _native_channel(address: str, security: ClientSecurity, max_message_bytes: int, server_name: str) -> Any:
    # Imported here: the extension may not be there.
    from kvscout_common.rpc.native_channel import NativeChannel, client_tls

    token = None if security.token_file is None else TokenFile(Path(security.token_file)).token
    pems = security.pems()
    tls = client_tls(*pems) if pems is not None else None
    return NativeChannel(address, max_message_bytes=max_message_bytes, tls=tls, token=token, server_name=server_name)


class TokenFile:
    """The token that a file holds now: it is renewed while channels are open.

    Args:
        path: The file, read at once.
        secret: Warn of a file that everybody may read.

    Raises:
        ConfigError: It cannot be read.
    """

    def __init__(self, path: Path, *, secret: bool = True) -> None:
        self._token = ""
        self._looked_at = time.monotonic()
        self._file = FollowedFile("token", (path,), lambda: _read_token(path, secret), self._take)
        self._file.load()

    def token(self) -> str:
        """The token; looks at the file once a second at most."""
        now = time.monotonic()
        if now - self._looked_at >= POLL_SECONDS:
            self._looked_at = now
            self._file.look()
        return self._token

    def _take(self, token: str) -> None:
        self._token = token


def _read_token(path: Path, secret: bool) -> str:
    token = read_file(path, flag="token_file", max_bytes=MAX_TOKEN_BYTES, secret=secret).strip()
    if not token.isascii() or not token.decode("ascii").isprintable():
        raise ConfigError(f"{path} holds no token: one line of ASCII", field="token_file")
    return token.decode("ascii")


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
    ours = from_status(error.code(), error.details() or "", retry_after_seconds=retry_after, raised=raised)
    ours.answered = ANSWERED_TRAILER in trailers
    if isinstance(ours, Cancelled) and not ours.answered:
        # What grpc's server says of a call that came while it was told to stop and that nobody has looked at. (A call
        # that is cancelled on this side ends with asyncio's CancelledError.)
        return Unavailable("the service stopped before it took the call")
    return ours


async def call(method: Callable[..., Awaitable[T]], request: Any, *, timeout: float | None = None) -> T:
    """Calls a unary rpc of a stub.

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
    """Calls a server-streaming rpc of a stub and yields its answers; cancels it when the caller stops early.

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
