"""The rpc to which a proxy sends its access log: the ends of requests whose streams the picker has left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, NamedTuple, Protocol

import grpc

from kvscout.accesslog.v3 import accesslog_pb2 as pb
from kvscout_gateway.fronts.endpoint_picker import wire

SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"


class Over(NamedTuple):
    """A request that is over, as the proxy's log says."""

    name: str
    """Name of its pick, from the header `wire.PICK`."""
    status: int
    """HTTP status; 0 = the client went before there was one."""


class Ender(Protocol):
    """Knows the picks that were left."""

    def end(self, over: Over) -> None:
        """End a pick, if it is one of those that the caller may end and whose end nobody else reports."""
        ...


class AccessLog:
    """Serves `StreamAccessLogs`.

    Args:
        ender: Receives them.
    """

    def __init__(self, ender: Ender) -> None:
        self._ender = ender

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the rpc, under Envoy's own name."""
        behaviour: Any = self.stream  # grpcio's stubs want the synchronous one
        handler = grpc.stream_unary_rpc_method_handler(
            behaviour, pb.StreamAccessLogsMessage.FromString, pb.StreamAccessLogsResponse.SerializeToString
        )
        handlers: Any = {"StreamAccessLogs": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_registered_method_handlers(SERVICE, handlers)

    async def stream(
        self, messages: AsyncIterator[pb.StreamAccessLogsMessage], context: object
    ) -> pb.StreamAccessLogsResponse:
        """Read a log to its end."""
        async for message in messages:
            for over in overs(message):
                self._ender.end(over)
        return pb.StreamAccessLogsResponse()


def overs(message: pb.StreamAccessLogsMessage) -> Iterator[Over]:
    """Return the requests of a message that name their pick."""
    for entry in message.http_logs.log_entry:
        name = entry.request.request_headers.get(wire.PICK, "")
        if name:
            yield Over(name, entry.response.response_code.value)
