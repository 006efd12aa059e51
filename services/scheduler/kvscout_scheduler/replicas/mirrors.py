"""Requests of other replicas as load of our workers."""

from __future__ import annotations

from kvscout_common.errors import NotFound
from kvscout_scheduler.bookings.booking import Booking, Phase
from kvscout_scheduler.replicas.claim import Claim, ClaimState, shared
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import HASH_BYTES


def place(claim: Claim, scheduler: Scheduler, *, late: bool) -> bool:
    """Adds the booking that a claim describes.

    Args:
        claim: The claim that holds.
        scheduler: Where it is added.
        late: Whether it was made longer ago than a message takes.

    Returns:
        False: its worker is not here, or is another one.
    """
    facts = claim.facts
    try:
        pool, slot = scheduler.workers.slot(facts.key.tenant, facts.rank)
    except NotFound:
        return False
    hashed = len(facts.block_hashes) // HASH_BYTES
    if pool.id != facts.key.pool or hashed > facts.isl_tokens // pool.lane_of[slot].block_size:
        return False
    prefill, output_blocks = claim.state is ClaimState.PREFILL, claim.output_blocks
    if late or not prefill:
        facts = facts._replace(running=True, prefilled=not prefill)
    booking = Booking(
        facts,
        pool,
        pool.place(slot, facts, facts.block_hashes, output_blocks=output_blocks, prefill=prefill),
        booked_at=scheduler.clock(),
        owner=claim.owner,
        lease_seconds=claim.lease_seconds,
        phase=Phase.PREFILL if prefill else Phase.DECODE,
        output_blocks=output_blocks,
    )
    scheduler.bookings.add_mirror(booking)
    return True


def adjust(mirror: Booking, claim: Claim, scheduler: Scheduler, *, late: bool) -> bool:
    """Makes a mirror what a claim says, as `place`; False = it is another booking."""
    prefill = claim.state is ClaimState.PREFILL
    if (
        shared(mirror.facts) != claim.facts
        or (prefill and mirror.phase is Phase.DECODE)
        or claim.output_blocks < mirror.output_blocks
    ):
        return False
    if not prefill and mirror.phase is Phase.PREFILL:
        if late:
            scheduler.bookings.ran_before(mirror)
        scheduler.bookings.decode(mirror, scheduler.clock())
    if claim.output_blocks > mirror.output_blocks:
        mirror.pool.load.add_private(mirror.allocation, claim.output_blocks - mirror.output_blocks)
        mirror.output_blocks = claim.output_blocks
    mirror.owner, mirror.lease_seconds = claim.owner, claim.lease_seconds
    return True


def claim_of(booking: Booking, term: int, owner_since: int) -> Claim:
    """What we say of a booking of ours."""
    return Claim(
        shared(booking.facts),
        term,
        ClaimState.PREFILL if booking.phase is Phase.PREFILL else ClaimState.DECODE,
        booking.output_blocks,
        booking.owner,
        booking.lease_seconds,
        owner_since,
    )
