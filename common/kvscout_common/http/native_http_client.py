"""The HTTP client by the extension: see `http`."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import itertools
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvscout_common.http.dialect import Dialect
from kvscout_common.http.http import (
    FailureKind,
    Form,
    Headers,
    HttpFailed,
    HttpRequest,
    PrefixedSink,
    Sink,
    SinkGone,
    SinkStalled,
    StreamReport,
)
from kvscout_common.http.native_http import ANSWER, CHUNK, ENDED, FIRST, FULL, HttpCore, ServerCall, shared
from kvscout_common.transport.native_core import ClientTls, MessageStream
from kvscout_common.transport.native_core import Dialect as NativeDialect
from kvscout_common.transport.ready_tasks import Resumption
from kvscout_common.transport.waiting import Inbox, Notice

_OWN_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SYSTEM_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_numbers = itertools.count(1)


@lru_cache(maxsize=64)
def native_dialect(dialect: Dialect) -> NativeDialect:
    """Return a dialect as the extension has it."""
    return NativeDialect([*dialect.paths().items()], cumulative=dialect.cumulative)


class _Place(NamedTuple):
    """Place that a URL leads to."""

    origin: str
    """Scheme, host and port."""
    host: str
    port: int
    peer: tuple[str, int] | None
    """Host and port; None = the host is a name."""
    is_secure: bool
    header: str
    """Host, as the header has it."""
    target: str


class NativeHttpClient:
    """See `http.HttpClient`.

    Args:
        ca: PEM of whom to trust; None = whom this machine trusts.
    """

    def __init__(self, ca: bytes | None) -> None:
        self._ca = ca
        self._tls: ClientTls | None = None
        self._core = shared()
        self._prefix = f"{next(_numbers)} "
        """Prefix of its origins: a connection is reused only by the client that made it."""
        self._closed = False
        self._answers: set[NativeAnswer] = set()

    async def send(self, request: HttpRequest, *, connect_seconds: float) -> NativeAnswer:
        """See `http.HttpClient.send`."""
        place = _place(request.url)
        number = self._begin(request, place, place.peer, connect_seconds)
        if number is not None:
            return await self._answer(number).head()
        *peers, last = await _resolve(place, connect_seconds)
        for peer in peers:
            try:
                return await self._sent(request, place, peer, connect_seconds)
            except HttpFailed as error:
                if error.kind is not FailureKind.UNREACHABLE:
                    raise
        return await self._sent(request, place, last, connect_seconds)

    async def close(self) -> None:
        """See `http.HttpClient.close`."""
        if not self._closed:
            self._closed = True
            for answer in list(self._answers):
                answer.abort()
            self._core.http.close_idle(self._prefix)
            self._core.release()

    async def _sent(
        self, request: HttpRequest, place: _Place, peer: tuple[str, int], connect_seconds: float
    ) -> NativeAnswer:
        number = self._begin(request, place, peer, connect_seconds)
        if number is None:
            raise HttpFailed(f"{place.origin}: there is no connection", FailureKind.UNREACHABLE)
        return await self._answer(number).head()

    def _answer(self, number: int) -> NativeAnswer:
        self._core.flush()
        answer = NativeAnswer(self._core, number, self._answers.discard)
        self._answers.add(answer)
        return answer

    def _begin(
        self, request: HttpRequest, place: _Place, peer: tuple[str, int] | None, connect_seconds: float
    ) -> int | None:
        """Send a request; return its answer's number, or None: there is no address, and no idle connection."""
        if place.is_secure and self._tls is None:
            self._tls = _trusting(self._ca)
        try:
            return self._core.http.send(
                self._prefix + place.origin,
                peer,
                connect_seconds,
                request.method,
                place.target,
                place.header,
                list(request.headers),
                request.body,
                self._tls if place.is_secure else None,
                place.host,
            )
        except OSError as error:
            own = error.errno in _OWN_RESOURCES
            raise HttpFailed(str(error), FailureKind.RESOURCES if own else FailureKind.UNREACHABLE) from error


