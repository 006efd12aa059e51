"""The HTTP client by aiohttp: see `http`."""

from __future__ import annotations

import asyncio
import errno
import io
import math
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from kvscout_common.http.dialect import Dialect
from kvscout_common.http.event_relay import EventRelay
from kvscout_common.http.http import (
    IDLE_SECONDS,
    TRAILER_SECONDS,
    VANISHED_SECONDS,
    FailureKind,
    Form,
    Headers,
    HttpFailed,
    HttpRequest,
    Sink,
    SinkStalled,
    StreamReport,
)
from kvscout_common.transport.sockets import end_when_unacknowledged

MAX_HEADER_BYTES = 32 * 1024
LONG_BODY = 1024 * 1024
_OWN_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Ports are not among them: they run out for one address at a time, and another engine has its own.


class AiohttpClient:
    """See `http.HttpClient`.

    Args:
        ca: PEM of whom to trust; None = whom this machine trusts.
    """

    def __init__(self, ca: bytes | None) -> None:
        context = ssl.create_default_context(cadata=None if ca is None else ca.decode("ascii"))
        # How many requests run at once is limited by the gateway, for all engines together.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=IDLE_SECONDS, ssl=context, socket_factory=_socket
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # A packed answer is none: a few bytes of it may unpack to anything.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
            skip_auto_headers=("User-Agent", "Content-Type", "Accept"),
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        self._ending: set[asyncio.Task[None]] = set()
        """Wait for the ends of bodies whose last event came."""
        self._answers: WeakSet[AiohttpAnswer] = WeakSet()

    async def send(self, request: HttpRequest, *, connect_seconds: float) -> AiohttpAnswer:
        """See `http.HttpClient.send`."""
        timeout = aiohttp.ClientTimeout(total=None, connect=connect_seconds)
        with _failures():
            response = await self._session.request(
                request.method,
                request.url,
                # A long one is written chunk by chunk.
                data=io.BytesIO(request.body) if len(request.body) > LONG_BODY else request.body or None,
                headers=request.headers,
                allow_redirects=False,
                timeout=timeout,
            )
        answer = AiohttpAnswer(response, self._ending)
        self._answers.add(answer)
        return answer

    async def close(self) -> None:
        """See `http.HttpClient.close`."""
        ending = list(self._ending)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        for answer in self._answers:
            # A body that lasts until its connection ends would seem to be complete.
            answer.abort()
        await self._session.close()


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    end_when_unacknowledged(connection, VANISHED_SECONDS)
    return connection


class AiohttpAnswer:
    """See `http.HttpAnswer`."""

    def __init__(self, response: aiohttp.ClientResponse, ending: set[asyncio.Task[None]]) -> None:
        self._response = response
        self._ending = ending
        self.status = response.status
        self.headers: Headers = tuple(response.headers.items())
        self.report = StreamReport()

    async def read(self, limit: int) -> bytes:
        """See `http.HttpAnswer.read`."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > limit:
                self.abort()
                raise HttpFailed(f"an answer of over {limit} bytes", FailureKind.PROTOCOL)
        return bytes(body)

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `http.HttpAnswer.chunks`."""
        try:
            while data := await self._next():
                yield data
        finally:
            self.abort()

    async def relay(
        self,
        sink: Sink,
        form: Form,
        dialect: Dialect,
        *,
        on_first_output: Callable[[], None] | None = None,
        max_tokens: int | None = None,
        write_seconds: float = 60.0,
    ) -> StreamReport:
        """See `http.HttpAnswer.relay`."""
        now, report = asyncio.get_running_loop().time, self.report
        report.listening_since = now()
        events = EventRelay(form, dialect, max_tokens, report) if form is Form.MESSAGES or self._is_events() else None

        async def pass_on(data: bytes) -> None:
            nonlocal on_first_output
            if report.outputs and on_first_output is not None:
                callback, on_first_output = on_first_output, None
                callback()
            if data:
                report.listening_since = math.inf
                await _write(sink, data, write_seconds)
                report.listening_since = now()

        try:
            while True:
                data = await self._next(TRAILER_SECONDS if report.done else None)
                if events is None:
                    report.passed += len(data)
                    report.done = not data
                    await pass_on(data)
                else:
                    await pass_on(events.feed(data, now()) if data else events.end(now()))
                    if events.failure:
                        raise HttpFailed(f"the engine sent {events.failure}", FailureKind.PROTOCOL)
                if not data or (events is not None and events.over):
                    break
            if events is not None and report.done and not report.overrun:
                self._end_later()
            else:
                self.abort()
            return report
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """See `http.HttpAnswer.abort`."""
        if not self._response.content.at_eof():
            self._response.close()

    def _end_later(self) -> None:
        """Read the end of the body, so that its connection can be used again."""
        if self._response.content.at_eof():
            return

        async def read_on() -> None:
            try:
                async with asyncio.timeout(TRAILER_SECONDS):
                    while not self._response.content.at_eof():
                        await self._response.content.readany()
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass  # the answer is complete: only the connection is lost

        def ended(task: asyncio.Task[None]) -> None:
            self._ending.discard(task)
            self.abort()

        task = asyncio.create_task(read_on())
        self._ending.add(task)
        task.add_done_callback(ended)

    def _is_events(self) -> bool:
        packed = self._response.headers.get("Content-Encoding", "identity")
        return self._response.content_type == "text/event-stream" and packed.lower() == "identity"

    async def _next(self, seconds: float | None = None) -> bytes:
        """Return the next bytes of the body; b"" = it is over, or nothing came for so long."""
        with _failures():
            try:
                async with asyncio.timeout(seconds):
                    return await self._response.content.readany()
            except TimeoutError:
                if seconds is None:
                    raise
                return b""


async def _write(sink: Sink, data: bytes, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds) as scope:
            await sink.write(data)
    except TimeoutError as error:
        if scope.expired():
            raise SinkStalled(f"nothing was read for {seconds:.3g} s") from error
        raise


@contextmanager
def _failures() -> Iterator[None]:
    """Turn aiohttp's errors into ours."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
        unless = FailureKind.UNREACHABLE
        raise HttpFailed(_text(error), _kind(error, unless)) from error
    except aiohttp.ClientPayloadError as error:
        # A body that is cut off has the same class as one that makes no sense.
        cause = error.__cause__
        nonsense = isinstance(cause, HttpProcessingError) and "Not enough data" not in cause.message
        raise HttpFailed(_text(error), FailureKind.PROTOCOL if nonsense else FailureKind.BROKEN) from error
    except (aiohttp.ClientResponseError, HttpProcessingError, aiohttp.InvalidURL) as error:
        raise HttpFailed(_text(error), FailureKind.PROTOCOL) from error
    except (aiohttp.ClientError, OSError) as error:
        raise HttpFailed(_text(error), _kind(error, FailureKind.BROKEN)) from error


def _kind(error: BaseException, unless: FailureKind) -> FailureKind:
    return FailureKind.RESOURCES if isinstance(error, OSError) and error.errno in _OWN_RESOURCES else unless


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
