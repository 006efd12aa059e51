"""What is shown of active requests, those that wait included."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from kvscout_scheduler.bookings.booking import Booking, Phase
from kvscout_scheduler.queue.waiting import Waiter
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import OwnerName, RequestKey
from kvscout_scheduler.values.reservation import Facts


class ListPlace(NamedTuple):
    """Where a request stands in a list of active ones."""

    queued: bool
    since: float
    """When it was booked, or began to wait, on the monotonic clock."""
    key: RequestKey


@dataclass(frozen=True, slots=True)
class ActiveRequest:
    """What is shown of a booking."""

    facts: Facts
    phase: Phase
    prompt_blocks: int
    """The partial one included."""
    output_blocks: int
    owner: OwnerName | None
    age_seconds: float
    lease_remaining_seconds: float | None


def list_active_requests(
    scheduler: Scheduler,
    tenant: str,
    *,
    model: str = "",
    worker_id: str = "",
    limit: int = 1000,
    after: ListPlace | None = None,
) -> tuple[list[ActiveRequest], int, ListPlace | None]:
    """Active requests, oldest first; those that wait come last.

    Args:
        scheduler: Whose workers they are on, or wait for.
        tenant: Whose.
        model: "" = all.
        worker_id: "" = all.
        limit: How many at most.
        after: Where an earlier list ended; None = from the beginning.

    Returns:
        The first `limit` of them, how many there are, and where to go on if there are more behind these.
    """
    found = [
        booking
        for booking in scheduler.bookings
        if booking.key.tenant == tenant
        and model in ("", booking.key.model)
        and worker_id in ("", booking.facts.rank.worker_id)
    ]
    queued = (
        []
        if worker_id
        else [w for w in scheduler.waiting if w.request.tenant == tenant and model in ("", w.request.model)]
    )
    places: list[tuple[ListPlace, Booking | Waiter]] = [
        *((ListPlace(False, booking.booked_at, booking.key), booking) for booking in found),
        *((ListPlace(True, waiter.since, waiter.request.key), waiter) for waiter in queued),
    ]
    if after is not None:
        places = [each for each in places if each[0] > after]
    # What was booked in one moment is in the order of the names: a place must tell it from its neighbours.
    page = nsmallest(limit, places, key=itemgetter(0))
    now = scheduler.clock()
    listed = [_booked(one, now) if isinstance(one, Booking) else _waiting(one, now) for _, one in page]
    return listed, len(found) + len(queued), page[-1][0] if page and len(page) < len(places) else None


def _booked(booking: Booking, now: float) -> ActiveRequest:
    return ActiveRequest(
        facts=booking.facts,
        phase=booking.phase,
        prompt_blocks=booking.pool.blocks(booking.allocation.slot, booking.facts.isl_tokens),
        output_blocks=booking.output_blocks,
        owner=booking.owner,
        age_seconds=now - booking.booked_at,
        lease_remaining_seconds=None if booking.expires_at is None else max(0.0, booking.expires_at - now),
    )


def _waiting(waiter: Waiter, now: float) -> ActiveRequest:
    """No worker, no blocks."""
    return ActiveRequest(
        facts=Facts(waiter.request.key, waiter.request.attempt_id),
        phase=Phase.QUEUED,
        prompt_blocks=0,
        output_blocks=0,
        owner=waiter.owner,
        age_seconds=now - waiter.since,
        lease_remaining_seconds=None,
    )
