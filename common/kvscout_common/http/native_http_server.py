"""The HTTP server by the extension: see `http`."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import Any, cast

from kvscout_common.errors import ConfigError
from kvscout_common.http.http import FULL, Charge, Headers, HttpHandler, HttpLimits, HttpRefused, SinkGone, SinkStalled
from kvscout_common.http.native_http import (
    ACCEPT_FAILED,
    BODY,
    BODY_FAILED,
    CROWDED,
    GONE,
    WRITABLE,
    HttpCore,
    ServerCall,
    shared,
)
from kvscout_common.identity.pem import Pem
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.transport.native_core import ByteCharge, ServerTls
from kvscout_common.transport.ready_tasks import ReadyTasks
from kvscout_common.transport.waiting import Notice

log = logging.getLogger("kvscout.http")

STOPPED_POLL_SECONDS = 0.02


class NativeHttpServer:
    """See `http.HttpServer`.

    Args:
        handler: Answers requests.
        limits: What clients may cost.
    """

    def __init__(self, handler: HttpHandler, limits: HttpLimits) -> None:
        self._handler = handler
        self._limits = limits
        self._core = shared()
        self._listener: int | None = None
        self._ready = ReadyTasks(self._core.loop)
        self._waiting: set[asyncio.Task[None]] = set()
        """Tasks whose handlers have not returned immediately."""
        self._accept_log = RateLimitedLog(log)
        self._stopped = False

    async def listen(self, host: str, port: int, pem: Pem | None = None) -> int:
        """See `http.HttpServer.listen`."""
        limits = self._limits
        self._listener, bound = self._core.http.listen(
            await _numeric(host),
            port,
            connections=limits.connections,
            head_bytes=limits.header_bytes,
            headers=limits.headers,
            body_bytes=limits.body_bytes,
            idle_seconds=limits.idle_seconds,
            body_seconds=limits.body_seconds,
            body_window_seconds=limits.body_window_seconds,
            body_window_bytes=limits.body_window_bytes,
            write_seconds=limits.write_seconds,
            tls=None if pem is None else _tls(pem),
        )
        self._core.listeners[self._listener] = self
        return bound

    def renew(self, pem: Pem) -> None:
        """See `http.HttpServer.renew`."""
        if self._listener is not None:
            self._core.http.set_tls(self._listener, _tls(pem))

    async def stop(self, grace: float) -> None:
        """See `http.HttpServer.stop`."""
        if self._stopped:
            return
        self._stopped = True
        core, listener = self._core, self._listener
        if listener is not None:
            core.http.stop_listening(listener)
            core.flush()
            ends_at = core.loop.time() + grace
            # The end of a connection raises no event.
            while core.loop.time() < ends_at and (  # noqa: ASYNC110
                self._waiting or core.http.open_connections(listener)
            ):
                await asyncio.sleep(STOPPED_POLL_SECONDS)
            for task in self._waiting:
                task.cancel()
            if self._waiting:
                await asyncio.wait(self._waiting)
            core.flush()
            await asyncio.sleep(0)
            core.http.close_connections(listener)
            del core.listeners[listener]
        self._ready.close()
        core.release()

    def stats(self) -> dict[str, int]:
        """See `http.HttpServer.stats`; `connections` are those of this server, the others of all on this loop."""
        core = self._core
        return {**core.http.stats(), "connections": core.http.open_connections(self._listener or 0)}

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """See `native_core.EventHandler`."""
        if kind == ACCEPT_FAILED:
            self._accept_log.warning("accept", "connections cannot be accepted: %s", event[2])
            return
        if kind == CROWDED:
            self._accept_log.warning("full", FULL, self._limits.connections)
            return
        call = NativeHttpCall(self._core, self._limits, event)
        task = self._ready.run(self._run(call))
        if not call.closed:
            call.task = task
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    async def _run(self, call: NativeHttpCall) -> None:
        try:
            await self._handler(call)
        except HttpRefused as refused:
            await call.refuse(refused.status, f"{refused}\n")
        except SinkGone:
            pass  # the client has gone
        except SinkStalled as stalled:
            log.info("%s: %s", call.peer, stalled)
        except asyncio.CancelledError:
            if not call.is_gone:
                raise
        except Exception:
            log.exception("unexpected error in %s %s", call.method, call.path)
            await call.refuse(500, "internal error\n")
        finally:
            call.close()


class NativeHttpCall(ServerCall):
    """See `http.HttpCall`.

    Args:
        core: Brings its events, sends what it says.
        limits: What clients may cost.
        event: Its first.
    """

    def __init__(self, core: HttpCore, limits: HttpLimits, event: tuple[Any, ...]) -> None:
        _, number, _, method, target, headers, peer, body = event
        self.core = core
        self.number = number
        self._limits = limits
        self._body: bytes | None = body
        self._body_asked = False
        self._refused: tuple[int, str] | None = None
        """Status and text, where there is no body. No exception: its traceback would keep what the handler has."""
        self._news = Notice(core.loop)
        """The body, or room."""
        self._has_room = True
        self._has_begun = False
        self._ended = False
        self.is_gone = False
        """The client has gone."""
        self.closed = False
        """Close the call: the handler has returned."""
        self.task: asyncio.Task[None] | None = None
        """Runs the handler, once it waits."""
        self.method: str = method
        self.path, _, self.query = target.partition("?")
        self.headers: Headers = headers
        self.peer: str = peer
        self.answer_headers: Headers = ()
        self.ends_with_answer = False
        core.calls[number] = self

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """See `native_core.EventHandler`."""
        if kind == BODY:
            self._body = event[2]
        elif kind == BODY_FAILED:
            self._refused = event[2:]
        elif kind == WRITABLE:
            self._has_room = True
        elif kind == GONE:
            self.is_gone = True
            if self.task is not None:
                self.task.cancel()
        self._news.notify()

    async def body(self, charge: Charge | None = None) -> bytes:
        """See `http.HttpCall.body`."""
        assert not self._body_asked, "the body is asked for once"
        self._body_asked = True
        if self._body is not None:
            if charge is not None and (refusal := charge.grow(len(self._body))) is not None:
                raise HttpRefused(*refusal)
        else:
            self.core.http.want_body(self.number, cast(ByteCharge | None, charge))
            self.core.flush()
            while self._body is None:
                if self._refused is not None:
                    raise HttpRefused(*self._refused)
                if self.is_gone:
                    raise SinkGone("the client has gone")
                await self._news.wait()
        body, self._body = self._body, None
        return body

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """See `http.HttpCall.respond`."""
        assert not self._has_begun, "an answer was begun"
        self._has_begun = self._ended = True
        self.core.http.respond(self.number, status, [*headers, *self.answer_headers], body)
        self.core.flush()

    async def start(self, status: int, headers: Headers) -> None:
        """See `http.HttpCall.start`."""
        self.core.http.start(self.number, status, [*headers, *self.answer_headers])

    async def write(self, data: bytes) -> None:
        """See `http.Sink.write`."""
        self._has_begun = True
        room = self.core.http.write(self.number, data)
        if room is None:
            raise SinkGone("the client has gone")
        self.core.flush()
        if not room:
            self._has_room = False
            try:
                async with asyncio.timeout(self._limits.write_seconds):
                    while not self._has_room:
                        await self._news.wait()
            except TimeoutError as error:
                raise SinkStalled(f"nothing was read for {self._limits.write_seconds:.3g} s") from error

    def trust(self) -> None:
        """See `http.HttpCall.trust`."""
        self.core.http.trust(self.number)

    def answered(self) -> None:
        """See `ServerCall`."""
        self._has_begun = self._ended = True

    async def end(self) -> None:
        """See `http.HttpCall.end`."""
        if self._ended:
            return
        self._has_begun = self._ended = True
        self.core.http.end(self.number)
        self.core.flush()

    async def refuse(self, status: int, text: str) -> None:
        """Answer with a text, unless something was answered."""
        if not self._has_begun and not self.is_gone:
            await self.respond(status, [("Content-Type", "text/plain")], text.encode())

    def close(self) -> None:
        """Close the call: the handler has returned."""
        self.closed = True
        if not self._ended:
            self.core.http.handled(self.number)
            self.core.flush()
        self.core.calls.pop(self.number, None)


def _tls(pem: Pem) -> ServerTls:
    try:
        return ServerTls(pem.certificate, pem.key, pem.client_ca)
    except ValueError as error:
        raise ConfigError(str(error), field="tls_cert") from error


async def _numeric(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return str(found[0][4][0])
