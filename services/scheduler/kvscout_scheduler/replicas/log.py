"""Log of this replica: its claims, and the events that are still to be sent.

Invariants
1. `claims` follows from the events with sequence 1 .. `sequence`: whoever applies those has the same claims.
2. Pending events are the last ones, up to `sequence`; taking them empties them, whether they arrive or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

from kvscout.v1 import replication_pb2
from kvscout_scheduler.replicas.claim import Claim, ClaimSet, ClaimState, claim_to_proto, name_to_proto, owner_to_proto
from kvscout_scheduler.values.reservation import RequestKey

MAX_BATCH_EVENTS = 256
MAX_BATCH_BYTES = 512 * 1024

T = TypeVar("T")

_EVENT_BYTES = 160
"""About those of an event without hashes."""


class ReplicaLog:
    """The claims of this replica and the events that made them."""

    def __init__(self) -> None:
        self.sequence = 0
        self.claims = ClaimSet()
        """Claims of this replica."""
        self.on_pending: Callable[[], None] | None = None
        """Called when there is something to send."""
        self._pending: list[tuple[replication_pb2.ReplicaEvent, int]] = []
        """Events and about their sizes."""

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, claim: Claim, *, known: bool = False) -> None:
        """Add or replace a claim; of one that differs in one field, only that field is sent.

        Args:
            claim: The claim.
            known: Whether others have its hashes, from another claim: they are not sent again.
        """
        change = _change(self.claims.get(claim.key), claim)
        if change is not None:
            self.claims.put(claim)
            self.send(change)
        else:
            self.claims.put(claim, sent_sequence=self.sequence + 1)
            event = replication_pb2.ReplicaEvent(add_request=claim_to_proto(claim, known=known))
            self.send(event, claim.size(known=known))

    def drop(self, key: RequestKey, *, by_caller: bool = False) -> None:
        """Drop a claim."""
        claim = self.claims.drop(key)
        event = replication_pb2.FreedEvent(request=name_to_proto(claim), by_caller=by_caller)
        self.send(replication_pb2.ReplicaEvent(free=event))

    def send(self, event: replication_pb2.ReplicaEvent, size: int = _EVENT_BYTES) -> None:
        """Queue an event for the others.

        Args:
            event: What happened here.
            size: About its bytes.
        """
        self.sequence += 1
        self._pending.append((event, size))
        if self.on_pending is not None and len(self._pending) == 1:
            self.on_pending()

    def take(self, sent_at: int) -> list[replication_pb2.EventBatch]:
        """Return the pending events, in batches of the allowed size.

        Args:
            sent_at: Now, microseconds since the Unix epoch.
        """
        pending, self._pending = self._pending, []
        before, start, batches = self.sequence - len(pending), 0, []
        while start < len(pending):
            end = end_of_batch(pending, itemgetter(1), start)
            events = [event for event, _ in pending[start:end]]
            batches.append(
                replication_pb2.EventBatch(first_sequence=before + start + 1, sent_at=sent_at, events=events)
            )
            start = end
        return batches


def _change(before: Claim | None, claim: Claim) -> replication_pb2.ReplicaEvent | None:
    """Return the event for the one field in which a claim differs from before; None = the whole claim is sent."""
    if before is None or before == claim:
        return None
    request = name_to_proto(claim)
    if claim == before._replace(state=ClaimState.DECODE):
        completed = replication_pb2.PrefillCompletedEvent(request=request)
        return replication_pb2.ReplicaEvent(mark_prefill_completed=completed)
    if claim == before._replace(output_blocks=claim.output_blocks):
        output = replication_pb2.OutputAddedEvent(request=request, output_blocks=claim.output_blocks)
        return replication_pb2.ReplicaEvent(add_output=output)
    if claim == before._replace(lease_seconds=claim.lease_seconds):
        owner, seconds = owner_to_proto(claim.owner), claim.lease_seconds
        return replication_pb2.ReplicaEvent(
            renew=replication_pb2.RenewedEvent(request=request, lease_seconds=seconds, **owner)
        )
    return None


def end_of_batch(items: Sequence[T], size: Callable[[T], int], start: int) -> int:
    """Return the end of the items from a place on that fill a message, one at least if there is any.

    Args:
        items: All of them.
        size: About the bytes of one.
        start: The first one.
    """
    end, bytes_ = start, 0
    while end < len(items) and end - start < MAX_BATCH_EVENTS:
        bytes_ += size(items[end])
        if bytes_ > MAX_BATCH_BYTES and end > start:
            break
        end += 1
    return end
