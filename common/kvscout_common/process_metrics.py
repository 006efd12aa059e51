"""What a process takes of its machine, for Prometheus: memory, CPU, descriptors, tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class _Tasks(Collector):
    def describe(self) -> list[Metric]:
        """Nothing: where it is registered, no loop need run."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Samples of now; on the loop whose tasks they are."""
        count = len(asyncio.all_tasks())
        yield GaugeMetricFamily("kvscout_tasks", "Tasks of the event loop that have not ended", value=count)


def register_process_metrics(registry: CollectorRegistry) -> None:
    """Adds the samples that all services have alike: `process_*` as Prometheus' clients name them, and tasks.

    Args:
        registry: Read on the event loop.
    """
    ProcessCollector(registry=registry)
    registry.register(_Tasks())
