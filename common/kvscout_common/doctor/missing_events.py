"""Events that a worker rank should have sent: requests that it ran, and of whose blocks nothing was announced. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvscout.v1 import indexer_pb2

EVENTS_WITHIN_SECONDS: Final = 2.0
"""An event that takes longer from its engine to the indexer does not come."""
MISSING_REQUESTS: Final = 2
"""Requests from which on an engine is at fault whose events came before: the batch of one may have been lost."""
_READ = (indexer_pb2.SOURCE_STATE_LIVE, indexer_pb2.SOURCE_STATE_INCOMPLETE)


def silence(source: indexer_pb2.SourceStatus, dispatched_ages: Iterable[float], *, reports: bool) -> str:
    """Return what says that events are missing which had the time to arrive, as a part of a sentence; "" = nothing.

    Args:
        source: The events of a worker rank at one indexer.
        dispatched_ages: Seconds since requests were sent to the rank that ran to their end and computed a block.
        reports: The engine reports cached prompt tokens: it is known that a block was computed, not repeated.
    """
    if not source.HasField("open_seconds"):
        return ""
    never = source.state == indexer_pb2.SOURCE_STATE_WAITING and not source.HasField("last_event_id")
    stopped = reports and source.state in _READ and source.HasField("last_event_age_seconds")
    if not (never or stopped):
        return ""
    since = source.open_seconds if never else min(source.last_event_age_seconds, source.open_seconds)
    count = sum(EVENTS_WITHIN_SECONDS < age < since for age in dispatched_ages)
    requests = "1 request" if count == 1 else f"{count} requests"
    if never and count:
        return f"ran {requests}, and no KV event ever came from {source.endpoint or 'it'}"
    if count >= MISSING_REQUESTS:
        return f"ran {requests} since its last KV event {since:.0f} s ago, and announced none of their blocks"
    return ""
