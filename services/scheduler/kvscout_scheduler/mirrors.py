"""Requests of other replicas as load of our workers."""

from __future__ import annotations

from collections.abc import Callable

from kvscout_common.errors import NotFound
from kvscout_scheduler.booking import Booking, Phase
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.facts import Choice
from kvscout_scheduler.replica_claim import Claim, ClaimState
from kvscout_scheduler.request import HASH_BYTES, PoolId
from kvscout_scheduler.scheduler import Scheduler


class Mirrors:
    """Puts claims of others into the scheduler, and takes them out.

    Args:
        scheduler: Whose workers carry them.
        clock: Monotonic seconds.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.relieved: dict[PoolId, None] = {}
        """Pools that lost load: whoever waits there may go now."""
        self._scheduler = scheduler
        self._clock = clock

    def place(self, claim: Claim) -> bool:
        """Adds the booking that a claim describes; False = its worker is not here, or is another one."""
        try:
            pool, slot = self._scheduler.workers.slot(claim.key.tenant, claim.rank)
        except NotFound:
            return False
        lane = pool.lane_of[slot]
        hashed = len(claim.block_hashes) // HASH_BYTES
        if pool.id != claim.key.pool or hashed > claim.isl_tokens // lane.block_size:
            return False
        prompt_blocks = -(-claim.isl_tokens // lane.block_size)
        prefill = claim.state is ClaimState.PREFILL
        choice = claim.choice
        booking = Booking(
            key=claim.key,
            attempt_id=claim.attempt_id,
            pool=pool,
            rank=pool.ranks[slot],
            allocation=pool.load.add(
                slot,
                lane,
                claim.block_hashes,
                private_blocks=prompt_blocks - hashed + claim.output_blocks,
                prefill_tokens=claim.uncached_tokens if prefill else 0,
            ),
            answer=None
            if choice is None
            else Decision(
                rank=pool.ranks[slot],
                spec=pool.specs[slot],
                policy=choice.policy,
                overlap_blocks=choice.overlap_blocks,
                effective_overlap_blocks=choice.effective_overlap_blocks,
                cost=choice.cost,
                uncached_tokens=claim.uncached_tokens,
            ),
            prompt_blocks=prompt_blocks,
            uncached_tokens=claim.uncached_tokens,
            expected_output_tokens=claim.expected_output_tokens,
            booked_at=self._clock(),
            owner=claim.owner,
            lease_seconds=claim.lease_seconds,
            phase=Phase.PREFILL if prefill else Phase.DECODE,
            output_blocks=claim.output_blocks,
            isl_tokens=claim.isl_tokens,
            block_hashes=claim.block_hashes,
        )
        self._scheduler.bookings.add_mirror(booking)
        return True

    def adjust(self, mirror: Booking, claim: Claim) -> bool:
        """Makes a mirror what a claim says; False = it is another booking."""
        prefill = claim.state is ClaimState.PREFILL
        if (
            (mirror.attempt_id, mirror.rank, mirror.isl_tokens, mirror.uncached_tokens)
            != (claim.attempt_id, claim.rank, claim.isl_tokens, claim.uncached_tokens)
            or (prefill and mirror.phase is Phase.DECODE)
            or claim.output_blocks < mirror.output_blocks
            or claim.block_hashes != mirror.block_hashes
        ):
            return False
        load = mirror.pool.load
        if not prefill and mirror.phase is Phase.PREFILL:
            self._scheduler.bookings.decode(mirror, self._clock())
            self.relieved[mirror.pool.id] = None
        if claim.output_blocks > mirror.output_blocks:
            load.add_private(mirror.allocation, claim.output_blocks - mirror.output_blocks)
            mirror.output_blocks = claim.output_blocks
        mirror.owner, mirror.lease_seconds = claim.owner, claim.lease_seconds
        return True

    def remove(self, mirror: Booking) -> None:
        """Takes a mirror out."""
        self._scheduler.bookings.remove_mirror(mirror, self._clock())
        self.relieved[mirror.pool.id] = None

    def pump(self) -> None:
        """Lets those go who waited for load that is gone now."""
        if self.relieved:
            relieved, self.relieved = self.relieved, {}
            self._scheduler.pump(relieved)


def claim_of(booking: Booking, term: int) -> Claim:
    """What we say of a booking of ours."""
    answer = booking.answer
    return Claim(
        key=booking.key,
        attempt_id=booking.attempt_id,
        term=term,
        state=ClaimState.PREFILL if booking.phase is Phase.PREFILL else ClaimState.DECODE,
        rank=booking.rank,
        block_hashes=booking.block_hashes,
        isl_tokens=booking.isl_tokens,
        uncached_tokens=booking.uncached_tokens,
        expected_output_tokens=booking.expected_output_tokens,
        output_blocks=booking.output_blocks,
        owner=booking.owner,
        lease_seconds=booking.lease_seconds,
        choice=None
        if answer is None
        else Choice(answer.policy, answer.overlap_blocks, answer.effective_overlap_blocks, answer.cost),
    )
