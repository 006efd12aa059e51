"""Metrics of the transport of a service: what it holds and has refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.http.http import HttpServer
from kvscout_common.transport import chosen

_GAUGES = {
    "connections": ("kvscout_rpc_connections", "Connections open, accepted or made"),
    "calls": ("kvscout_rpc_calls", "Calls open"),
    "queued_bytes": ("kvscout_rpc_queued_bytes", "Bytes of messages that came and are not handled"),
}
_CONNECTIONS = {"connections_refused": "connection", "connections_evicted": "idle connection"}
_REFUSED = {**_CONNECTIONS, "calls_refused": "call"}


class TransportCollector(Collector):
    """Turns what the servers of a process know of themselves into samples.

    Args:
        servers: All that serve gRPC; grpcio's say nothing of themselves.
        http: What serves HTTP, if anything does.
    """

    def __init__(self, servers: Sequence[Any], http: HttpServer | None = None) -> None:
        self._servers = servers
        self._http = http

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        info = GaugeMetricFamily("kvscout_rpc_transport", "1 for what carries the calls", labels=["transport"])
        info.add_metric([chosen()], 1)
        yield info
        if self._http is not None:
            counts = self._http.stats()
            help_text = "Connections of clients that are open"
            yield GaugeMetricFamily("kvscout_http_connections", help_text, value=counts["connections"])
            yield _refused(
                "kvscout_http_refused", "HTTP connections closed at the connection limit", _CONNECTIONS, [counts]
            )
        stats = [server.stats() for server in self._servers if hasattr(server, "stats")]
        if not stats:
            return
        for field, (name, help_text) in _GAUGES.items():
            yield GaugeMetricFamily(name, help_text, value=sum(one[field] for one in stats))
        yield _refused(
            "kvscout_rpc_refused", "Calls and connections refused at a limit of the transport", _REFUSED, stats
        )


def _refused(name: str, help_text: str, kinds: Mapping[str, str], stats: Sequence[Mapping[str, int]]) -> Metric:
    refused = CounterMetricFamily(name, help_text, labels=["what"])
    for field, what in kinds.items():
        refused.add_metric([what], sum(one[field] for one in stats))
    return refused
