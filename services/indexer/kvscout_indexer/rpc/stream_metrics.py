"""The Prometheus metrics of the streams that this replica reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from kvscout_indexer.streams.jetstream import JetStream
    from kvscout_indexer.streams.reader import StreamReader

_STREAM = ["tenant", "model"]
_GAUGES: dict[str, tuple[str, Callable[[StreamReader], float]]] = {
    "kvscout_stream_position": ("Last stream sequence that the state contains", lambda reader: reader.position),
    "kvscout_stream_lag_messages": ("Messages of the stream that were not read yet", lambda reader: reader.lag),
    "kvscout_stream_uncovered_messages": (
        "Messages read that are in no snapshot",
        lambda reader: max(0, reader.position - reader.schedule.covered),
    ),
    "kvscout_stream_parked_bytes": (
        "Kept of sources that nobody registered",
        lambda reader: reader.sources.partitions.parked_bytes,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[StreamReader], float]]] = {
    "kvscout_stream_reloads": ("Times that the stream no longer had what comes next", lambda reader: reader.reloads),
    "kvscout_stream_ignored_messages": ("Of another shard, or of nobody", lambda reader: reader.sources.ignored),
    "kvscout_stream_forgotten_sources": (
        "Unregistered sources that became too large to be kept",
        lambda reader: reader.sources.partitions.forgotten,
    ),
}


def stream_metrics(jetstream: JetStream) -> Iterator[Metric]:
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
