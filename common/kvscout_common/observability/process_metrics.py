"""Metrics of every process: its build, and what it uses of its machine."""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_common import __version__
from kvscout_common.hashing import backend_name


class _Held(Collector):
    def describe(self) -> list[Metric]:
        """Return nothing: where it is registered, no loop need run."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the current samples; call it on the loop whose tasks are counted."""
        count = len(asyncio.all_tasks())
        yield GaugeMetricFamily("kvscout_tasks", "Tasks of the event loop that have not ended", value=count)
        # Read off the allocator's pools, in microseconds: nobody need walk over the objects.
        yield GaugeMetricFamily(
            "kvscout_python_allocations",
            "Allocated memory blocks of Python objects",
            value=sys.getallocatedblocks(),
        )


def register_process_metrics(registry: CollectorRegistry, service: str) -> None:
    """Add the samples that all services have alike: the build, what it holds, and `process_*` under Prometheus' names.

    Args:
        registry: Read on the event loop.
        service: Such as "indexer".
    """
    # Of each counter and histogram a series more that nobody reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    build = Gauge(
        "kvscout_build_info", "1 for what runs here", ["service", "version", "backend", "python"], registry=registry
    )
    build.labels(service, __version__, backend_name(), platform.python_version()).set(1)
    ProcessCollector(registry=registry)
    registry.register(_Held())