class NativeAnswer:
    """See `http.HttpAnswer`.

    Args:
        core: Brings its events.
        number: Of the answer.
        over: Called when it is.
    """

    def __init__(self, core: HttpCore, number: int, over: Callable[[NativeAnswer], None]) -> None:
        self._core = core
        self._number = number
        self._over = over
        self._inbox: Inbox | None = None
        """The body, where it comes chunk by chunk."""
        self._progress = Resumption(core.loop)
        """Head and end: whoever waits for them goes on immediately."""
        self._ended: tuple[Any, ...] | None = None
        self._begins: Callable[[], None] | None = None
        self._room: Notice | None = None
        """Raised when the gRPC call that it goes to has room again."""
        self._last_report: StreamReport | None = None
        self.status = 0
        self.headers: Headers = ()
        core.answers[number] = self

    @property
    def report(self) -> StreamReport:
        """See `http.HttpAnswer`."""
        return self._last_report or self._core.report(self._number) or StreamReport()

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """See `native_core.EventHandler`."""
        if kind == FIRST:
            if self._begins is not None:
                self._begins()
            return
        if kind == FULL and self._room is not None:
            self._room.next().add_done_callback(lambda _: self._resume())
            return
        if kind == ANSWER:
            self.status, self.headers = event[2], event[3]
            self._progress.resume()
        elif kind == CHUNK and self._inbox is not None:
            self._inbox.put(event[2])
        elif kind == ENDED:
            self._ended = event
            self._last_report = StreamReport(**event[4])
            self._core.answers.pop(self._number, None)
            self._over(self)
            if self._inbox is not None:
                self._inbox.end()
            self._progress.resume()

    async def head(self) -> NativeAnswer:
        """Wait for the head; return the answer, which begins."""
        try:
            while not self.status:
                self._raise_if_failed()
                await self._progress
        except asyncio.CancelledError:
            self.abort()
            raise
        return self

    async def read(self, limit: int) -> bytes:
        """See `http.HttpAnswer.read`."""
        self._core.http.keep(self._number, limit)
        self._core.flush()
        event = await self._end()
        body: bytes = event[5]
        return body

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `http.HttpAnswer.chunks`."""
        self._stream(None)
        try:
            while (chunk := await self._next_chunk()) is not None:
                yield chunk
                self._resume()
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
        self._begins = on_first_output
        # Not the core's `http` itself: who is cancelled late would keep it when the core is closed.
        core, number = self._core, self._number
        reads = form is Form.MESSAGES or self._is_events()
        events = (form.value, native_dialect(dialect), max_tokens) if reads else None
        to, first = (sink.sink, sink.first) if isinstance(sink, PrefixedSink) else (sink, b"")
        try:
            if isinstance(to, ServerCall) and to.core is core:
                core.http.pass_to_call(number, to.number, to.ends_with_answer, write_seconds, first, events)
            elif events and form is Form.MESSAGES and isinstance(to, MessageStream) and to.takes_messages:
                self._room = to.room
                core.rpc_cores[to.core.rpc] = to.core
                core.http.pass_to_messages(number, to.core.rpc, to.number, write_seconds, first, events)
            else:
                self._stream(events)
                await self._pass_to(sink, write_seconds)
            core.flush()
            while self._ended is None:
                await self._progress
            self._raise_if_failed()
        except BaseException:
            self.abort()
            raise
        finally:
            self._begins = None
            if isinstance(sink, PrefixedSink) and self.report.passed:
                sink.first = b""
        report = self.report
        if isinstance(to, ServerCall) and to.ends_with_answer and report.done and not report.error:
            to.answered()
        return report

    def abort(self) -> None:
        """See `http.HttpAnswer.abort`."""
        if self._ended is None:
            self._core.http.abort(self._number)
            self._core.flush()

    def __del__(self) -> None:
        # Nobody will read it any more.
        if self._ended is None and not self._core.loop.is_closed():
            self.abort()

    def _is_events(self) -> bool:
        content, packed = "", "identity"
        for name, value in self.headers:
            match name.lower():
                case "content-type":
                    content = value
                case "content-encoding":
                    packed = value
        return content.partition(";")[0].strip().lower() == "text/event-stream" and packed.lower() == "identity"

    def _stream(self, events: tuple[str, NativeDialect, int | None] | None) -> None:
        """Have the body come here, chunk by chunk."""
        self._inbox = Inbox(self._core.loop)
        if self._ended is not None:
            self._inbox.end()
        self._core.http.stream(self._number, events)
        self._core.flush()

    async def _pass_to(self, sink: Sink, seconds: float) -> None:
        while (chunk := await self._next_chunk()) is not None:
            try:
                async with asyncio.timeout(seconds) as scope:
                    await sink.write(chunk)
            except TimeoutError as error:
                if scope.expired():
                    raise SinkStalled(f"nothing was read for {seconds:.3g} s") from error
                raise
            self._resume()

    async def _next_chunk(self) -> bytes | None:
        assert self._inbox is not None
        chunk = await self._inbox.next()
        if chunk is None:
            self._raise_if_failed()
        return chunk

    def _resume(self) -> None:
        self._core.http.resume(self._number)
        self._core.flush()

    async def _end(self) -> tuple[Any, ...]:
        while self._ended is None:
            await self._progress
        self._raise_if_failed()
        return self._ended

    def _raise_if_failed(self) -> None:
        if self._ended is None or not self._ended[2]:
            return
        outcome, text = self._ended[2], self._ended[3]
        if outcome == "sink gone":
            raise SinkGone(text)
        if outcome == "sink stalled":
            raise SinkStalled(text)
        raise HttpFailed(text, FailureKind(outcome))


@lru_cache(maxsize=4096)
def _place(url: str) -> _Place:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise HttpFailed(f"{url!r} is not a URL: {error}", FailureKind.PROTOCOL) from error
    if parts.scheme not in ("http", "https") or not host:
        raise HttpFailed(f"{url!r} is not an HTTP URL", FailureKind.PROTOCOL)
    is_secure = parts.scheme == "https"
    port = port or (443 if is_secure else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    peer: tuple[str, int] | None = None
    with suppress(ValueError):
        host = str(ipaddress.ip_address(host))
        peer = host, port
    header = parts.netloc.rpartition("@")[2]
    return _Place(f"{parts.scheme}://{host}:{port}", host, port, peer, is_secure, header, target)


async def _resolve(place: _Place, seconds: float) -> list[tuple[str, int]]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            found = await loop.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except TimeoutError as error:
        raise HttpFailed(f"{place.host} was not resolved in time", FailureKind.UNREACHABLE) from error
    except (OSError, UnicodeError) as error:
        raise HttpFailed(f"{place.host}: {error}", FailureKind.UNREACHABLE) from error
    return [(str(address[0]), int(address[1])) for *_, address in found]


def _trusting(ca: bytes | None) -> ClientTls:
    if ca is not None:
        return ClientTls(ca)
    for path in (ssl.get_default_verify_paths().cafile or "", _SYSTEM_CERTIFICATES):
        if Path(path).is_file():
            certificates = [found for found in _CERTIFICATE.findall(Path(path).read_bytes()) if _can_be_read(found)]
            return ClientTls(b"\n".join(certificates))
    raise HttpFailed("this machine has no list of trusted CAs", FailureKind.UNREACHABLE)


def _can_be_read(certificate: bytes) -> bool:
    try:
        ClientTls(certificate)
    except ValueError:
        return False  # such as one of a kind that nobody issues any more
    return True
