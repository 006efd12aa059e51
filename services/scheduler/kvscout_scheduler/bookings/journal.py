"""Who is told of every booking of ours, and knows who else may own one: the replicas of the scheduler, if any.

`Bookings` writes to a booking only if it is its own. One that another replica owns is here as a *mirror*: it counts as
load, has neither lease nor owner, and is taken over before anything is written to it.
"""

from __future__ import annotations

from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.values.reservation import RequestKey

MAX_HASHED_BLOCKS = 32_768
"""Of one request that are told to others, a quarter of a MiB; what is longer shares its tail with nobody, here too."""


class Journal:
    """Hears of each change, synchronously and in order, after it was made. This one is for nobody: no replicas."""

    replicated = False
    """Whether others hear of bookings, and of the hashes of their blocks."""

    def booked(self, booking: Booking) -> None:
        """A booking is new, and ours."""

    def changed(self, booking: Booking) -> None:
        """Its phase, output, owner or length of lease may be another."""

    def ended(self, booking: Booking, *, by_caller: bool) -> None:
        """It is over."""

    def freed_unknown(self, key: RequestKey, attempt_id: int) -> None:
        """A caller freed an attempt that has no booking here."""

    def taken_over(self, mirror: Booking) -> None:
        """A mirror has become ours."""

    def displaced(self, mirror: Booking) -> None:
        """The worker of a mirror is gone here; its replica may see it otherwise."""
