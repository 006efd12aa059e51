"""What carries the calls of a service, and what it holds and has refused, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.transport import chosen

_GAUGES = {
    "connections": ("kvscout_rpc_connections", "Connections open, accepted or made"),
    "calls": ("kvscout_rpc_calls", "Calls open"),
    "queued_bytes": ("kvscout_rpc_queued_bytes", "Bytes of messages that came and are not handled"),
}
_REFUSED = {"connections_refused": "connection", "calls_refused": "call"}


class TransportCollector(Collector):
    """Turns what the servers of a process know of themselves into samples.

    Args:
        servers: All that serve gRPC; grpcio's say nothing of themselves.
    """

    def __init__(self, servers: Sequence[Any]) -> None:
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        """Samples of now."""
        info = GaugeMetricFamily("kvscout_rpc_transport", "1 for what carries the calls", labels=["transport"])
        info.add_metric([chosen()], 1)
        yield info
        stats = [server.stats() for server in self._servers if hasattr(server, "stats")]
        if not stats:
            return
        for field, (name, help_text) in _GAUGES.items():
            yield GaugeMetricFamily(name, help_text, value=sum(one[field] for one in stats))
        refused = CounterMetricFamily("kvscout_rpc_refused", "What was refused because it did harm", labels=["what"])
        for field, what in _REFUSED.items():
            refused.add_metric([what], sum(one[field] for one in stats))
        yield refused
