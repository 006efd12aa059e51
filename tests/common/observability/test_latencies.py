"""Latencies are shown as `prometheus_client` shows its own histograms."""

from __future__ import annotations

import random
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from support.seeds import test_seed

from kvscout_common.observability.latencies import Latencies

BOUNDS = (0.0001, 0.01, 1.0, 30.0)


class Shown(Collector):
    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies

    def collect(self) -> Iterator[Metric]:
        histogram = HistogramMetricFamily("times_seconds", "Times", labels=["stage"])
        self._latencies.add_to(histogram, ["one"])
        yield histogram


def test_what_is_shown_is_the_histogram_of_the_same_times() -> None:
    seed = test_seed()
    draw = random.Random(seed)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # as every service does
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("times_seconds", "Times", ["stage"], buckets=BOUNDS, registry=theirs).labels("one")
    latencies = Latencies(BOUNDS)
    ours.register(Shown(latencies))
    assert generate_latest(ours) == generate_latest(theirs), "before the first"
    for seconds in (0.0, *BOUNDS, 31.0, *(10 ** draw.uniform(-5, 2) for _ in range(100))):
        histogram.observe(seconds)
        latencies.observe(seconds)
    assert generate_latest(ours) == generate_latest(theirs)
