"""The indexer's Prometheus metrics, read from the core when they are scraped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout.v1 import indexer_pb2
from kvscout_blocks.source.held import HeldBudget
from kvscout_blocks.source.source import Observed, Source
from kvscout_common.observability.rank_series import PAUSE, RANKS_A_COLUMN, RankColumn, RankFamily
from kvscout_common.worker import ALL_TENANTS, WorkerRank, WorkerSpec
from kvscout_indexer.indexer import Indexer
from kvscout_indexer.rpc.status import RANKS_A_SLICE, index_status, source_state

if TYPE_CHECKING:
    from kvscout_indexer.feeds.nats_core import NatsCore
    from kvscout_indexer.streams.jetstream import JetStream
    from kvscout_indexer.streams.reader import StreamReader

_POOL = ["tenant", "model", "block_size"]
_STATE = ["tenant", "model", "state"]
_INDEX_GAUGES = {
    "kvscout_index_blocks": ("blocks", "Distinct prefix blocks"),
    "kvscout_index_memberships": ("memberships", "(block, worker rank) pairs"),
    "kvscout_index_bytes": ("bytes", "Memory of the index"),
    "kvscout_index_orphans": ("orphans", "Stored blocks whose parent is unknown"),
    "kvscout_index_hidden": ("hidden", "Blocks held below a hole"),
    "kvscout_index_predictions": ("predictions", "Predicted (block, worker rank) pairs"),
}
_EVENT_KINDS = ("applied", "dropped", "gaps", "replays", "demotions", "fences", "resets", "malformed", "states")
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


def _held_metrics(held: HeldBudget) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "kvscout_events_held_bytes", "Live batches that wait for replays, of all worker ranks", value=held.used
    )
    yield CounterMetricFamily(
        "kvscout_events_held_dropped", "Live batches dropped since too many waited, and requested again",
        value=held.dropped,
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


class _RankTable:
    """What is counted of worker ranks, by pool, in columns of at most `RANKS_A_COLUMN`."""

    def __init__(self) -> None:
        self.events = RankFamily("kvscout_events", "Event batches, by what became of them", "counter")
        self.age = RankFamily("kvscout_event_age_seconds", "Seconds since the last batch", "gauge")
        self.lag = RankFamily("kvscout_event_lag_batches", "Batches received but not applied", "gauge")
        self.live = RankFamily("kvscout_source_live", "1 = up to date, 0 = see GetStatus", "gauge")
        self.blind = RankFamily("kvscout_source_blind", "1 = requests were served and no event ever came", "gauge")
        self._open: dict[tuple[str, str], _Columns] = {}
        """By (tenant, model)."""

    def add(
        self,
        spec: WorkerSpec,
        rank: WorkerRank,
        source: Source | None,
        observed: Observed | None,
        state: int,
        now: float,
    ) -> None:
        """Add what is known of one rank."""
        columns = self._open.get((spec.tenant, spec.model))
        if columns is None or len(columns.ranks) >= RANKS_A_COLUMN:
            columns = self._open[spec.tenant, spec.model] = self._new_columns(spec.tenant, spec.model)
        columns.ranks.append(rank)
        columns.live.append(float(state == indexer_pb2.SOURCE_STATE_LIVE))
        columns.blind.append(float(state == indexer_pb2.SOURCE_STATE_BLIND))
        columns.lag.append(observed.sequence.held if observed is not None else 0)
        if observed is not None and observed.received_at is not None:
            columns.heard_ranks.append(rank)
            columns.age.append(max(0.0, now - observed.received_at))
        for kind, values in columns.events.items():
            values.append(_event_count(kind, source, observed))

    def _new_columns(self, tenant: str, model: str) -> _Columns:
        columns = _Columns([], [], [], [], [], [], {kind: [] for kind in _EVENT_KINDS})
        labels = {"tenant": tenant, "model": model}
        for family, ranks, values in (
            (self.age, columns.heard_ranks, columns.age),
            (self.lag, columns.ranks, columns.lag),
            (self.live, columns.ranks, columns.live),
            (self.blind, columns.ranks, columns.blind),
        ):
            family.columns.append(RankColumn(labels, ranks, values))
        for kind, counts in columns.events.items():
            self.events.columns.append(RankColumn({**labels, "kind": kind}, columns.ranks, counts))
        return columns


class _Columns(NamedTuple):
    """Those of one pool that are being filled."""

    ranks: list[WorkerRank]
    heard_ranks: list[WorkerRank]
    """Those of which a batch ever came."""
    age: list[float]
    lag: list[float]
    live: list[float]
    blind: list[float]
    events: dict[str, list[float]]
    """By kind."""


def _event_count(kind: str, source: Source | None, observed: Observed | None) -> float:
    """Return how many batches of a source became what a kind says."""
    if source is None or observed is None:
        return 0
    match kind:
        case "applied":
            return observed.applied
        case "dropped":
            return source.dropped
        case "resets":
            return source.resets
        case "malformed":
            return source.malformed
        case _:
            return observed.sequence.counters[kind]


class IndexerCollector(Collector):
    """Turns status into samples; of many worker ranks a slice at a time, see `PAUSE`."""

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
        shared = GaugeMetricFamily(
            "kvscout_shared_cache_blocks", "Blocks in a cache that workers share", labels=[*_POOL, "cache"]
        )
        for status in statuses:
            for cache in status.shared_caches:
                shared.add_metric([status.tenant, status.model, str(status.block_size), cache.name], cache.blocks)
        yield shared
        yield from self._sources()
        yield from _held_metrics(self._indexer.held)
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

    def _sources(self) -> Iterator[Metric]:
        table = _RankTable()
        sources = GaugeMetricFamily("kvscout_sources", "Worker ranks, by the state of their events", labels=_STATE)
        counted: Counter[tuple[str, str, indexer_pb2.SourceState.ValueType]] = Counter()
        for number, (spec, rank, source) in enumerate(self._indexer.sources(ALL_TENANTS), 1):
            if number % RANKS_A_SLICE == 0:
                yield PAUSE
            # What was removed since the last pause has no index, or is none of its workers.
            index = self._indexer.pools.get(spec.pool)
            observed = source.observed if source is not None else None
            stats = index.worker_stats(rank) if index is not None else None
            if stats is None:
                continue
            state, _ = source_state(spec, source, observed, stats, self._indexer.unread(spec))
            table.add(spec, rank, source, observed, state, time.monotonic())
            counted[spec.tenant, spec.model, state] += 1
        for (tenant, model, value), count in counted.items():
            name = indexer_pb2.SourceState.Name(value).removeprefix("SOURCE_STATE_").lower()
            sources.add_metric([tenant, model, name], count)
        yield from (table.events, table.age, table.lag, table.live, table.blind, sources)
