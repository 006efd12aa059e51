"""An OTLP receiver over HTTP in this process: keeps the spans that come."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from support.web_servers import web_server


class Exported(NamedTuple):
    """A span as it came."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    """"" = none."""
    kind: int
    facts: dict[str, Any]
    events: tuple[str, ...]
    failed: bool
    seconds: float


@dataclass(slots=True)
class Receiver:
    """Where traces go."""

    url: str
    spans: list[Exported] = field(default_factory=list)
    refuses: bool = False
    """It answers with an error."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a service that is to send them here."""
        return ("--otlp-endpoint", self.url)

    def of(self, trace: str) -> dict[str, Exported]:
        """The spans of a trace by service and name."""
        return {f"{one.service} {one.name}": one for one in self.spans if one.trace == trace}


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Receiver]:
    """A receiver that listens."""
    receiver = Receiver("")

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        # aiohttp has unpacked it already where its header says that it is packed.
        body = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        message: Any = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        if receiver.refuses:
            return web.Response(status=400)
        for resource in message.resource_spans:
            service = _facts(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                receiver.spans += [_span(service, span) for span in scope.spans]
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    async with web_server(app, shutdown_timeout=0.1) as receiver.url:
        yield receiver


def _span(service: str, span: Any) -> Exported:
    return Exported(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        _facts(span.attributes),
        tuple(event.name for event in span.events),
        span.status.code == 2,
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
    )


def _facts(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
