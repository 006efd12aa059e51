"""The log of bookings that end by themselves: one line for all that end of one cause."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.values.reservation import EndReason

log = logging.getLogger("kvscout.scheduler")

NAMED = 8
"""Requests that a line names."""


@dataclass(slots=True)
class _Cause:
    """Bookings that ended of one cause."""

    count: int
    first: Booking
    age_seconds: float
    """Age of the first booking, in seconds."""
    names: list[str]


class EndLog:
    """Gathers ends, which may come in slices, until `flush`; bounded by their causes."""

    def __init__(self) -> None:
        self._causes: dict[tuple[EndReason, str], _Cause] = {}

    def add(self, booking: Booking, reason: EndReason, now: float) -> None:
        """Note one."""
        cause = self._causes.get((reason, _whose(booking, reason)))
        if cause is None:
            name = booking.key.request_id
            self._causes[reason, _whose(booking, reason)] = _Cause(1, booking, now - booking.booked_at, [name])
            return
        cause.count += 1
        if len(cause.names) < NAMED:
            cause.names.append(booking.key.request_id)

    def flush(self) -> None:
        """Write a line for each cause."""
        causes, self._causes = self._causes, {}
        for (reason, whose), cause in causes.items():
            if cause.count == 1:
                booking = cause.first
                log.warning(
                    "booking of request %s (model %s, attempt %d) on %s/%d ended after %.1f s: %s",
                    booking.key.request_id,
                    booking.key.model,
                    booking.reservation.attempt_id,
                    booking.reservation.rank.worker_id,
                    booking.reservation.rank.dp_rank,
                    cause.age_seconds,
                    reason,
                )
            else:
                more = ", …" if cause.count > len(cause.names) else ""
                log.warning(
                    "%d bookings ended: %s%s (requests %s%s)", cause.count, reason, whose, ", ".join(cause.names), more
                )


def _whose(booking: Booking, reason: EndReason) -> str:
    if reason in (EndReason.OWNER_GONE, EndReason.OWNER_FORGOT):
        return f", owner {booking.owner}"
    if reason in (EndReason.WORKER_GONE, EndReason.WORKER_REMOVED):
        return f", worker {booking.reservation.rank.worker_id}"
    return ""
