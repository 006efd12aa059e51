"""A gRPC channel on the native transport, for generated stubs: one connection, made when it is needed and again when it
is gone.

::

    stub ──▶ multicallable ──▶ call ──▶ connection
                                          └── idle ─▶ connecting ─▶ open ─▶ idle, after GOAWAY or a loss
                                                          └── failed: back-off, calls fail immediately meanwhile,
                                                              but those that wait for it to be ready
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from kvscout_common.errors import ConfigError
from kvscout_common.rpc.native_calls import NativeCall, UnaryCall
from kvscout_common.transport.keepalive import TIME_MS
from kvscout_common.transport.native_core import CLOSED, CONNECTED, ClientTls, NativeCore

FIRST_BACK_OFF_SECONDS = 0.1
MAX_BACK_OFF_SECONDS = 1.0
CONNECT_SECONDS = 5.0
CALL_OPTIONS = {"timeout", "metadata", "wait_for_ready"}
"""Options of a call."""

Call = TypeVar("Call", bound=NativeCall)


class NativeChannel:
    """See the module.

    Args:
        target: host:port.
        max_message_bytes: Longest message in either direction.
        tls: None = plaintext.
        token: Gives the bearer token of a call; None = there is none.
        server_name: What the server's certificate must be for; "" = the host of the target.
        keepalive_ms: Silence after which the server is pinged.
    """

    def __init__(
        self,
        target: str,
        *,
        max_message_bytes: int,
        tls: ClientTls | None = None,
        token: Callable[[], str] | None = None,
        server_name: str = "",
        keepalive_ms: int = TIME_MS,
    ) -> None:
        self.target = target
        host, _, port = target.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._server_name = server_name or self._host
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._token = token
        self._keepalive_ms = keepalive_ms
        self._core: NativeCore | None = None
        self._connection: int | None = None
        self._open = False
        self._connecting: asyncio.Task[None] | None = None
        self._outcome: asyncio.Future[str] | None = None
        """Outcome of the attempt to connect that runs: "" = connected."""
        self._back_off = 0.0
        self._not_before = 0.0
        self._problem = ""
        self._closed = False

    def unary_unary(self, method: str, *serializers: Any, **options: Any) -> Callable[..., UnaryCall]:
        """Return a method of one request and one answer."""
        make = self._calls(UnaryCall, method, serializers, options)
        return lambda request, **given: make(given, request=request)

    def unary_stream(self, method: str, *serializers: Any, **options: Any) -> Callable[..., NativeCall]:
        """Return a method of one request and many answers."""
        make = self._calls(NativeCall, method, serializers, options)
        return lambda request, **given: make(given, request=request)

    def stream_stream(self, method: str, *serializers: Any, **options: Any) -> Callable[..., NativeCall]:
        """Return a method of many requests and many answers."""
        make = self._calls(NativeCall, method, serializers, options)
        return lambda requests=None, **given: make(given, requests=requests)

    def _calls(
        self, kind: type[Call], method: str, serializers: tuple[Any, ...], options: dict[str, Any]
    ) -> Callable[..., Call]:
        serialize = serializers[0] if serializers else options.get("request_serializer")
        deserialize = serializers[1] if len(serializers) > 1 else options.get("response_deserializer")

        def make(given: dict[str, Any], **requests: Any) -> Call:
            unknown = given.keys() - CALL_OPTIONS
            if unknown:
                raise TypeError(f"{method}: calls of this transport have no {', '.join(sorted(unknown))}")
            return kind(self, method, serialize=serialize, deserialize=deserialize, **given, **requests)

        return make

    def stream_unary(self, method: str, *serializers: Any, **options: Any) -> Callable[..., Any]:
        """Raise NotImplementedError: no rpc of kvscout has many requests and one answer."""
        raise NotImplementedError(f"{method}: no rpc of this kind")

    def metadata(self) -> list[tuple[str, str | bytes]]:
        """Return what each call sends beside its own."""
        return [] if self._token is None else [("authorization", f"Bearer {self._token()}")]

    @property
    def core(self) -> NativeCore:
        """The extension's half; made by the first call, whose loop it belongs to."""
        if self._core is None:
            self._core = NativeCore(max_message_bytes=self._max_message_bytes, keepalive_ms=self._keepalive_ms)
        return self._core

    def ready(self) -> int | None:
        """Return the connection, if it is open."""
        return self._connection if self._open else None

    def leave(self, connection: int) -> None:
        """Make no more calls on a connection that takes none; those that it has go on."""
        if self._open and connection == self._connection:
            self._connection, self._open = None, False

    async def connected(self, *, waits: bool = False) -> int:
        """Return the connection, once it is open.

        Args:
            waits: For as many attempts as it takes.

        Raises:
            ConnectionError: It cannot be made; calls that come before the next attempt get that immediately, unless
                they wait.
        """
        loop = asyncio.get_running_loop()
        while not self._closed:
            ready = self.ready()
            if ready is not None:
                return ready
            pause = self._not_before - loop.time()
            if self._connecting is None and pause > 0:
                if not waits:
                    raise ConnectionError(self._problem)
                await asyncio.sleep(pause)
                continue
            if self._connecting is None:
                self._connecting = loop.create_task(self._connect(), name=f"connect {self.target}")
            # Shielded: a call that is given up leaves the attempt to the others.
            await asyncio.shield(self._connecting)
            if self.ready() is None and not waits:
                raise ConnectionError(self._problem)
        raise ConnectionError("the channel is closed")

    async def close(self, grace: float | None = None) -> None:
        """End every call and the connection."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._core is not None:
            for connection in list(self._core.connections):
                self._core.rpc.close(connection)
            # What that ends is dispatched now: nobody polls any more.
            self._core.poll()
            self._core.close()

    async def __aenter__(self) -> NativeChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """See `native_core.EventHandler`."""
        if kind == CONNECTED:
            self._open, self._back_off = True, 0.0
            self._tell("")
        elif kind == CLOSED:
            self.core.connections.pop(event[1], None)
            if event[1] == self._connection:
                self._connection, self._open = None, False
                self._tell(event[2])

    def _tell(self, outcome: str) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._problem = await self._try_addresses(loop)
        finally:
            self._connecting = None
        if self._problem:
            self._back_off = min(max(2 * self._back_off, FIRST_BACK_OFF_SECONDS), MAX_BACK_OFF_SECONDS)
            # Not all at once, where many lost the same peer.
            self._not_before = loop.time() + self._back_off * random.uniform(0.8, 1.2)

    async def _try_addresses(self, loop: asyncio.AbstractEventLoop) -> str:
        try:
            addresses = await self._addresses(loop)
        except OSError as error:
            return f"{self.target}: {error}"
        problem = f"{self.target}: no address"
        for address in addresses:
            self._outcome = loop.create_future()
            try:
                self._connection = self.core.rpc.connect(
                    address, self._port, f"{self._host}:{self._port}", self._tls, self._server_name
                )
                self.core.connections[self._connection] = self
                self.core.flush()
                async with asyncio.timeout(CONNECT_SECONDS):
                    outcome = await self._outcome
            except OSError as error:
                outcome = str(error)
            except TimeoutError:
                outcome = "no connection in time"
            if not outcome:
                return ""
            problem = f"{self.target}: {outcome}"
            self._drop(outcome)
        return problem

    async def _addresses(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        try:
            return [str(ipaddress.ip_address(self._host))]
        except ValueError:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(address[4][0]) for address in found))

    def _drop(self, reason: str) -> None:
        if self._connection is not None:
            number, self._connection, self._open = self._connection, None, False
            self.core.rpc.close(number)
            self.core.connections.pop(number, None)
            self.core.flush()


def client_tls(ca: bytes, certificate: bytes | None, key: bytes | None) -> ClientTls:
    """TLS of the client's side, from PEM.

    Raises:
        ConfigError: One of them is wrong.
    """
    try:
        return ClientTls(ca, certificate, key)
    except ValueError as error:
        raise ConfigError(str(error), field="tls_ca") from error
