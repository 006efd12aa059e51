"""Ends of leases, sorted into buckets of one second: renewing costs nothing until the old end is reached."""

from __future__ import annotations

from math import inf

from kvscout_scheduler.bookings.booking import Booking


class Leases:
    """Bookings with a lease. A booking is in one bucket, at or before the one of its end."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[Booking, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def set(self, booking: Booking, expires_at: float) -> None:
        """Start or renew a lease; a later end is looked at when the earlier one comes."""
        booking.expires_at = expires_at
        if booking.lease_bucket is None or booking.lease_bucket > int(expires_at):
            self._take_out(booking)
            self._put(booking, int(expires_at))

    def clear(self, booking: Booking) -> None:
        """End the lease: the booking is over, or its owner holds it."""
        booking.expires_at = inf
        self._take_out(booking)

    def expired(self, now: float, limit: int) -> list[Booking]:
        """Return bookings whose lease has ended, earliest first; they stay here until they are cleared."""
        due: list[Booking] = []
        for bucket in sorted(b for b in self._buckets if b <= now):
            for booking in list(self._buckets[bucket]):
                if len(due) >= limit:
                    break
                if booking.expires_at <= now:
                    due.append(booking)
                elif int(booking.expires_at) != bucket:
                    self._take_out(booking)
                    self._put(booking, int(booking.expires_at))
        return sorted(due, key=lambda booking: (booking.expires_at, booking.booked_at))

    def _put(self, booking: Booking, bucket: int) -> None:
        self._buckets.setdefault(bucket, {})[booking] = None
        booking.lease_bucket = bucket

    def _take_out(self, booking: Booking) -> None:
        if booking.lease_bucket is not None:
            members = self._buckets[booking.lease_bucket]
            members.pop(booking, None)
            if not members:
                del self._buckets[booking.lease_bucket]
            booking.lease_bucket = None
