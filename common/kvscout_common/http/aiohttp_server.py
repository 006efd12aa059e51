"""The HTTP server by aiohttp: see `http`."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import ClientConnectionError, HttpVersion11, hdrs, web
from aiohttp.web_protocol import RequestPayloadError

from kvscout_common.errors import ConfigError
from kvscout_common.http.http import (
    FULL,
    LAST_REQUEST_SECONDS,
    VANISHED_SECONDS,
    Charge,
    Headers,
    HttpHandler,
    HttpLimits,
    HttpRefused,
    SinkGone,
    SinkStalled,
)
from kvscout_common.identity.pem import Pem
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.transport.sockets import end_when_unacknowledged

log = logging.getLogger("kvscout.http")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RESET_POLL_SECONDS = 0.1
_quiet = logging.getLogger("kvscout.http.aiohttp")
_quiet.setLevel(logging.CRITICAL)
"""aiohttp logs each request that makes no sense, with a traceback: whoever sends them would fill the disk."""


class AiohttpServer:
    """See `http.HttpServer`.

    Args:
        handler: Answers requests.
        limits: What clients may cost.
    """

    def __init__(self, handler: HttpHandler, limits: HttpLimits) -> None:
        self._handler = handler
        self._limits = limits
        self._server = _Server(self._handle, limits)
        self._listening: asyncio.Server | None = None
        self._tls: ssl.SSLContext | None = None

    async def listen(self, host: str, port: int, pem: Pem | None = None) -> int:
        """See `http.HttpServer.listen`."""
        if pem is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.set_alpn_protocols(["http/1.1"])
            self.renew(pem)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._server, host, port, ssl=self._tls, backlog=1024)
        bound: int = self._listening.sockets[0].getsockname()[1]
        return bound

    def renew(self, pem: Pem) -> None:
        """See `http.HttpServer.renew`."""
        assert self._tls is not None
        try:
            # The standard library takes them from files alone.
            with tempfile.NamedTemporaryFile() as certificate, tempfile.NamedTemporaryFile() as key:
                certificate.write(pem.certificate)
                key.write(pem.key)
                certificate.flush()
                key.flush()
                self._tls.load_cert_chain(certificate.name, key.name)
            if pem.client_ca is not None:
                self._tls.verify_mode = ssl.CERT_REQUIRED
                self._tls.load_verify_locations(cadata=pem.client_ca.decode("ascii"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(error), field="tls_cert") from error

    async def stop(self, grace: float) -> None:
        """See `http.HttpServer.stop`."""
        if self._listening is not None:
            self._listening.close()
        self._server.leaving = True
        ends_at = asyncio.get_running_loop().time() + grace
        with suppress(TimeoutError):
            async with asyncio.timeout(min(grace, LAST_REQUEST_SECONDS)):
                await self._server.empty.wait()
        self._server.pre_shutdown()
        await self._server.shutdown(max(0.0, ends_at - asyncio.get_running_loop().time()))

    def stats(self) -> dict[str, int]:
        """See `http.HttpServer.stats`."""
        return self._server.stats()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        call = AiohttpCall(request, connection, self._server, self._limits)
        connection.call = call
        self._server.begins(connection)
        try:
            await self._handler(call)
        except HttpRefused as refused:
            if not call.has_begun:
                await call.respond(refused.status, [("Content-Type", "text/plain")], f"{refused}\n".encode())
        except SinkGone:
            pass  # the client has gone
        except SinkStalled as stalled:
            log.info("%s: %s", call.peer, stalled)
        except Exception:
            log.exception("unexpected error in %s %s", call.method, call.path)
            if not call.has_begun:
                await call.respond(500, [("Content-Type", "text/plain")], b"internal error\n")
        finally:
            connection.call = None
            self._server.ends(connection)
        return call.finished()


class _Server(web.Server):
    """Bounds what aiohttp's own leaves open."""

    def __init__(self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], limits: HttpLimits) -> None:
        super().__init__(
            handle,
            handler_cancellation=True,
            keepalive_timeout=limits.idle_seconds,
            lingering_time=min(1.0, limits.body_seconds),
            access_log=None,
            logger=_quiet,
            auto_decompress=False,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
        )
        self._limits = limits
        self._open: dict[_Connection, asyncio.Transport] = {}
        # Those that may be closed to make room, the longest idle first: that have asked nothing yet, and others.
        self._unasked: dict[_Connection, None] = {}
        self._idle: dict[_Connection, None] = {}
        self._refused = self._evicted = 0
        self._log = RateLimitedLog(log)
        self.leaving = False
        """Each answer is the last of its connection."""
        self.empty = asyncio.Event()
        """No connection is open."""
        self.empty.set()

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.empty.clear()
        end_when_unacknowledged(transport.get_extra_info("socket"), max(VANISHED_SECONDS, self._limits.write_seconds))
        if len(self._open) >= self._limits.connections and not self._make_room():
            self._refused += 1
            transport.abort()
        self._open[handler] = transport
        self._unasked[handler] = None

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        for known in (self._open, self._unasked, self._idle):
            known.pop(handler, None)
        if not self._open:
            self.empty.set()

    def begins(self, connection: _Connection) -> None:
        """A request is handled: its connection is not idle."""
        self._unasked.pop(connection, None)
        self._idle.pop(connection, None)

    def ends(self, connection: _Connection) -> None:
        """It is over."""
        if connection in self._open and not connection.trusted:
            self._idle[connection] = None

    def stats(self) -> dict[str, int]:
        """See `http.HttpServer.stats`."""
        counts = {"connections_refused": self._refused, "connections_evicted": self._evicted}
        return {"connections": len(self._open), **counts}

    def _make_room(self) -> bool:
        self._log.warning("full", FULL, self._limits.connections)
        for idle in (self._unasked, self._idle):
            if idle:
                connection = next(iter(idle))
                del idle[connection]
                self._open.pop(connection).abort()
                self._evicted += 1
                return True
        return False


