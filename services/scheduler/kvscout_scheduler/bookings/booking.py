"""A booking: one request that occupies a worker, from its reservation to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvscout_scheduler.load.active_load import Allocation
from kvscout_scheduler.load.pool import Pool
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import OwnerName, RequestKey
from kvscout_scheduler.values.reservation import Facts


class Phase(StrEnum):
    """Where an active request is."""

    QUEUED = "queued"
    """No worker yet."""
    PREFILL = "prefill"
    """No token yet."""
    DECODE = "decode"


class FreeOutcome(StrEnum):
    """What a Free did."""

    FREED = "freed"
    UNKNOWN = "unknown"
    """Nothing was active under this id and attempt."""
    ALREADY_FREED = "already_freed"
    DEQUEUED = "dequeued"
    """It waited, and waits no more."""


class EndReason(StrEnum):
    """Why a booking ended without a Free."""

    LEASE = "lease"
    OWNER_GONE = "owner_gone"
    """The owner's stream was away for too long."""
    OWNER_FORGOT = "owner_forgot"
    """The owner came back and did not list it."""
    WORKER_REMOVED = "worker_removed"
    """Somebody took the worker out."""
    WORKER_GONE = "worker_gone"
    """The worker's registration ended, and it did not come back in time."""
    UNDELIVERED = "undelivered"
    """Nobody got the answer."""
    SUPERSEDED = "superseded"
    """Another replica of the scheduler ended it, or booked the request elsewhere."""


@dataclass(slots=True, eq=False)
class Booking:
    """Mutable; owned by `Bookings`. Two bookings are equal only if they are one."""

    facts: Facts
    pool: Pool
    allocation: Allocation
    booked_at: float
    owner: OwnerName | None = None
    """None = a unary caller."""
    lease_seconds: float = 0.0
    expires_at: float | None = None
    """None = it has no lease: its owner holds it."""
    lease_bucket: int | None = None
    phase: Phase = Phase.PREFILL
    first_token_at: float | None = None
    """None = there was none, nobody tells, or it was out when the booking came here."""
    output_blocks: int = 0
    answers: int = 1
    """Calls that were told of it and whose answer is not known to be lost."""
    mirror: bool = False
    """Another replica owns it: it has neither lease nor owner here."""

    @property
    def key(self) -> RequestKey:
        """What names it."""
        return self.facts.key

    @property
    def answer(self) -> Decision | None:
        """What its caller was told, for a repeated call; None for a plain reservation."""
        facts, choice = self.facts, self.facts.choice
        if choice is None:
            return None
        return Decision(facts.rank, self.pool.specs[self.allocation.slot], *choice, facts.uncached_tokens)
