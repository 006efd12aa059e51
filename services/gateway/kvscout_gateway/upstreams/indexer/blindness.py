"""Worker ranks from which an indexer receives no events though they serve requests. Pure.

An indexer cannot distinguish an idle worker from one whose KV events are off or go elsewhere: neither sends any.
The gateway knows which ones served, and reports to the indexer those that should have sent events: their requests were
dispatched when it was already listening, they computed what engines publish, and their events had the time from one
report to the next to arrive. That one decides, and shows such sources as BLIND.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvscout.v1 import indexer_pb2, workers_pb2
from kvscout_common.worker import WorkerRank

Served: TypeAlias = Callable[[tuple[str, WorkerRank]], Iterable[float]]
"""Gives by tenant and worker rank when it was sent the requests that should have brought events, in seconds."""

_SILENT = (indexer_pb2.SOURCE_STATE_WAITING, indexer_pb2.SOURCE_STATE_INCOMPLETE)
"""States of a source from which nothing ever came, if it has no last event: over NATS, one that leaves requests for
what was lost unanswered is INCOMPLETE."""


def _is_silent(source: indexer_pb2.SourceStatus) -> bool:
    """Return whether nothing ever came from a source, and only its engine can be the cause."""
    if source.HasField("last_event_id") or not source.HasField("open_seconds"):
        return False
    # An engine whose events are off does not even open its socket; over NATS it is NATS that is away.
    unanswered = source.state == indexer_pb2.SOURCE_STATE_DISCONNECTED
    return source.state in _SILENT or (unanswered and source.transport == workers_pb2.EVENT_TRANSPORT_ZMQ)


class BlindRanks:
    """Blind worker ranks of one indexer."""

    def __init__(self, served: Served) -> None:
        self._served_at = served
        self._served: dict[tuple[str, WorkerRank], tuple[float, ...]] = {}
        """When the silent ranks had been sent requests, at the last reading."""
        self.blind: dict[tuple[str, WorkerRank], str] = {}
        """Why the indexer showed a worker rank as BLIND then, by tenant and rank."""

    def judge(self, sources: Iterable[indexer_pb2.SourceStatus], now: float) -> list[indexer_pb2.RecordRoutingRequest]:
        """Compare a status; return what is to be reported to the indexer, one message a tenant and model.

        Args:
            sources: The indexer's.
            now: Seconds, on the clock of the observations.
        """
        served_before, self._served, self.blind = self._served, {}, {}
        messages: dict[tuple[str, str], indexer_pb2.RecordRoutingRequest] = {}
        for source in sources:
            key = source.tenant, WorkerRank(source.worker.worker_id, source.worker.dp_rank)
            if source.state == indexer_pb2.SOURCE_STATE_BLIND:
                self.blind[key] = source.reason
            if not _is_silent(source):
                continue
            # What was served before the indexer listened (it may have restarted) says nothing.
            opened_at = now - source.open_seconds
            unreported = sum(dispatched_at > opened_at for dispatched_at in served_before.get(key, ()))
            if unreported:
                report = messages.setdefault(
                    (source.tenant, source.model),
                    indexer_pb2.RecordRoutingRequest(tenant=source.tenant, model=source.model),
                )
                report.prompts.extend([indexer_pb2.RoutedPrompt(worker=source.worker)] * unreported)
            self._served[key] = tuple(self._served_at(key))
        return list(messages.values())
