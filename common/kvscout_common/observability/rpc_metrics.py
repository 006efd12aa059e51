"""Outcomes and durations of the calls of a service, under the names that gRPC's own middlewares use."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common.observability.latencies import Latencies

BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds, seconds."""


class MethodTimes:
    """The calls of one rpc that have ended."""

    def __init__(self) -> None:
        self.codes: Counter[grpc.StatusCode] = Counter()
        self.latencies = Latencies(BUCKETS)
        self._other_counts: list[Callable[[], tuple[list[int], float]]] = []

    def count_with(self, read: Callable[[], tuple[list[int], float]]) -> None:
        """Count calls that were answered by the extension, too.

        Args:
            read: How many those are until now, by bucket, and the seconds that they took; asked by any thread.
        """
        self._other_counts.append(read)

    def totals(self) -> tuple[Counter[grpc.StatusCode], Latencies]:
        """Return all until now, by status, and how long they took."""
        # In one step: the loop goes on meanwhile.
        codes, latencies = Counter(dict(self.codes)), Latencies(BUCKETS)
        latencies.add(self.latencies.counts, self.latencies.seconds)
        for read in self._other_counts:
            counts, seconds = read()
            latencies.add(counts, seconds)
            if answered := sum(counts):
                codes[grpc.StatusCode.OK] += answered
        return codes, latencies

    def ended(self, code: grpc.StatusCode, started: float) -> None:
        """Count one call that ended.

        Args:
            code: How.
            started: `time.perf_counter()` when it came.
        """
        self.codes[code] += 1
        self.latencies.observe(time.perf_counter() - started)


class RpcTimes(Collector):
    """Those of all rpcs of a process. As many as it has methods: unknown ones never come here."""

    def __init__(self) -> None:
        self._methods: dict[str, MethodTimes] = {}

    def method(self, name: str) -> MethodTimes:
        """Return the metrics of one rpc.

        Args:
            name: "/package.Service/Method".
        """
        return self._methods.setdefault(name, MethodTimes())

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        labels = ["grpc_service", "grpc_method"]
        handled = CounterMetricFamily(
            "grpc_server_handled", "Calls that have ended, by status", labels=[*labels, "grpc_code"]
        )
        seconds = HistogramMetricFamily(
            "grpc_server_handling_seconds", "From a call's arrival to its end; of streams, their life", labels=labels
        )
        for name, times in self._methods.items():
            service, _, method = name.strip("/").rpartition("/")
            codes, latencies = times.totals()
            for code, count in codes.items():
                handled.add_metric([service, method, code.name], count)
            if codes:
                latencies.add_to(seconds, [service, method])
        yield from (handled, seconds)