class _Connection(web.RequestHandler):
    """One connection of a client."""

    call: AiohttpCall | None = None
    """That runs."""
    trusted = False
    """The client is a known one."""

    def eof_received(self) -> Any:
        """Note that the client sends no more: it has gone, or waits for its answer.

        Returns:
            Whether the connection stays open.
        """
        # Over TLS asyncio ends the connection in any case.
        if self.transport is None or self.transport.get_extra_info("ssl_object"):
            return False
        # The request that came with the end may not have begun.
        asyncio.get_running_loop().call_later(RESET_POLL_SECONDS / 2, self._input_ended)
        return True

    def _input_ended(self) -> None:
        transport, call = self.transport, self.call
        if transport is None:
            return
        # Unsent bytes show whether a client is there.
        if call is None or call.has_begun or not call.may_probe:
            transport.close()
            return
        self.close()
        transport.write(CONTINUE)
        self._look_for_reset()

    def _look_for_reset(self) -> None:
        # asyncio does not watch what it has read to its end.
        if self.transport is None:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            asyncio.get_running_loop().call_later(RESET_POLL_SECONDS, self._look_for_reset)


class AiohttpCall:
    """See `http.HttpCall`."""

    def __init__(self, request: web.BaseRequest, connection: _Connection, server: _Server, limits: HttpLimits) -> None:
        self._request = request
        self._connection = connection
        self._server = server
        self._limits = limits
        self._response: web.StreamResponse | None = None
        self._ended = False
        self.has_begun = False
        """Something of the answer was written."""
        self.method = request.method
        self.path, _, self.query = request.raw_path.partition("?")
        self.headers: Headers = tuple(request.headers.items())
        self.answer_headers: Headers = ()
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        self.peer = f"{peer[0]}:{peer[1]}" if peer else ""

    async def body(self, charge: Charge | None = None) -> bytes:
        """See `http.HttpCall.body`."""
        limit, declared = self._limits.body_bytes, self._request.content_length or 0
        if declared > limit:
            raise HttpRefused(413, f"a body of over {limit} bytes")
        if charge is not None and (refusal := charge.look(declared)) is not None:
            raise HttpRefused(*refusal)
        body = bytearray()
        try:
            if self._request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
                await self._request.writer.write(CONTINUE)
                # These were not of the answer.
                self._request.writer.output_size = 0
            async for data in self._pieces():
                if len(body) + len(data) > limit:
                    raise HttpRefused(413, f"a body of over {limit} bytes")
                if charge is not None and (refusal := charge.grow(len(data))) is not None:
                    raise HttpRefused(*refusal)
                body += data
        except RequestPayloadError as error:
            raise HttpRefused(400, f"the body makes no sense: {error}") from error
        except (ClientConnectionError, OSError) as error:
            raise SinkGone(str(error)) from error
        return bytes(body)

    @property
    def may_probe(self) -> bool:
        """Return whether the request is whole, and its client one that knows interim answers."""
        return self._request.content.is_eof() and self._request.version >= HttpVersion11

    def trust(self) -> None:
        """See `http.HttpCall.trust`."""
        self._connection.trusted = True

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, as long as it comes fast enough."""
        limits, now = self._limits, asyncio.get_running_loop().time
        ends_at, window_ends_at, came = now() + limits.body_seconds, now() + limits.body_window_seconds, 0
        while True:
            data = None
            with suppress(TimeoutError):
                async with asyncio.timeout_at(min(ends_at, window_ends_at)):
                    data = await self._request.content.readany()
            if data == b"":
                return
            if data:
                came += len(data)
                yield data
            if now() >= ends_at:
                raise HttpRefused(408, "the body takes too long")
            if now() >= window_ends_at:
                if came < limits.body_window_bytes:
                    raise HttpRefused(408, "the body comes too slowly")
                window_ends_at, came = now() + limits.body_window_seconds, 0

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """See `http.HttpCall.respond`."""
        assert not self.has_begun, "an answer was begun"
        self._response = web.Response(status=status, headers=[*headers, *self.answer_headers], body=body)
        await self.end()

    async def start(self, status: int, headers: Headers) -> None:
        """See `http.HttpCall.start`."""
        self._response = web.StreamResponse(status=status, headers=[*headers, *self.answer_headers])

    async def write(self, data: bytes) -> None:
        """See `http.Sink.write`."""
        assert self._response is not None, "nothing was started"
        if data:
            await self._bounded(self._write(self._response, data))

    async def end(self) -> None:
        """See `http.HttpCall.end`."""
        assert self._response is not None, "nothing was started"
        self._ended = True
        await self._bounded(self._end(self._response))

    def finished(self) -> web.StreamResponse:
        """Return what aiohttp is to be given; a body that was not ended is cut off with its connection."""
        if not self._ended and self._request.transport is not None:
            self._request.transport.abort()
        return self._response or web.Response(status=500)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        await self._begin(response)
        await response.write(data)

    async def _end(self, response: web.StreamResponse) -> None:
        await self._begin(response)
        await response.write_eof()

    async def _begin(self, response: web.StreamResponse) -> None:
        if not self.has_begun:
            self.has_begun = True
            if self._server.leaving:
                response.force_close()
            await response.prepare(self._request)

    async def _bounded(self, writing: Awaitable[None]) -> None:
        seconds = self._limits.write_seconds
        try:
            async with asyncio.timeout(seconds):
                await writing
        except TimeoutError as error:
            with suppress(AttributeError):
                self._request.transport.abort()  # type: ignore[union-attr]
            raise SinkStalled(f"nothing was read for {seconds:.3g} s") from error
        except (ClientConnectionError, OSError) as error:
            raise SinkGone(str(error) or "the client has gone") from error
