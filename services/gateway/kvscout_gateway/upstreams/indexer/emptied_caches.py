"""Worker ranks whose engines emptied their caches without an event, as one indexer sees them. Pure.

The gateway knows what engines report as cached (`values/cache_reports.py`), and reads each indexer's position in a
rank's events with its status. A suspect rank is reported with the prompts that missed, and with the last event that
the indexer had applied before the first of them was sent. The indexer compares its events, and fences the rank. From
then on the reports show whether the fence is right: it ends when `LATEST` requests in a row had no more cached than
later events announced, and is wrong when `SURPRISES` of them had more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvscout.v1 import indexer_pb2
from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.cache_reports import LATEST, SURPRISES, CacheReports, Key, RankReports

READINGS = 32
"""Positions of a rank that are remembered: a minute at least."""
TRIES = 3
"""Reports of a suspect rank that the indexer does not fence: its events say otherwise."""


class EmptiedCaches:
    """Suspect and fenced ranks of one indexer.

    Args:
        reports: What the engines report.
    """

    def __init__(self, reports: CacheReports) -> None:
        self._reports = reports
        self._positions: dict[Key, deque[tuple[float, int]]] = {}
        """When the position of a rank was read, and its last event."""
        self._tries: dict[Key, int] = {}
        self._fenced_since: dict[Key, float] = {}

    def judge(self, sources: Iterable[indexer_pb2.SourceStatus], now: float) -> list[indexer_pb2.RecordRoutingRequest]:
        """Compare a status; return what is to be reported to the indexer, one message a worker rank.

        Args:
            sources: The indexer's.
            now: Seconds, on the clock of the reports.
        """
        messages: list[indexer_pb2.RecordRoutingRequest] = []
        positions, self._positions = self._positions, {}
        for source in sources:
            key = source.tenant, WorkerRank(source.worker.worker_id, source.worker.dp_rank)
            reports = self._reports.get(key)
            if reports is None:
                continue
            if source.HasField("last_event_id"):
                known = self._positions[key] = positions.get(key, deque(maxlen=READINGS))
                known.append((now, source.last_event_id))
            prompts = self._verdict(key, reports, now) if source.fenced else self._suspicion(key, source, reports)
            if prompts:
                messages.append(
                    indexer_pb2.RecordRoutingRequest(tenant=source.tenant, model=source.model, prompts=prompts)
                )
        return messages

    def _suspicion(
        self, key: Key, source: indexer_pb2.SourceStatus, reports: RankReports
    ) -> list[indexer_pb2.RoutedPrompt]:
        self._fenced_since.pop(key, None)
        if not reports.is_suspect or source.state != indexer_pb2.SOURCE_STATE_LIVE or key not in self._positions:
            self._tries.pop(key, None)
            return []
        self._tries[key] = self._tries.get(key, 0) + 1
        if self._tries[key] > TRIES:
            reports.forgive()
            return []
        known = self._positions[key]
        # Of the oldest that is known, if the rank has not been right for long.
        intact = [event_id for read_at, event_id in known if read_at <= reports.intact_at] or [known[0][1]]
        return [
            indexer_pb2.RoutedPrompt(
                worker=source.worker,
                block_hashes=memoryview(miss.block_hashes).cast("Q"),
                block_size=miss.block_size,
                eagle=miss.eagle,
                evidence=indexer_pb2.CacheEvidence(
                    finding=indexer_pb2.CACHE_FINDING_EMPTIED,
                    cached_blocks=miss.cached_blocks,
                    intact_event_id=intact[-1],
                ),
            )
            for miss in reports.misses
        ]

    def _verdict(self, key: Key, reports: RankReports, now: float) -> list[indexer_pb2.RoutedPrompt]:
        self._tries.pop(key, None)
        self._fenced_since.setdefault(key, now)
        checked, surprises = reports.since(self._fenced_since[key])
        if surprises >= SURPRISES:
            finding = indexer_pb2.CACHE_FINDING_KEPT
        elif checked >= LATEST and not surprises:
            finding = indexer_pb2.CACHE_FINDING_AGREES
        else:
            return []
        worker = indexer_pb2.RoutedPrompt().worker
        worker.worker_id, worker.dp_rank = key[1]
        return [indexer_pb2.RoutedPrompt(worker=worker, evidence=indexer_pb2.CacheEvidence(finding=finding))]
