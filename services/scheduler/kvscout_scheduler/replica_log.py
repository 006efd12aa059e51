"""What this replica owns, and what it has still to tell of it.

Invariants
1. `claims` follows from the events with sequence 1 .. `sequence`: whoever applies those has the same claims.
2. `digest` is that of the claims.
3. Pending events are the last ones, up to `sequence`; taking them empties them, whether they arrive or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvscout.v1 import replication_pb2
from kvscout_scheduler.replica_claim import Claim, ClaimSet, ClaimState, claim_to_proto, name_to_proto, owner_to_proto
from kvscout_scheduler.request import OwnerName, RequestKey

MAX_BATCH_EVENTS = 256
MAX_BATCH_BYTES = 512 * 1024

_EVENT_BYTES = 160
"""About those of an event without hashes."""


class ReplicaLog:
    """The claims of this replica and the events that made them."""

    def __init__(self) -> None:
        self.sequence = 0
        self._claims = ClaimSet()
        self.on_pending: Callable[[], None] | None = None
        """Called when there is something to send."""
        self._pending: list[tuple[replication_pb2.ReplicaEvent, int]] = []
        """Events and about their sizes."""

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def claims(self) -> Mapping[RequestKey, Claim]:
        """What this replica claims."""
        return self._claims.by_key

    @property
    def digest(self) -> int:
        """Of the claims."""
        return self._claims.digest

    def put(self, claim: Claim) -> None:
        """Adds or replaces a claim with all that belongs to it."""
        self._claims.put(claim)
        self._tell(replication_pb2.ReplicaEvent(add_request=claim_to_proto(claim)), claim.size())

    def complete_prefill(self, key: RequestKey) -> None:
        """The first token of a claimed request is out."""
        claim = self.claims[key]._replace(state=ClaimState.DECODE)
        self._claims.put(claim)
        event = replication_pb2.PrefillCompletedEvent(request=name_to_proto(claim))
        self._tell(replication_pb2.ReplicaEvent(mark_prefill_completed=event))

    def set_output(self, key: RequestKey, output_blocks: int) -> None:
        """A claimed request has more output; blocks in all."""
        claim = self.claims[key]._replace(output_blocks=output_blocks)
        self._claims.put(claim)
        event = replication_pb2.OutputAddedEvent(request=name_to_proto(claim), output_blocks=output_blocks)
        self._tell(replication_pb2.ReplicaEvent(add_output=event))

    def hold(self, key: RequestKey, owner: OwnerName | None, lease_seconds: float) -> None:
        """A claimed request is held by another owner or for another time; nothing to tell if it is not."""
        claim = self.claims[key]
        if (claim.owner, claim.lease_seconds) == (owner, lease_seconds):
            return
        claim = claim._replace(owner=owner, lease_seconds=lease_seconds)
        self._claims.put(claim)
        event = replication_pb2.RenewedEvent(
            request=name_to_proto(claim), lease_seconds=lease_seconds, **owner_to_proto(owner)
        )
        self._tell(replication_pb2.ReplicaEvent(renew=event))

    def drop(self, key: RequestKey, *, by_caller: bool = False) -> None:
        """Gives a claim up."""
        claim = self._claims.pop(key)
        event = replication_pb2.FreedEvent(request=name_to_proto(claim), by_caller=by_caller)
        self._tell(replication_pb2.ReplicaEvent(free=event))

    def tell_thresholds(self, event: replication_pb2.ThresholdsEvent) -> None:
        """Thresholds of a model were changed here."""
        self._tell(replication_pb2.ReplicaEvent(thresholds=event))

    def tell_cool_down(self, event: replication_pb2.CoolDownEvent) -> None:
        """A worker was left out here."""
        self._tell(replication_pb2.ReplicaEvent(cool_down=event))

    def take(self, sent_at: int) -> list[replication_pb2.EventBatch]:
        """The pending events, in batches of the allowed size.

        Args:
            sent_at: Now, microseconds since the Unix epoch.
        """
        batches: list[replication_pb2.EventBatch] = []
        sequence = self.sequence - len(self._pending)
        batch, size = None, 0
        for event, bytes_ in self._pending:
            sequence += 1
            if batch is None or len(batch.events) == MAX_BATCH_EVENTS or size + bytes_ > MAX_BATCH_BYTES:
                batch, size = replication_pb2.EventBatch(first_sequence=sequence, sent_at=sent_at), 0
                batches.append(batch)
            batch.events.append(event)
            size += bytes_
        self._pending.clear()
        return batches

    def check_invariants(self) -> None:
        """Raises AssertionError if the digest is not that of the claims."""
        self._claims.check_invariants()

    def _tell(self, event: replication_pb2.ReplicaEvent, size: int = _EVENT_BYTES) -> None:
        self.sequence += 1
        self._pending.append((event, size))
        if self.on_pending is not None and len(self._pending) == 1:
            self.on_pending()
