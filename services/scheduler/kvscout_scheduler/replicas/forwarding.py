"""Operations on requests that another replica owns: it carries them out, or they are taken over and carried out here.

::

    operation ──▶ ours, or nobody's ───────────────────────────────▶ here
              └─▶ another's ──request, 50 ms──▶ its owner ──result──▶ caller
                        └── silent, away, or no answer in time ──────▶ here: the booking is taken over first

Booking calls are not forwarded: a caller that books here has moved here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

import nats.errors
from google.protobuf.message import DecodeError

from kvscout.v1 import replication_pb2
from kvscout_common.errors import KvscoutError
from kvscout_scheduler.messages.operation_messages import (
    operation_to_proto,
    outcome_from_proto,
    result_to_proto,
    streamed_from_proto,
)
from kvscout_scheduler.values.operations import (
    AddOutput,
    CompletePrefill,
    Free,
    Operation,
    Outcome,
    Renew,
    Reserve,
    Select,
)
from kvscout_scheduler.values.reservation import FreeOutcome, Phase, RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.replicas.ownership import Ownership
    from kvscout_scheduler.scheduler import Scheduler

FORWARD_SECONDS = 0.05
MAX_FORWARDS = 1_024
"""Under way; beyond them requests are taken over immediately."""
HOPS = 2
"""Replicas to forward to: the owner we know, and the one that took over from it meanwhile."""

Post = Callable[[str, replication_pb2.ForwardedOperation, float], Awaitable[bytes]]


class _Progress(NamedTuple):
    """Progress of a request."""

    phase: Phase = Phase.QUEUED
    output_blocks: int = 0


class Forwarding:
    """Forwarding of operations to the owners of requests.

    Args:
        scheduler: Carries out what is not forwarded.
        ownership: Owners of requests.
        live: Return whether a replica can be expected to answer.
        post: Carries a request to a replica and its answer back; raises `nats.errors.Error`.
    """

    def __init__(self, scheduler: Scheduler, ownership: Ownership, live: Callable[[str], bool], post: Post) -> None:
        self.forwarded = 0
        """Operations that their owners carried out."""
        self.unanswered = 0
        """Operations that an owner did not answer in time."""
        self._scheduler = scheduler
        self._ownership = ownership
        self._live = live
        self._post = post
        self._under_way = 0

    def concerns(self, operation: Operation) -> bool:
        """Return whether an operation is on a request of another replica."""
        return any(map(self._away, _booked(operation)))

    async def carry_out(self, operation: Operation) -> Outcome:
        """Carry out an operation that `concerns` accepts at the owner of the booking, else here."""
        if not isinstance(operation, Renew):
            return await self._carry_out(operation)
        unknown = []
        for place, attempt in enumerate(operation.attempts):
            outcome = await self._carry_out(operation._replace(attempts=(attempt,)))
            if isinstance(outcome, KvscoutError):
                return outcome
            if outcome:
                unknown.append(place)
        return unknown

    async def _carry_out(self, operation: Operation) -> Outcome:
        """Return an operation on one request."""
        (key,) = _booked(operation)
        forward = replication_pb2.ForwardedOperation(operation=operation_to_proto(operation), tenant=key.tenant)
        before = self._progress(key)
        late = False
        for _ in range(HOPS):
            owner = self._ownership.remote_owner(key)
            if owner is None or not self._live(owner.replica_id) or self._under_way >= MAX_FORWARDS:
                break
            self._under_way += 1
            try:
                payload = await self._post(owner.replica_id, forward, FORWARD_SECONDS)
                answer = replication_pb2.ForwardedResult.FromString(payload)
            except (nats.errors.Error, TimeoutError, DecodeError):
                self.unanswered += 1
                late = True
                break
            finally:
                self._under_way -= 1
            if answer.owner:
                self.forwarded += 1
                if isinstance(operation, Free):
                    # What the caller sends next may come before the owner's event.
                    self._ownership.freed_by_caller(key, operation.attempt_id)
                    self._ownership.settle()
                return outcome_from_proto(operation, answer.result)
        if not late:
            return self._scheduler.apply(operation)
        # The owner may have carried it out, and sent the event before the answer.
        now = self._progress(key)
        if isinstance(operation, AddOutput) and now.output_blocks >= before.output_blocks + operation.blocks:
            return now.output_blocks
        outcome = self._scheduler.apply(operation)
        if isinstance(operation, CompletePrefill) and outcome is False:
            return before.phase is Phase.PREFILL
        return FreeOutcome.FREED if outcome is FreeOutcome.ALREADY_FREED else outcome

    def answer(self, forwarded: replication_pb2.ForwardedOperation) -> replication_pb2.ForwardedResult:
        """Carry out what another replica forwards, unless it is yet another's."""
        try:
            operation = streamed_from_proto(forwarded.operation, forwarded.tenant)
        except KvscoutError as error:
            return replication_pb2.ForwardedResult(owner=True, result=result_to_proto(error, error))
        if not _booked(operation) or self.concerns(operation):
            return replication_pb2.ForwardedResult(owner=False)
        result = result_to_proto(operation, self._scheduler.apply(operation))
        return replication_pb2.ForwardedResult(owner=True, result=result)

    def _progress(self, key: RequestKey) -> _Progress:
        booking = self._scheduler.bookings.find(key)
        return _Progress() if booking is None else _Progress(booking.phase, booking.output_blocks)

    def _away(self, key: RequestKey) -> bool:
        return self._ownership.remote_owner(key) is not None


def _booked(operation: Operation) -> tuple[RequestKey, ...]:
    """Return the bookings that an operation needs to be there already."""
    if isinstance(operation, Select | Reserve):
        return ()
    return tuple(key for key, _ in operation.attempts) if isinstance(operation, Renew) else (operation.key,)
