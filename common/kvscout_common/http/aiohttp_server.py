"""The HTTP server of aiohttp, where the extension is not built: see `http`.

A client that closes its side counts as gone. Above the limit of connections every new one is closed.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import ClientConnectionError, hdrs, web
from aiohttp.web_protocol import RequestPayloadError

from kvscout_common.errors import ConfigError
from kvscout_common.http.http import (
    VANISHED_SECONDS,
    Charge,
    Headers,
    HttpHandler,
    HttpLimits,
    HttpRefused,
    SinkGone,
    SinkStalled,
)
from kvscout_common.identity.pem import Pem, load_chain
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.transport.sockets import end_when_unacknowledged

log = logging.getLogger("kvscout.http")
_quiet = logging.getLogger("kvscout.http.aiohttp")
_quiet.setLevel(logging.CRITICAL)
"""aiohttp logs each request that makes no sense, with a traceback: whoever sends them would fill the disk."""


class AiohttpServer:
    """See `http.HttpServer`.

    Args:
        handler: Answers requests.
        limits: Limits of what clients may use.
    """

    def __init__(self, handler: HttpHandler, limits: HttpLimits) -> None:
        self._handler = handler
        self._limits = limits
        self._server = _BoundedServer(self._handle, limits)
        self._listening: asyncio.Server | None = None
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.set_alpn_protocols(["http/1.1"])

    async def listen(self, host: str, port: int, pem: Pem | None = None) -> int:
        """See `http.HttpServer.listen`."""
        if pem is not None:
            self.renew(pem)
        self._listening = await asyncio.get_running_loop().create_server(
            self._server, host, port, ssl=None if pem is None else self._tls, backlog=1024
        )
        bound: int = self._listening.sockets[0].getsockname()[1]
        return bound

    def renew(self, pem: Pem) -> None:
        """See `http.HttpServer.renew`."""
        try:
            load_chain(self._tls, pem.certificate, pem.key)
            if pem.client_ca is not None:
                self._tls.verify_mode = ssl.CERT_REQUIRED
                self._tls.load_verify_locations(cadata=pem.client_ca.decode("ascii"))
        except (OSError, ValueError) as error:
            raise ConfigError(str(error), field="tls_cert") from error

    async def stop(self, grace: float) -> None:
        """See `http.HttpServer.stop`."""
        if self._listening is not None:
            self._listening.close()
        self._server.pre_shutdown()
        await self._server.shutdown(grace)

    def stats(self) -> dict[str, int]:
        """See `http.HttpServer.stats`."""
        return {"connections": self._server.open, "connections_refused": self._server.refused, "connections_evicted": 0}

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = AiohttpCall(request, self._limits)
        try:
            await self._handler(call)
        except HttpRefused as refused:
            await call.refuse(refused.status, f"{refused}\n")
        except SinkGone:
            pass  # the client has gone
        except SinkStalled as stalled:
            log.info("%s: %s", call.peer, stalled)
        except Exception:
            log.exception("unexpected error in %s %s", call.method, call.path)
            await call.refuse(500, "internal error\n")
        if not call.ended and request.transport is not None:
            request.transport.abort()  # a body that was not ended is cut off
        return call.response


class _BoundedServer(web.Server):
    """aiohttp's server with a limit of connections."""

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
        self._limit = limits.connections
        self._vanished_seconds = max(VANISHED_SECONDS, limits.write_seconds)
        self._log = RateLimitedLog(log)
        self.open = self.refused = 0
        """Connections: open now, and closed at the limit."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        end_when_unacknowledged(transport.get_extra_info("socket"), self._vanished_seconds)
        self.open += 1
        if self.open > self._limit:
            self.refused += 1
            self._log.warning("full", "%d connections are open, the maximum: new ones are closed", self._limit)
            transport.abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.open -= 1


class AiohttpCall:
    """See `http.HttpCall`."""

    def __init__(self, request: web.BaseRequest, limits: HttpLimits) -> None:
        self._request = request
        self._limits = limits
        self.response = web.StreamResponse(status=500)
        self.ended = False
        self.method = request.method
        self.path, _, self.query = request.raw_path.partition("?")
        self.headers: Headers = tuple(request.headers.items())
        self.answer_headers: Headers = ()
        self.ends_with_answer = False
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
                await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._request.writer.output_size = 0  # these bytes are not part of the answer
            async with asyncio.timeout(self._limits.body_seconds):
                while data := await self._request.content.readany():
                    if len(body) + len(data) > limit:
                        raise HttpRefused(413, f"a body of over {limit} bytes")
                    if charge is not None and (refusal := charge.grow(len(data))) is not None:
                        raise HttpRefused(*refusal)
                    body += data
        except TimeoutError as error:
            raise HttpRefused(408, "the body takes too long") from error
        except RequestPayloadError as error:
            raise HttpRefused(400, f"the body makes no sense: {error}") from error
        except (ClientConnectionError, OSError) as error:
            raise SinkGone(str(error)) from error
        return bytes(body)

    def trust(self) -> None:
        """Do nothing: no connection is closed to make room for others."""

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """See `http.HttpCall.respond`."""
        self.response = web.Response(status=status, headers=[*headers, *self.answer_headers], body=body)
        await self.end()

    async def start(self, status: int, headers: Headers) -> None:
        """See `http.HttpCall.start`."""
        self.response = web.StreamResponse(status=status, headers=[*headers, *self.answer_headers])

    async def write(self, data: bytes) -> None:
        """See `http.Sink.write`."""
        if data:
            await self._send(self.response.write, data)

    async def end(self) -> None:
        """See `http.HttpCall.end`."""
        self.ended = True
        await self._send(self.response.write_eof)

    async def refuse(self, status: int, text: str) -> None:
        """Answer with a text, unless an answer was begun."""
        if not self.response.prepared:
            await self.respond(status, [("Content-Type", "text/plain")], text.encode())

    async def _send(self, send: Callable[..., Awaitable[None]], *data: bytes) -> None:
        seconds = self._limits.write_seconds
        try:
            async with asyncio.timeout(seconds):
                await self.response.prepare(self._request)
                await send(*data)
        except TimeoutError as error:
            with suppress(AttributeError):
                self._request.transport.abort()  # type: ignore[union-attr]
            raise SinkStalled(f"nothing was read for {seconds:.3g} s") from error
        except (ClientConnectionError, OSError) as error:
            raise SinkGone(str(error) or "the client has gone") from error
