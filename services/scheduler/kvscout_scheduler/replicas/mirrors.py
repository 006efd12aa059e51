"""Requests of other replicas as load of our workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvscout_common.errors import NotFound
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.replicas.claim import Claim, ClaimState, shared
from kvscout_scheduler.values.reservation import HASH_BYTES, Phase

if TYPE_CHECKING:
    from kvscout_scheduler.bookings.bookings import Bookings
    from kvscout_scheduler.load.workers import Workers


def place(claim: Claim, workers: Workers, now: float, *, late: bool) -> Booking | None:
    """Make the booking that a claim describes, with its load.

    Args:
        claim: The claim that holds.
        workers: The workers of this replica.
        now: On the scheduler's clock.
        late: Whether it was made longer ago than a message takes.

    Returns:
        None: its worker is not here, or is another one.
    """
    reservation = claim.reservation
    try:
        pool, slot = workers.slot(reservation.key.tenant, reservation.rank)
    except NotFound:
        return None
    hashed = len(reservation.block_hashes) // HASH_BYTES
    if pool.id != reservation.key.pool or hashed > reservation.isl_tokens // pool.format_of[slot].block_size:
        return None
    prefill, output_blocks = claim.state is ClaimState.PREFILL, claim.output_blocks
    if late or not prefill:
        reservation = reservation._replace(running=True, prefilled=not prefill)
    return Booking(
        reservation,
        pool,
        pool.place(slot, reservation, reservation.block_hashes, now=now, output_blocks=output_blocks, prefill=prefill),
        booked_at=now,
        owner=claim.owner,
        lease_seconds=claim.lease_seconds,
        phase=Phase.PREFILL if prefill else Phase.DECODE,
        output_blocks=output_blocks,
    )


def adjust(mirror: Booking, claim: Claim, bookings: Bookings, now: float, *, late: bool) -> bool:
    """Make a mirror what a claim says, as `place`; False = it is another booking."""
    prefill = claim.state is ClaimState.PREFILL
    if (
        shared(mirror.reservation) != claim.reservation
        or (prefill and mirror.phase is Phase.DECODE)
        or claim.output_blocks < mirror.output_blocks
    ):
        return False
    if not prefill and mirror.phase is Phase.PREFILL:
        if late:
            bookings.ran_before(mirror)
        bookings.decode(mirror, now)
    if claim.output_blocks > mirror.output_blocks:
        mirror.pool.load.add_private(mirror.allocation, claim.output_blocks - mirror.output_blocks)
        mirror.output_blocks = claim.output_blocks
    mirror.owner, mirror.lease_seconds = claim.owner, claim.lease_seconds
    return True


def claim_of(booking: Booking, term: int, owner_since: int) -> Claim:
    """Return the claim to a booking of ours."""
    return Claim(
        shared(booking.reservation),
        term,
        ClaimState.PREFILL if booking.phase is Phase.PREFILL else ClaimState.DECODE,
        booking.output_blocks,
        booking.owner,
        booking.lease_seconds,
        owner_since,
    )
