"""A gRPC server on the native transport, for what is written against `grpc.aio.server`: handlers, a guard, stop.

::

    call ──▶ the extension, where it has the answer and everybody may ask
         ──▶ synchronous handler ──▶ answered in the same callback
         ──▶ any other handler ──▶ a task that stands ready runs it up to where it first waits
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from kvscout_common.errors import ConfigError
from kvscout_common.http.http import FULL
from kvscout_common.identity.identity import ANONYMOUS
from kvscout_common.identity.pem import Pem
from kvscout_common.observability.rpc_metrics import BUCKETS
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.rpc.guard import Guard, GuardedMethod
from kvscout_common.rpc.handlers import Handler
from kvscout_common.rpc.native_context import NativeContext, RequestIterator
from kvscout_common.rpc.synchronous_stream import SynchronousStream
from kvscout_common.transport.native_core import HEAD, MAX_CONNECTIONS, AnswerTimes, NativeCore, ServerTls
from kvscout_common.transport.ready_tasks import ReadyTasks
from kvscout_common.transport.statuses import INTERNAL_TEXT, status_of

log = logging.getLogger("kvscout.rpc")

_INTERNAL = grpc.StatusCode.INTERNAL.value[0]
STOPPED_POLL_SECONDS = 0.02


class NativeServer:
    """See the module.

    Args:
        guard: What every call passes.
        max_message_bytes: Longest message in either direction.
        max_streams: Calls open at once on a connection.
        max_connections: Open at once. Above, idle ones of callers without a token are closed, first those on which no
            call has come, of them the longest idle; if there is none, the new one is.
        max_age_seconds: About so long a connection takes new calls; None = for ever.
        budget: The extension's, charged for messages that come; None = one of its own.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        max_message_bytes: int,
        max_streams: int,
        max_connections: int = MAX_CONNECTIONS,
        max_age_seconds: float | None = None,
        budget: Any = None,
    ) -> None:
        self._guard = guard
        self._handlers: dict[str, Handler] = {}
        self._methods: list[GuardedMethod] = []
        self._accept_log = RateLimitedLog(log)
        self._max_connections = max_connections
        self._core = NativeCore(
            max_message_bytes=max_message_bytes,
            max_streams=max_streams,
            max_connections=max_connections,
            max_age_seconds=max_age_seconds,
            budget=budget,
            opened=self._open,
            failed=self._cannot_accept,
            crowded=self._crowded,
        )
        self._listener: int | None = None
        self._ready = ReadyTasks(self._core.loop)
        self._waiting: set[asyncio.Task[None]] = set()
        """Tasks whose handlers have not returned immediately."""
        self._closed = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Ignore what generated code calls beside `add_registered_method_handlers`, with the same handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add a service's methods; of two with one name the later counts."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def listen(self, host: str, port: int, pem: Pem | None = None) -> int:
        """Bind an address; return the port.

        Args:
            host: Name or address.
            port: 0 = any free one.
            pem: Certificates; None = plaintext.

        Raises:
            ConfigError: The certificates cannot be used.
            OSError: It cannot be bound.
        """
        self._methods = [self._guard.method(name, handler) for name, handler in self._handlers.items()]
        methods = [(method.name, *method.streams) for method in self._methods]
        self._listener, bound = self._core.rpc.listen(_numeric(host), port, methods, _tls(pem))
        for place, method in enumerate(self._methods):
            if method.native is not None and method.admission.admits_everybody and not any(method.streams):
                times = AnswerTimes(BUCKETS)
                method.times.count_with(times.read)
                self._core.rpc.answer_method(self._listener, place, method.native, ANONYMOUS.tenant, times)
        return bound

    def renew(self, pem: Pem) -> None:
        """Use other certificates for new connections."""
        if self._listener is not None:
            self._core.rpc.set_tls(self._listener, _tls(pem))

    async def start(self) -> None:
        """Do nothing: it serves from the moment it listens."""

    def stats(self) -> dict[str, int]:
        """Return what the extension has open now, and has refused."""
        return self._core.rpc.stats()

    async def stop(self, grace: float | None) -> None:
        """Send clients away, wait until none is connected, then close what is left; again, with less to wait for.

        Args:
            grace: Longest wait, seconds; None = none.
        """
        listener = self._listener
        if listener is None or self._closed.is_set():
            return
        core = self._core
        core.rpc.stop_listening(listener)
        core.rpc.leave(listener)
        core.flush()
        ends_at = core.loop.time() + (grace or 0.0)
        while core.loop.time() < ends_at and core.rpc.stats()["connections"]:
            try:
                async with asyncio.timeout(STOPPED_POLL_SECONDS):
                    await self._closed.wait()
            except TimeoutError:
                continue
            return
        if self._closed.is_set():
            return
        self._closed.set()
        self._ready.close()
        waiting = set(self._waiting)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        core.rpc.flush()
        core.rpc.close_connections(listener)
        core.close()

    def _cannot_accept(self, reason: str) -> None:
        self._accept_log.warning("accept", "connections cannot be accepted: %s", reason)

    def _crowded(self) -> None:
        self._accept_log.warning("full", FULL, self._max_connections)

    def _open(self, event: tuple[Any, ...]) -> None:
        if event[0] == HEAD:
            self._judge(event)
            return
        _, number, _, place, metadata, timeout_us, message = event
        method = self._methods[place]
        if not method.synchronous:
            context = NativeContext(self._core, number, metadata, timeout_us, method.handler)
            task = self._ready.run(
                self._run(method, context, RequestIterator(context) if method.streams[0] else [message])
            )
            if not context.closed:
                if message is not None:
                    # The handler has read it. Streams that last would keep the connection's window shut for all others.
                    self._core.rpc.consumed(number, len(message))
                    self._core.flush()
                context.waits(task)
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
        elif any(method.streams):
            SynchronousStream(self._core, number, method, metadata, timeout_us)
        else:
            started = time.perf_counter()
            try:
                identity = method.admit(metadata)
                if identity is not ANONYMOUS:
                    self._core.rpc.trust(number)
                self._core.rpc.answer(number, method.answer(message, identity))
                self._core.flush()
            except BaseException as error:
                status = status_of(error, method.name)
                method.times.ended(status.code, started)
                self._core.finish(number, status)
            else:
                method.times.ended(grpc.StatusCode.OK, started)

    def _judge(self, event: tuple[Any, ...]) -> None:
        """Admit a call whose message is still coming, or end it: strangers' messages are not waited for."""
        _, number, _, place, metadata = event
        method, started = self._methods[place], time.perf_counter()
        try:
            identity = method.admit(metadata)
        except BaseException as error:
            status = status_of(error, method.name)
            method.times.ended(status.code, started)
            self._core.finish(number, status)
        else:
            self._core.admit(number, identity.tenant)

    async def _run(self, method: GuardedMethod, context: NativeContext, request: Any) -> None:
        try:
            response = await method.run(request, context, admitted=context.admitted)
            context.finish_with(response)
        except grpc.aio.AbortError:
            context.finish_aborted()
        except asyncio.CancelledError:
            context.finish(grpc.StatusCode.CANCELLED.value[0], "the call was cancelled")
            if not context.ended_by_caller:
                raise
        except Exception:
            log.exception("unexpected error in %s", method.name)
            context.finish(_INTERNAL, INTERNAL_TEXT)
        finally:
            context.close()


def _tls(pem: Pem | None) -> ServerTls | None:
    if pem is None:
        return None
    try:
        return ServerTls(pem.certificate, pem.key, pem.client_ca)
    except ValueError as error:
        raise ConfigError(str(error), field="tls_cert") from error


def _numeric(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0])
