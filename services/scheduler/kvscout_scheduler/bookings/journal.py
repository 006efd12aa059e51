"""Journal of bookings: the interface through which replicas of the scheduler, if any, receive every change.

`Bookings` writes to a booking only if it is its own. One that another replica owns is here as a *mirror*: it counts as
load, has neither lease nor owner, and is taken over before anything is written to it.
"""

from __future__ import annotations

from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.values.reservation import RequestKey

MAX_HASHED_BLOCKS = 32_768
"""Block hashes of one request that are sent to other replicas, a quarter of a MiB; the tail of a longer prompt is
shared with nobody, here too."""


class Journal:
    """Journal without replicas; a subclass receives each change, in order, after it was made."""

    replicated = False
    """True: other replicas receive bookings, with the hashes of their blocks."""

    def booked(self, booking: Booking) -> None:
        """Note a new booking of ours."""

    def changed(self, booking: Booking) -> None:
        """Note that its phase, output, owner or length of lease may have changed."""

    def ended(self, booking: Booking, *, by_caller: bool) -> None:
        """Note the end of a booking."""

    def freed_unknown(self, key: RequestKey, attempt_id: int) -> None:
        """Note that a caller freed an attempt that has no booking here."""

    def taken_over(self, mirror: Booking) -> None:
        """Note that a mirror has become ours."""

    def displaced(self, mirror: Booking) -> None:
        """Note that the worker of a mirror is gone here; its replica may see it otherwise."""
