"""The HTTP server by aiohttp: see `http`."""

from __future__ import annotations

import asyncio
import logging
import ssl
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from aiohttp import ClientConnectionError, hdrs, web
from aiohttp.web_protocol import RequestPayloadError

from kvscout_common.errors import ConfigError
from kvscout_common.tls import Pem
from kvscout_common.transport.http import Headers, HttpHandler, HttpLimits, HttpRefused, SinkGone, SinkStalled

log = logging.getLogger("kvscout.http")
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
        self._server.pre_shutdown()
        await self._server.shutdown(grace)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        call = AiohttpCall(request, self._limits)
        try:
            await self._handler(call)
        except HttpRefused as refused:
            if not call.has_begun:
                await call.respond(refused.status, [("Content-Type", "text/plain")], f"{refused}\n".encode())
        except SinkGone:
            pass  # nobody is there to be told
        except SinkStalled as stalled:
            log.info("%s: %s", call.peer, stalled)
        except Exception:
            log.exception("unexpected error in %s %s", call.method, call.path)
            if not call.has_begun:
                await call.respond(500, [("Content-Type", "text/plain")], b"internal error\n")
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
        self._most = limits.connections

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._most:
            transport.abort()


class AiohttpCall:
    """See `http.HttpCall`."""

    def __init__(self, request: web.BaseRequest, limits: HttpLimits) -> None:
        self._request = request
        self._limits = limits
        self._response: web.StreamResponse | None = None
        self._ended = False
        self.has_begun = False
        """Something of the answer was written."""
        self.method = request.method
        self.path, _, self.query = request.raw_path.partition("?")
        self.headers: Headers = tuple(request.headers.items())
        peer = request.transport.get_extra_info("peername") if request.transport is not None else None
        self.peer = f"{peer[0]}:{peer[1]}" if peer else ""

    async def body(self) -> bytes:
        """See `http.HttpCall.body`."""
        limit = self._limits.body_bytes
        if (self._request.content_length or 0) > limit:
            raise HttpRefused(413, f"a body of over {limit} bytes")
        body = bytearray()
        try:
            if self._request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
                await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                # These were not of the answer.
                self._request.writer.output_size = 0
            async with asyncio.timeout(self._limits.body_seconds):
                while data := await self._request.content.readany():
                    body += data
                    if len(body) > limit:
                        raise HttpRefused(413, f"a body of over {limit} bytes")
        except TimeoutError as error:
            raise HttpRefused(408, f"the body was not here after {self._limits.body_seconds:.3g} s") from error
        except RequestPayloadError as error:
            raise HttpRefused(400, f"the body makes no sense: {error}") from error
        except (ClientConnectionError, OSError) as error:
            raise SinkGone(str(error)) from error
        return bytes(body)

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """See `http.HttpCall.respond`."""
        assert not self.has_begun, "an answer was begun"
        self._response = web.Response(status=status, headers=list(headers), body=body)
        await self.end()

    async def start(self, status: int, headers: Headers) -> None:
        """See `http.HttpCall.start`."""
        self._response = web.StreamResponse(status=status, headers=list(headers))

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
        """What aiohttp is to be given; a body that was not ended is cut off with its connection."""
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
