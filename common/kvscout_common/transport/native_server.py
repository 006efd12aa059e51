"""A gRPC server on the native transport, for what is written against `grpc.aio.server`: handlers, interceptors, stop.

Each call runs in a task of its own, as grpc.aio has it, through the same interceptors.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc

from kvscout_common.errors import ConfigError
from kvscout_common.handlers import Handler
from kvscout_common.interceptors import INTERNAL_TEXT
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.tls import Pem
from kvscout_common.transport.native_context import NativeContext, RequestIterator
from kvscout_common.transport.native_core import NativeCore, ServerTls

log = logging.getLogger("kvscout.rpc")

_INTERNAL = grpc.StatusCode.INTERNAL.value[0]
_UNIMPLEMENTED = grpc.StatusCode.UNIMPLEMENTED.value[0]
STOPPED_POLL_SECONDS = 0.02


class _Details(NamedTuple):
    method: str
    invocation_metadata: Sequence[tuple[str, str | bytes]]


class NativeServer:
    """See the module.

    Args:
        interceptors: As those of `grpc.aio.server`, outermost first.
        max_message_bytes: Longest message in either direction.
        max_streams: Calls open at once on a connection.
    """

    def __init__(
        self,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        max_message_bytes: int,
        max_streams: int,
    ) -> None:
        self._interceptors = tuple(interceptors)
        self._handlers: dict[str, Handler] = {}
        self._methods: list[tuple[str, Handler]] = []
        self._accept_log = RateLimitedLog(log)
        self._core = NativeCore(
            max_message_bytes=max_message_bytes,
            max_streams=max_streams,
            opened=self._open,
            failed=self._cannot_accept,
        )
        self._listener: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """What generated code calls beside `add_registered_method_handlers`, with the same handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds a service's methods; of two with one name the later counts."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def listen(self, host: str, port: int, pem: Pem | None = None) -> int:
        """Binds an address; returns the port.

        Args:
            host: Name or address.
            port: 0 = any free one.
            pem: Certificates; None = plaintext.

        Raises:
            ConfigError: The certificates cannot be used.
            OSError: It cannot be bound.
        """
        self._methods = list(self._handlers.items())
        methods = [
            (name, bool(handler.request_streaming), bool(handler.response_streaming)) for name, handler in self._methods
        ]
        self._listener, bound = self._core.rpc.listen(_numeric(host), port, methods, _tls(pem))
        return bound

    def renew(self, pem: Pem) -> None:
        """New connections are answered with other certificates."""
        if self._listener is not None:
            self._core.rpc.set_tls(self._listener, _tls(pem))

    async def start(self) -> None:
        """Nothing to do: it serves since it listens."""

    def stats(self) -> dict[str, int]:
        """What the extension has open now, and has refused."""
        return self._core.rpc.stats()

    async def stop(self, grace: float | None) -> None:
        """Sends clients away, waits until none is connected, then closes what is left; again, with less to wait for.

        Args:
            grace: Longest wait, seconds; None = none.
        """
        listener = self._listener
        if listener is None or self._closed.is_set():
            return
        rpc = self._core.rpc
        rpc.stop_listening(listener)
        rpc.leave(listener)
        self._core.flush()
        ends_at = self._core.loop.time() + (grace or 0.0)
        while self._core.loop.time() < ends_at and rpc.stats()["connections"]:
            try:
                async with asyncio.timeout(STOPPED_POLL_SECONDS):
                    await self._closed.wait()
            except TimeoutError:
                continue
            return
        if self._closed.is_set():
            return
        self._closed.set()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        rpc.flush()
        rpc.close_connections(listener)
        self._core.close()

    def _cannot_accept(self, reason: str) -> None:
        self._accept_log.warning("accept", "connections cannot be accepted: %s", reason)

    def _open(self, event: tuple[Any, ...]) -> None:
        _, number, _, place, metadata, timeout_us, message = event
        method, handler = self._methods[place]
        context = NativeContext(self._core, number, metadata, timeout_us, handler)
        task = self._core.loop.create_task(self._run(method, handler, context, message), name=method)
        context.run_by(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, method: str, handler: Handler, context: NativeContext, message: bytes | None) -> None:
        try:
            wrapped = await self._intercepted(handler, _Details(method, context.invocation_metadata()))
            if wrapped is None:
                context.finish(_UNIMPLEMENTED, "")
                return
            request: Any = RequestIterator(context) if handler.request_streaming else message
            behaviour: Any = (
                wrapped.stream_stream or wrapped.stream_unary or wrapped.unary_stream or wrapped.unary_unary
            )
            response = await behaviour(request, context)
            context.finish_with(response)
        except grpc.aio.AbortError:
            context.finish_aborted()
        except asyncio.CancelledError:
            context.finish(grpc.StatusCode.CANCELLED.value[0], "the call was cancelled")
            if not context.ended_by_caller:
                raise
        except Exception:
            log.exception("unexpected error in %s", method)
            context.finish(_INTERNAL, INTERNAL_TEXT)
        finally:
            context.close()

    async def _intercepted(self, handler: Handler, details: Any) -> Any:
        async def own(_: Any) -> Any:
            return handler

        continuation: Any = own
        for interceptor in reversed(self._interceptors):
            continuation = _through(interceptor, continuation)
        return await continuation(details)


def _through(interceptor: grpc.aio.ServerInterceptor, inner: Any) -> Any:
    async def intercept(details: Any) -> Any:
        return await interceptor.intercept_service(inner, details)

    return intercept


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
