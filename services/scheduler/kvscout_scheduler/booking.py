"""A booking: one request that occupies a worker, from its reservation to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvscout_common.worker import WorkerRank
from kvscout_scheduler.active_load import Allocation
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.facts import Choice, Facts
from kvscout_scheduler.pool import Pool
from kvscout_scheduler.request import OwnerName, RequestKey


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

    key: RequestKey
    attempt_id: int
    pool: Pool
    rank: WorkerRank
    allocation: Allocation
    answer: Decision | None
    """What the caller was told, given again to a repeated call; None for a plain reservation."""
    prompt_blocks: int
    """The partial one included."""
    uncached_tokens: int
    expected_output_tokens: int
    booked_at: float
    owner: OwnerName | None = None
    """None = a unary caller."""
    lease_seconds: float = 0.0
    expires_at: float | None = None
    """None = it has no lease: its owner holds it."""
    lease_bucket: int | None = None
    phase: Phase = Phase.PREFILL
    first_token_at: float | None = None
    """None = there was none, or it was out when another replica told us of the booking."""
    output_blocks: int = 0
    answers: int = 1
    """Calls that were told of it and whose answer is not known to be lost."""
    isl_tokens: int = 0
    block_hashes: bytes = b""
    """Packed hashes of the blocks that it shares; kept for other replicas only."""
    mirror: bool = False
    """Another replica owns it: it has neither lease nor owner here."""

    @property
    def facts(self) -> Facts:
        """What does not change of it."""
        answer = self.answer
        return Facts(
            self.key,
            self.attempt_id,
            self.rank,
            self.isl_tokens,
            self.uncached_tokens,
            self.expected_output_tokens,
            self.block_hashes,
            None
            if answer is None
            else Choice(answer.policy, answer.overlap_blocks, answer.effective_overlap_blocks, answer.cost),
        )


class ListPlace(NamedTuple):
    """Where a request stands in a list of active ones."""

    queued: bool
    since: float
    """When it was booked, or began to wait, on the monotonic clock."""
    key: RequestKey


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """What is shown of a booking."""

    key: RequestKey
    attempt_id: int
    rank: WorkerRank
    phase: Phase
    prompt_blocks: int
    output_blocks: int
    uncached_tokens: int
    expected_output_tokens: int
    owner: OwnerName | None
    age_seconds: float
    lease_remaining_seconds: float | None
