"""Traces of requests across services, in OpenTelemetry's form, where they are turned on (`--otlp-endpoint`).

::

    caller ──traceparent──▶ span(SERVER) ──▶ span(CLIENT) ──traceparent──▶ next service, engine

Off, which is the default, nothing of OpenTelemetry is imported, and a span is one object that does nothing. On, spans
are sent by a thread of their own in batches; what it cannot get rid of is dropped, no request waits for it.

A span says where a request went and why: names, counts, costs, kinds of errors. No word and no token of a prompt, and
no text of an error either, as engines quote prompts in theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from kvscout_common.errors import ConfigError
from kvscout_common.process.endings import NobodyWaits

TRACEPARENT: Final = "traceparent"
EXPORT_SECONDS: Final = 5.0
"""Longest time of sending a batch; at the end of a process, for all that is left."""
Fact = str | int | float | bool


class SpanKind(StrEnum):
    """Side of a call that a span covers."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    INTERNAL = "INTERNAL"


class Span(Protocol):
    """Something that took time, in a trace. A context manager: what is begun inside is part of it."""

    def __enter__(self) -> Span: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    @property
    def traceparent(self) -> str:
        """Return the traceparent for the next service; "" = nothing is to be traced there."""
        ...

    def record(self, **facts: Fact) -> None:
        """Add attributes `kvscout.NAME`."""
        ...

    def event(self, name: str) -> None:
        """Record an event that happened now."""
        ...

    def failed(self, error: BaseException) -> None:
        """Record a failure."""
        ...

    def begun(self) -> Span:
        """Begin it, for one that is no block: what is begun meanwhile is no part of it."""
        ...

    def end(self) -> None:
        """End the span, if it is not used as a block. A second call does nothing."""
        ...


class _Nothing:
    """See `Span`: where there are no traces."""

    __slots__ = ()
    traceparent = ""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing."""

    def record(self, **facts: Fact) -> None:
        """Do nothing."""

    def event(self, name: str) -> None:
        """Do nothing."""

    def failed(self, error: BaseException) -> None:
        """Do nothing."""

    def begun(self) -> Span:
        """Do nothing."""
        return self

    def end(self) -> None:
        """Do nothing."""


NOTHING: Final[Span] = _Nothing()
_tracer: _Tracer | None = None


def enabled() -> bool:
    """Return whether there are traces."""
    return _tracer is not None


def span(name: str, kind: SpanKind = SpanKind.INTERNAL, *, parent: str | None = None) -> Span:
    """Return a span, begun when it is entered, or by `begun`.

    Args:
        name: One of few.
        kind: Which side it is.
        parent: The caller's `traceparent`; "" = it has none; None = what runs now.
    """
    return NOTHING if _tracer is None else _Span(_tracer, name, kind, parent)


def current() -> Span:
    """Return the one that runs now."""
    return NOTHING if _tracer is None else _Span.running(_tracer)


def traceparent() -> str:
    """Return the traceparent for the next service; "" = nothing is to be traced there."""
    return "" if _tracer is None else current().traceparent


def call_options() -> dict[str, Any]:
    """Return the same as an option of a call."""
    parent = traceparent()
    return {"metadata": ((TRACEPARENT, parent),)} if parent else {}


def ids() -> dict[str, str]:
    """Return the ids of the current trace and span, for logs; empty = none."""
    if _tracer is None:
        return {}
    context = _tracer.api.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def start(service: str, endpoint: str, *, ratio: float, version: str) -> Callable[[], None]:
    """Start to trace this process.

    Args:
        service: Its name, such as "gateway".
        endpoint: Of an OTLP receiver over HTTP, such as http://127.0.0.1:4318.
        ratio: Of requests that come without a trace, the share that begins one; those that come with one go by it.
        version: Of the service.

    Returns:
        What ends it, and sends what is left; blocks for so long.

    Raises:
        ConfigError: The endpoint is none, or OpenTelemetry is not installed.
    """
    global _tracer  # noqa: PLW0603 - one for a process, as the transport
    check_endpoint(endpoint)
    try:
        made = _Tracer(f"kvscout-{service}", endpoint, ratio, version)
    except ImportError as error:
        raise ConfigError(
            f"needs OpenTelemetry ({error.name} is not installed): pip install 'kvscout[otel]'", field="otlp_endpoint"
        ) from error
    _tracer = made

    def stop() -> None:
        global _tracer  # noqa: PLW0603
        _tracer = None
        made.provider.shutdown()

    return stop


def check_endpoint(endpoint: str) -> None:
    """Raise unless it is the address of a receiver.

    Raises:
        ConfigError: It is none.
    """
    try:
        parts = urlsplit(endpoint)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError("must be http(s)://host:port of an OTLP receiver", field="otlp_endpoint")


class _Tracer:
    """Parts of OpenTelemetry that are used."""

    def __init__(self, service: str, endpoint: str, ratio: float, version: str) -> None:
        from opentelemetry import context, trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api = trace
        self.context = context
        self.propagator = TraceContextTextMapPropagator()
        self.kinds = {kind: trace.SpanKind[kind.value] for kind in SpanKind}
        self.failed = trace.StatusCode.ERROR
        self.gone = (asyncio.CancelledError, GeneratorExit, NobodyWaits)
        """Nobody waits for it any more, which is no failure."""
        self.provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.version": version}),
            sampler=ParentBased(TraceIdRatioBased(ratio)),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self.provider.get_tracer("kvscout", version)


class _Span:
    """See `Span`."""

    __slots__ = ("_entered", "_kind", "_name", "_parent", "_span", "_tracer")

    def __init__(self, tracer: _Tracer, name: str, kind: SpanKind, parent: str | None) -> None:
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._parent = parent
        self._span: Any = None
        self._entered: Any = None

    @classmethod
    def running(cls, tracer: _Tracer) -> _Span:
        """Return the current span, to record attributes on."""
        found = cls(tracer, "", SpanKind.INTERNAL, None)
        found._span = tracer.api.get_current_span()
        return found

    def begun(self) -> _Span:
        """Begin it."""
        above = None
        if self._parent is not None:
            # An empty context: nothing that happens to run here is its parent.
            above = self._tracer.propagator.extract({TRACEPARENT: self._parent}, self._tracer.context.Context())
        self._span = self._tracer.tracer.start_span(self._name, context=above, kind=self._tracer.kinds[self._kind])
        return self

    def __enter__(self) -> Span:
        self.begun()
        within = self._tracer.api.set_span_in_context(self._span)
        self._entered = self._tracer.context.attach(within)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tracer.context.detach(self._entered)
        if error is not None:
            self.failed(error)
        self._span.end()

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        context = self._span.get_span_context()
        if not context.is_valid or not context.trace_flags.sampled:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def record(self, **facts: Fact) -> None:
        """See `Span`."""
        if self._span.is_recording():
            self._span.set_attributes({f"kvscout.{name}": value for name, value in facts.items()})

    def event(self, name: str) -> None:
        """See `Span`."""
        self._span.add_event(name)

    def failed(self, error: BaseException) -> None:
        """See `Span`."""
        if not self._span.is_recording():
            return
        if isinstance(error, self._tracer.gone):
            self._span.set_attribute("kvscout.outcome", "cancelled")
            return
        kind = type(error).__name__
        self._span.set_attribute("error.type", kind)
        self._span.set_status(self._tracer.failed, kind)

    def end(self) -> None:
        """See `Span`."""
        if self._span.is_recording():
            self._span.end()
