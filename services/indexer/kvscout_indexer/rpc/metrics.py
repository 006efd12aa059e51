"""The indexer's Prometheus metrics, read from the core when they are scraped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout.v1 import indexer_pb2
from kvscout_common.worker import ALL_TENANTS
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.status import index_status, source_status

if TYPE_CHECKING:
    from kvscout_indexer.feeds.nats_core import NatsCore
    from kvscout_indexer.streams.jetstream import JetStream
    from kvscout_indexer.streams.reader import StreamReader

_POOL = ["tenant", "model", "block_size"]
_SOURCE = ["tenant", "model", "worker", "dp_rank"]
_STATE = ["tenant", "model", "state"]
_INDEX_GAUGES = {
    "kvscout_index_blocks": ("blocks", "Distinct prefix blocks"),
    "kvscout_index_memberships": ("memberships", "(block, worker rank) pairs"),
    "kvscout_index_bytes": ("bytes", "Memory of the index"),
    "kvscout_index_orphans": ("orphans", "Stored blocks whose parent is unknown"),
    "kvscout_index_hidden": ("hidden", "Blocks held below a hole"),
    "kvscout_index_predictions": ("predictions", "Predicted (block, worker rank) pairs"),
}
_EVENT_KINDS = ("applied", "dropped", "gaps", "replays", "demotions", "resets", "malformed", "states")
_STREAM = ["tenant", "model"]
_GAUGES: dict[str, tuple[str, Callable[[StreamReader], float]]] = {
    "kvscout_stream_position": ("Last stream sequence that the state contains", lambda reader: reader.position),
    "kvscout_stream_lag_messages": ("Messages of the stream that were not read yet", lambda reader: reader.lag),
    "kvscout_stream_uncovered_messages": (
        "Messages read that are in no snapshot",
        lambda reader: max(0, reader.position - reader.schedule.covered),
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[StreamReader], float]]] = {
    "kvscout_stream_reloads": ("Times that the stream no longer had what comes next", lambda reader: reader.reloads),
    "kvscout_stream_ignored_messages": (
        "Messages of workers of another shard, or not registered",
        lambda reader: reader.sources.ignored,
    ),
}


def _core_metrics(core: NatsCore) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "kvscout_events_unregistered", "Messages on NATS core of sources that are not registered",
        value=core.unknown_messages,
    )  # fmt: skip
    yield CounterMetricFamily(
        "kvscout_events_slow_consumer", "Messages on NATS core dropped because they were read too slowly",
        value=core.dropped_messages,
    )  # fmt: skip


def _stream_metrics(jetstream: JetStream) -> Iterator[Metric]:
    """Return the current samples."""
    readers = sorted(jetstream.readers.items())
    for name, (text, read) in _GAUGES.items():
        gauge = GaugeMetricFamily(name, text, labels=_STREAM)
        for key, reader in readers:
            gauge.add_metric(list(key), read(reader))
        yield gauge
    for name, (text, read) in _COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=_STREAM)
        for key, reader in readers:
            counter.add_metric(list(key), read(reader))
        yield counter
    snapshots = CounterMetricFamily("kvscout_stream_snapshots", "Snapshots by this replica", labels=[*_STREAM, "kind"])
    for key, snapshotter in sorted(jetstream.snapshotters.items()):
        snapshots.add_metric([*key, "taken"], snapshotter.taken)
        snapshots.add_metric([*key, "failed"], snapshotter.failed)
    yield snapshots


class IndexerCollector(Collector):
    """Turns status into samples."""

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer

    def collect(self) -> Iterator[Metric]:
        """Return the current samples."""
        statuses = [index_status(key, index) for key, index in self._indexer.pools.by_key()]
        for name, (field, help_text) in _INDEX_GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=_POOL)
            for status in statuses:
                gauge.add_metric([status.tenant, status.model, str(status.block_size)], getattr(status, field))
            yield gauge
        events = CounterMetricFamily(
            "kvscout_events", "Event batches, by what became of them", labels=[*_SOURCE, "kind"]
        )
        age = GaugeMetricFamily("kvscout_event_age_seconds", "Seconds since the last batch", labels=_SOURCE)
        lag = GaugeMetricFamily("kvscout_event_lag_batches", "Batches received but not applied", labels=_SOURCE)
        state = GaugeMetricFamily("kvscout_source_live", "1 = up to date, 0 = see GetStatus", labels=_SOURCE)
        blind = GaugeMetricFamily(
            "kvscout_source_blind", "1 = requests were served and no event ever came", labels=_SOURCE
        )
        sources = GaugeMetricFamily("kvscout_sources", "Worker ranks, by the state of their events", labels=_STATE)
        counted: Counter[tuple[str, str, indexer_pb2.SourceState.ValueType]] = Counter()
        now = time.monotonic()
        for spec, rank, source in self._indexer.sources(ALL_TENANTS):
            stats = self._indexer.pools.of(spec).worker_stats(rank)
            if stats is None:
                continue
            seen = source_status(spec, rank, source, stats, now, unread=self._indexer.unread(spec))
            labels = [spec.tenant, spec.model, rank.worker_id, str(rank.dp_rank)]
            for kind in _EVENT_KINDS:
                events.add_metric([*labels, kind], getattr(seen, kind))
            if seen.HasField("last_event_age_seconds"):
                age.add_metric(labels, seen.last_event_age_seconds)
            lag.add_metric(labels, seen.lag_batches)
            state.add_metric(labels, float(not seen.reason))
            blind.add_metric(labels, float(seen.state == indexer_pb2.SOURCE_STATE_BLIND))
            counted[spec.tenant, spec.model, seen.state] += 1
        for (tenant, model, value), number in counted.items():
            name = indexer_pb2.SourceState.Name(value).removeprefix("SOURCE_STATE_").lower()
            sources.add_metric([tenant, model, name], number)
        yield from (events, age, lag, state, blind, sources)
        if self._indexer.nats_core is not None:
            yield from _core_metrics(self._indexer.nats_core)
        peers = CounterMetricFamily(
            "kvscout_peer_searches", "Workers whose state was requested from peers", labels=["result"]
        )
        peers.add_metric(["found"], self._indexer.peers.found)
        peers.add_metric(["not_found"], self._indexer.peers.not_found)
        yield peers
        if self._indexer.jetstream is not None:
            yield from _stream_metrics(self._indexer.jetstream)
        routed = CounterMetricFamily(
            "kvscout_routed_prompts", "Prompts reported as routed, by what became of them", labels=["outcome"]
        )
        routed.add_metric(["recorded"], self._indexer.routed.recorded)
        routed.add_metric(["refused"], self._indexer.routed.refused)
        yield routed
