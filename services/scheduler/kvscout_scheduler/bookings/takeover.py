"""Takeover of the requests that an owner lists when it opens a stream, a slice at a time: thousands hold nobody else
up.

::

    begin ───────────▶ slice, slice, … ─────────────────▶ end
    the owner is here  what it lists becomes its own,     what it had before that, and has not listed, ends
                       or is unknown

From the beginning on the owner counts as connected, so that nothing of it ends for want of it, and what it had before
ends only after all that it lists was looked at. Between two slices anything may happen:

* What was not looked at is freed, ends or is booked anew: it is as if the stream had come a moment later. What has
  ended is unknown; an attempt that was freed is remembered, so that nobody books it again.
* The owner opens a later stream: that one lists anew, this one is out of date and fails.
* The stream ends: what was not looked at stays the owner's, for its grace time.
* The scheduler drains: it takes no new bookings, and those that are there go on; the owner learns it with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING

from kvscout_common.errors import FailedPrecondition
from kvscout_scheduler.values.reservation import OwnerName, RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.bookings.bookings import Bookings

SLICE_REQUESTS = 128
"""Listed requests of a slice, about five milliseconds where another replica had them."""


class Takeover:
    """The takeover of one stream.

    Args:
        bookings: All bookings.
        owner: Who opens the stream.
        session: Of the stream, see `Owners.connect`.
        listed: Requests and attempts that it has in flight.
        on_end: Called at the end.
    """

    def __init__(
        self,
        bookings: Bookings,
        owner: OwnerName,
        session: int,
        listed: Iterable[tuple[RequestKey, int]],
        on_end: Callable[[], None],
    ) -> None:
        self.session = session
        self.unknown: list[tuple[RequestKey, int]] = []
        """Listed requests that are not the owner's here, as far as was looked."""
        self._bookings = bookings
        self._owner = owner
        self._listed = iter(listed)
        self._on_end: Callable[[], None] | None = on_end

    def advance(self, now: float, limit: int = SLICE_REQUESTS) -> bool:
        """Look at `limit` listed requests; True = that was all.

        Raises:
            FailedPrecondition: The owner has opened a later stream.
        """
        if self._on_end is None:
            return True
        if not self._bookings.owners.is_newest(self._owner, self.session):
            raise FailedPrecondition(f"owner {self._owner.owner_id!r} has opened a later stream")
        attempts = list(islice(self._listed, limit))
        for attempt in attempts:
            if not self._bookings.take_listed(*attempt, self._owner, now):
                self.unknown.append(attempt)
        if len(attempts) == limit:
            return False
        self._bookings.forget_unlisted(self._owner, now)
        on_end, self._on_end = self._on_end, None
        on_end()
        return True
