"""One request at an engine: sent, waited for, read. What goes wrong on the way is an `EngineFailed`, nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urlsplit

from kvscout_common.http.dialect import Dialect
from kvscout_common.http.http import (
    Form,
    HttpAnswer,
    HttpClient,
    HttpFailed,
    HttpRequest,
    Sink,
    StreamReport,
)
from kvscout_common.observability import tracing
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_gateway.engines.answer import words_read
from kvscout_gateway.engines.faults import (
    EngineFailed,
    Fault,
    Payer,
    not_streamed,
    refused,
    reported,
    transport_failure,
)
from kvscout_gateway.engines.timeouts import Bounded, EngineTimeouts, Liveness, SilenceWatch

log = logging.getLogger("kvscout.gateway")

T = TypeVar("T")

REFUSAL_BYTES = 64 * 1024
REFUSAL_SECONDS = 2.0
"""Longest wait for the text of a refusal, and the most that is read of it."""


class Engines:
    """The engines of one gateway, all of them."""

    def __init__(
        self,
        client: HttpClient,
        timeouts: EngineTimeouts,
        *,
        client_write_seconds: float,
        own_headers: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        """Ask them.

        Args:
            client: What reaches them.
            timeouts: How long they may be silent.
            client_write_seconds: Longest wait for a client that takes nothing of an answer.
            own_headers: What every request carries besides its own, such as the engines' key.
        """
        self.client = client
        self.timeouts = timeouts
        self.client_write_seconds = client_write_seconds
        self.own_headers = own_headers
        self.warnings = RateLimitedLog(log)

    def call(
        self,
        endpoint: str,
        *,
        uncached_tokens: int,
        liveness: Liveness,
        whole_answer: bool = False,
        clients_key: bool = False,
    ) -> EngineCall:
        """Begin a request to an engine; `end` it.

        Args:
            endpoint: The engine, for people.
            uncached_tokens: Of the prompt, those that it has to compute.
            liveness: That of the worker rank.
            whole_answer: The whole answer comes at once, when it is complete.
            clients_key: What the engine says of the key that it is shown is said of the client's.
        """
        return EngineCall(self, endpoint, uncached_tokens, liveness, whole_answer=whole_answer, clients_key=clients_key)

    async def close(self) -> None:
        """Close every connection."""
        await self.client.close()


class EngineCall:
    """One request, and how long its engine may be silent. Cancelling what it awaits aborts it on the engine."""

    def __init__(
        self,
        engines: Engines,
        endpoint: str,
        uncached_tokens: int,
        liveness: Liveness,
        *,
        whole_answer: bool,
        clients_key: bool,
    ) -> None:
        self._engines = engines
        self._clients_key = clients_key
        self._endpoint = endpoint
        self._now = asyncio.get_running_loop().time
        self._watch = SilenceWatch(engines.timeouts, uncached_tokens, liveness, self._now(), whole_answer=whole_answer)
        self._bounded = Bounded(self._watch)
        self.span = tracing.NOTHING
        """From when it is sent to its end."""

    def end(self) -> None:
        """End the request. A second call does nothing."""
        self._bounded.end()
        self._watch.end()
        self.span.end()

    async def send(self, request: HttpRequest) -> HttpAnswer:
        """Send it, and wait for the head of an answer that is a success.

        Raises:
            EngineFailed: There is none.
        """
        own_headers = tuple(self._engines.own_headers())
        if tracing.enabled():
            request = self._traced(request)
        if own_headers:
            request = replace(request, headers=(*request.headers, *own_headers))
        sending = self._engines.client.send(request, connect_seconds=self._engines.timeouts.connect_seconds)
        answer = await self._await_engine(sending)
        if self.span is not tracing.NOTHING:
            self.span.record(status=answer.status)
        if not 200 <= answer.status < 300:
            failed = await _refusal(answer, clients_key=self._clients_key)
            self.span.failed(failed)
            raise failed
        return answer

    def _traced(self, request: HttpRequest) -> HttpRequest:
        """Return the request with the trace context of the current span, which replaces its client's."""
        parts = urlsplit(request.url)
        self.span = tracing.span(f"engine {request.method} {parts.path[:100]}", tracing.SpanKind.CLIENT).begun()
        self.span.record(engine=parts.netloc)
        traceparent = self.span.traceparent
        if not traceparent:
            return request
        kept = (one for one in request.headers if one[0].lower() != tracing.TRACEPARENT)
        return replace(request, headers=(*kept, (tracing.TRACEPARENT, traceparent)))

    async def read(self, answer: HttpAnswer, limit: int) -> bytes:
        """Read all of an answer.

        Raises:
            EngineFailed: It breaks off, or is longer than that many bytes.
        """
        body = await self._await_engine(answer.read(limit))
        self._watch.output(self._now())
        return body

    async def chunks(self, answer: HttpAnswer) -> AsyncIterator[bytes]:
        """Yield the body of an answer as it comes; leaving early aborts it.

        Raises:
            EngineFailed: It breaks off, or falls silent: comments in a stream of events are silence, too.
        """
        chunks = answer.chunks()
        has_events = _content_type(answer).startswith("text/event-stream")
        while (chunk := await self._await_engine(anext(chunks, None))) is not None:
            yield chunk
            # Behind the yield: how long the client took is no silence of the engine's.
            if not has_events:
                self._watch.chunk(self._now())
            elif _says_something(chunk):
                self._watch.output(self._now())

    async def require_stream(self, answer: HttpAnswer) -> None:
        """Refuse an answer to a streamed call that is one JSON document.

        Raises:
            EngineFailed: It is; with what the engine says.
        """
        if _content_type(answer).startswith("application/json"):
            raise not_streamed(await _beginning(answer))

    async def relay(
        self,
        answer: HttpAnswer,
        sink: Sink,
        form: Form,
        dialect: Dialect,
        *,
        max_tokens: int | None,
        on_first_output: Callable[[], None],
    ) -> StreamReport:
        """Move an answer to a client.

        Args:
            answer: The engine's.
            sink: The client.
            form: What becomes of it.
            dialect: Of its events.
            max_tokens: Number of tokens at which it ends; None = the engine knows when.
            on_first_output: Called when output begins, before it is passed on.

        Raises:
            EngineFailed: It breaks off, reports an error, or falls silent.
            SinkGone, SinkStalled: The client.
        """

        def begins() -> None:
            self._watch.output(self._now())
            self.span.event("first output")
            on_first_output()

        self._watch.follow(lambda: answer.report)
        report = await self._await_engine(
            answer.relay(
                sink,
                form,
                dialect,
                on_first_output=begins,
                max_tokens=max_tokens,
                write_seconds=self._engines.client_write_seconds,
            )
        )
        if report.error:
            raise reported(words_read(report.error) or f"an error of {len(report.error)} bytes")
        if not report.done:
            raise EngineFailed("the engine broke off its stream")
        if report.overrun:
            self._engines.warnings.warning(self._endpoint, "%s continued past the requested length", self._endpoint)
        return report

    async def _await_engine(self, waiting: Awaitable[T]) -> T:
        """Wait for an engine.

        Raises:
            EngineFailed: It fails, or is silent for too long.
        """
        try:
            with self._bounded:
                return await waiting
        except HttpFailed as error:
            failed = transport_failure(self._endpoint, error)
            self.span.failed(failed)
            if failed.rule.payer is Payer.GATEWAY:
                self._engines.warnings.warning("resources", "requests fail for lack of resources here: %s", error)
            raise failed from error
        except TimeoutError as error:
            self.span.failed(error)
            raise self._given_up() from error

    def _given_up(self) -> EngineFailed:
        """Return why it is not waited for any longer."""
        if self._watch.lost:
            return EngineFailed("the worker is lost", detail=f"{self._endpoint}: {self._watch.lost}")
        seconds = self._now() - self._watch.silent_since
        if self._watch.whole_answer:
            problem = f"the answer is not complete after {seconds:.3g} s"
            return EngineFailed(problem, detail=f"{self._endpoint}: {problem}", fault=Fault.TIME)
        problem = f"hangs: no output for {seconds:.3g} s"
        return EngineFailed(f"the worker {problem}", detail=f"{self._endpoint}: {problem}")


def _content_type(answer: HttpAnswer) -> str:
    return next((value.lower() for name, value in answer.headers if name.lower() == "content-type"), "")


def _says_something(chunk: bytes) -> bool:
    """Tell whether a chunk of a stream of events has more in it than comments."""
    return any(line and not line.startswith(b":") for line in chunk.splitlines())


async def _refusal(answer: HttpAnswer, *, clients_key: bool) -> EngineFailed:
    return refused(answer.status, answer.headers, await _beginning(answer), clients_key=clients_key)


async def _beginning(answer: HttpAnswer) -> bytes:
    """Read the first bytes of an answer that is not passed on, and end it."""
    body = bytearray()
    try:
        async with asyncio.timeout(REFUSAL_SECONDS):
            async for chunk in answer.chunks():
                body += chunk
                if len(body) >= REFUSAL_BYTES:
                    break
    except (HttpFailed, TimeoutError):
        pass  # what came of it will do
    answer.abort()
    return bytes(body[:REFUSAL_BYTES])
