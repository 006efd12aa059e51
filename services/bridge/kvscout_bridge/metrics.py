"""The bridge's Prometheus metrics, read from the core when they are scraped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout_bridge.bridge import Bridge
from kvscout_bridge.rank import BridgedRank
from kvscout_common.worker import ALL_TENANTS

_SOURCE = ["tenant", "model", "worker", "dp_rank"]
_COUNTERS: dict[str, tuple[str, Callable[[BridgedRank], float]]] = {
    "kvscout_bridge_published_batches": ("Batches that NATS has", lambda rank: rank.publication.published),
    "kvscout_bridge_dropped_batches": (
        "Batches not sent because too many waited; a state stands for them",
        lambda rank: rank.publication.dropped,
    ),
    "kvscout_bridge_oversized_batches": (
        "Batches too large for a message; a state stands for them",
        lambda rank: rank.publication.oversized,
    ),
    "kvscout_bridge_states": ("States sent", lambda rank: rank.publication.states),
}
_GAUGES: dict[str, tuple[str, Callable[[BridgedRank], float]]] = {
    "kvscout_bridge_waiting_batches": ("Batches that NATS has not confirmed", lambda rank: rank.publication.waiting),
    "kvscout_bridge_history_incomplete": (
        "1 = events of the engine are missing",
        lambda rank: rank.source.sequence.history_incomplete,
    ),
}
_EVENT_KINDS = ("applied", "gaps", "replays", "demotions", "restarts", "malformed")


class BridgeCollector(Collector):
    """Turns state into samples."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        ranks = list(self._bridge.ranks(ALL_TENANTS))
        for name, (help_text, read) in _COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=_SOURCE)
            for rank in ranks:
                counter.add_metric(_labels(rank), read(rank))
            yield counter
        for name, (help_text, read) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=_SOURCE)
            for rank in ranks:
                gauge.add_metric(_labels(rank), read(rank))
            yield gauge
        events = CounterMetricFamily(
            "kvscout_events", "Event batches, by what became of them", labels=[*_SOURCE, "kind"]
        )
        ignored = CounterMetricFamily(
            "kvscout_bridge_ignored", "What an engine said that is not indexed, by reason", labels=[*_SOURCE, "reason"]
        )
        blocks = GaugeMetricFamily("kvscout_bridge_blocks", "Blocks in the local index", labels=_SOURCE)
        age = GaugeMetricFamily("kvscout_event_age_seconds", "Seconds since the last batch", labels=_SOURCE)
        now = time.monotonic()
        for rank in ranks:
            for kind in _EVENT_KINDS:
                events.add_metric([*_labels(rank), kind], rank.source.sequence.counters[kind])
            stats = rank.index.worker_stats(rank.rank)
            if stats is not None:
                blocks.add_metric(_labels(rank), stats.blocks)
                for reason, count in stats.ignored.items():
                    ignored.add_metric([*_labels(rank), str(reason)], count)
            if rank.source.received_at is not None:
                age.add_metric(_labels(rank), now - rank.source.received_at)
        yield from (events, ignored, blocks, age)
        yield GaugeMetricFamily("kvscout_nats_connected", "1 = connected to NATS", value=self._bridge.link.connected)
        yield GaugeMetricFamily(
            "kvscout_bridge_buffered_bytes", "Bytes that wait for NATS", value=self._bridge.outbox.buffered_bytes
        )


def _labels(rank: BridgedRank) -> list[str]:
    return [rank.spec.tenant, rank.spec.model, rank.rank.worker_id, str(rank.rank.dp_rank)]
