"""A booking: one request that occupies a worker, from its reservation to its end."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.reservation import OwnerName, Phase, RequestKey, Reservation

if TYPE_CHECKING:
    from kvscout_scheduler.load.active_load import Allocation
    from kvscout_scheduler.load.pool import Pool


@dataclass(slots=True, eq=False)
class Booking:
    """Record of an active request, owned by `Bookings`. Two bookings are equal only if they are one."""

    reservation: Reservation
    pool: Pool
    allocation: Allocation
    booked_at: float
    owner: OwnerName | None = None
    """None = a unary caller."""
    lease_seconds: float = 0.0
    expires_at: float = inf
    """End of its lease on the scheduler's clock; inf = it has none, its owner holds it."""
    lease_bucket: int | None = None
    phase: Phase = Phase.PREFILL
    first_token_at: float | None = None
    """None = there was none, it is not reported, or it was out when the booking came here."""
    output_blocks: int = 0
    answers: int = 1
    """Calls that were answered with it, and whose answer is not known to be lost."""
    mirror: bool = False
    """Another replica owns it: it has neither lease nor owner here."""

    @property
    def key(self) -> RequestKey:
        """Return its name."""
        return self.reservation.key

    @property
    def answer(self) -> Decision | None:
        """Return the decision that its caller received, for a repeated call; None for a plain reservation."""
        reservation, choice = self.reservation, self.reservation.choice
        if choice is None:
            return None
        return Decision(
            reservation.rank,
            self.pool.specs[self.allocation.slot],
            *choice,
            reservation.uncached_tokens,
            session=reservation.session,
        )
