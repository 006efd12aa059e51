"""Worker ranks of which an indexer hears nothing though they serve requests. Pure.

An indexer cannot tell a worker that idles from one whose KV events are off, or go elsewhere: no event comes of either.
The gateway knows which ones served, and tells the indexer of those that have no excuse left: their requests were
dispatched when it was already listening, they computed what engines publish, and their events had the time from one
question to the next to arrive. That one decides, and shows such sources as BLIND.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvscout.v1 import indexer_pb2, workers_pb2
from kvscout_common.worker import WorkerRank
from kvscout_gateway.engines.observation import Observations

_SILENT = (indexer_pb2.SOURCE_STATE_WAITING, indexer_pb2.SOURCE_STATE_INCOMPLETE)
"""States of a source from which nothing ever came, if it has no last event: over NATS, one that leaves requests for
what was lost unanswered is INCOMPLETE."""


def _is_silent(source: indexer_pb2.SourceStatus) -> bool:
    """Whether nothing ever came from a source, and nothing else than its engine is to blame."""
    if source.HasField("last_event_id") or not source.HasField("open_seconds"):
        return False
    # An engine whose events are off does not even open its socket; over NATS it is NATS that is away.
    unanswered = source.state == indexer_pb2.SOURCE_STATE_DISCONNECTED
    return source.state in _SILENT or (unanswered and source.transport == workers_pb2.EVENT_TRANSPORT_ZMQ)


class BlindRanks:
    """Of one indexer."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        self._served: dict[tuple[str, WorkerRank], tuple[float, ...]] = {}
        """What the silent ranks had served at the last question, see `Observation.eventful`."""
        self.blind: dict[tuple[str, WorkerRank], str] = {}
        """What the indexer showed as BLIND then, by tenant and worker rank, and why."""

    def judge(self, sources: Iterable[indexer_pb2.SourceStatus], now: float) -> list[indexer_pb2.RecordRoutingRequest]:
        """Takes the answer to a question; returns what the indexer is to be told, one message a tenant and model.

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
                tell = messages.setdefault(
                    (source.tenant, source.model),
                    indexer_pb2.RecordRoutingRequest(tenant=source.tenant, model=source.model),
                )
                tell.prompts.extend([indexer_pb2.RoutedPrompt(worker=source.worker)] * unreported)
            seen = self._observations.by_rank.get(key)
            if seen is not None:
                self._served[key] = tuple(seen.eventful)
        return list(messages.values())
