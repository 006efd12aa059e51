"""Worker ranks from which an indexer receives no events though they serve requests. Pure.

An indexer cannot distinguish an idle worker from one whose KV events are off or go elsewhere: neither sends any.
The gateway knows which ones served, and reports to the indexer those that should have sent events: their requests were
dispatched when it was already listening, they computed what engines publish, and their events had the time from one
report to the next to arrive. That one decides, and shows such sources as BLIND.

Before that, and where events came once and have stopped, the gateway itself says what is missing (`silence`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from kvscout.v1 import indexer_pb2, workers_pb2
from kvscout_common.doctor.missing_events import silence
from kvscout_common.worker import WorkerRank

Served: TypeAlias = Callable[[tuple[str, WorkerRank]], Iterable[float]]
"""Gives by tenant and worker rank when it was sent the requests that should have brought events, in seconds."""

Reports: TypeAlias = Callable[[str, str], bool]
"""Tells of a tenant and worker id whether the worker reports cached prompt tokens."""

BLIND_SECONDS = 30.0
"""Age of a request from which on it is reported: whoever is BLIND was given the time."""
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
    """Worker ranks from which one indexer receives no events.

    Args:
        served: Gives when a worker rank was sent requests that should have brought events.
        reports: Tells whether a worker reports the prompt tokens that it had cached: of one that does not, repeated
            prompts may compute nothing.
    """

    def __init__(self, served: Served, reports: Reports) -> None:
        self._served_at = served
        self._reports = reports
        self._served: dict[tuple[str, WorkerRank], tuple[float, ...]] = {}
        """When the silent ranks had been sent requests, at the last reading."""
        self.blind: dict[tuple[str, WorkerRank], str] = {}
        """Why the indexer showed a worker rank as BLIND then, by tenant and rank."""
        self.missing: dict[tuple[str, WorkerRank], str] = {}
        """What says that events of a worker rank are missing which it is not BLIND for, by tenant and rank."""

    @property
    def no_events(self) -> dict[tuple[str, WorkerRank], str]:
        """Return the worker ranks whose events are missing, and what says so, as a part of a sentence."""
        return {**{rank: f"is blind: {reason}" for rank, reason in self.blind.items()}, **self.missing}

    def judge(self, sources: Iterable[indexer_pb2.SourceStatus], now: float) -> list[indexer_pb2.RecordRoutingRequest]:
        """Compare a status; return what is to be reported to the indexer, one message a tenant and model.

        Args:
            sources: The indexer's.
            now: Seconds, on the clock of the observations.
        """
        served_before, self._served, self.blind, self.missing = self._served, {}, {}, {}
        messages: dict[tuple[str, str], indexer_pb2.RecordRoutingRequest] = {}
        for source in sources:
            key = source.tenant, WorkerRank(source.worker.worker_id, source.worker.dp_rank)
            if source.state == indexer_pb2.SOURCE_STATE_BLIND:
                self.blind[key] = source.reason
            ages = (now - dispatched_at for dispatched_at in self._served_at(key))
            if missing := silence(source, ages, reports=self._reports(key[0], key[1].worker_id)):
                self.missing[key] = missing
            if not _is_silent(source):
                continue
            # What was served before the indexer listened (it may have restarted) says nothing.
            opened_at = now - source.open_seconds
            due = served_before.get(key, ())
            unreported = sum(opened_at < dispatched_at <= now - BLIND_SECONDS for dispatched_at in due)
            if unreported:
                report = messages.setdefault(
                    (source.tenant, source.model),
                    indexer_pb2.RecordRoutingRequest(tenant=source.tenant, model=source.model),
                )
                report.prompts.extend([indexer_pb2.RoutedPrompt(worker=source.worker)] * unreported)
            self._served[key] = tuple(self._served_at(key))
        return list(messages.values())
