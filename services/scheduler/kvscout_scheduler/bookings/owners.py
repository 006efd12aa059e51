"""Owners of bookings: gateways, each with one open stream at a time and a grace time for its return."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from kvscout_common.errors import FailedPrecondition
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.values.reservation import MICROSECONDS, OwnerName

MAX_AHEAD_SECONDS = 1.0
"""Seconds by which the clock of an owner may be ahead. A stream from further ahead could keep its owner's later ones
out: so it can for this long."""


@dataclass(slots=True)
class Owner:
    """One owner."""

    session: int = 0
    """Number of its newest stream."""
    connected_at: float = 0.0
    """Time when that stream began."""
    opened_at: int = 0
    """When its owner opened it, microseconds since the Unix epoch by the owner's clock; 0 = it did not say."""
    gone_at: float | None = None
    """Time when that stream ended; None = it is open."""
    bookings: dict[Booking, None] = field(default_factory=dict)
    """In the order in which they came; a set of objects is in that of their addresses."""
    unlisted: dict[Booking, None] = field(default_factory=dict)
    """Bookings from before its newest stream that it has not listed yet, during the takeover."""


class Owners:
    """The owners that have a stream open or bookings left.

    Args:
        grace_seconds: How long an owner may be gone before its bookings end.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._owners: dict[OwnerName, Owner] = {}
        self._sessions = 0
        self._forgotten: dict[Booking, None] = {}
        """Bookings that their owner did not list when it came back, and that have not ended yet."""

    def connect(self, name: OwnerName, now: float, opened_at: int, wall_now: float) -> int:
        """Open a stream of an owner; an older one of it counts no more.

        Args:
            name: Whose.
            now: On the scheduler's clock.
            opened_at: See `Owner`; what lies too far ahead of our own clock counts as `MAX_AHEAD_SECONDS` ahead.
            wall_now: Seconds since the Unix epoch.

        Returns:
            The session to give to `disconnect`. What the owner had is not forgotten until `forget` says so.

        Raises:
            FailedPrecondition: It is the older one itself: what it says is out of date.
        """
        owner = self._owners.setdefault(name, Owner())
        latest = int((wall_now + MAX_AHEAD_SECONDS) * MICROSECONDS)
        # One from beyond that was noted before our clock was set back: it orders nothing any more.
        if owner.session and owner.gone_at is None and 0 < opened_at < owner.opened_at <= latest:
            raise FailedPrecondition(f"owner {name.owner_id!r} has opened a later stream")
        self._sessions += 1
        owner.session, owner.connected_at, owner.gone_at = self._sessions, now, None
        owner.opened_at = min(opened_at, latest)
        if self._forgotten:
            for booking in owner.bookings:
                self.remember(booking)
        owner.unlisted = dict(owner.bookings)
        return self._sessions

    def is_newest(self, name: OwnerName, session: int) -> bool:
        """Return whether an owner has opened no stream since then."""
        owner = self._owners.get(name)
        return owner is not None and owner.session == session

    def forget(self, name: OwnerName) -> None:
        """End the list of an owner: bookings that it did not list are `forgotten`."""
        owner = self._owners[name]
        unlisted, owner.unlisted = owner.unlisted, {}
        self._forgotten.update(dict.fromkeys(sorted(unlisted, key=lambda booking: booking.booked_at)))

    def remember(self, booking: Booking) -> None:
        """Keep a booking that its owner lists after all."""
        self._forgotten.pop(booking, None)
        owner = self._owners.get(booking.owner) if booking.owner is not None else None
        if owner is not None:
            owner.unlisted.pop(booking, None)

    def disconnect(self, name: OwnerName, session: int, gone_at: float) -> None:
        """End a stream; the end of one that was replaced means nothing."""
        owner = self._owners.get(name)
        if owner is not None and owner.session == session:
            if owner.bookings:
                owner.gone_at = gone_at
            else:
                del self._owners[name]

    def connected(self, name: OwnerName, now: float) -> float:
        """Return the seconds since an owner opened its stream; 0 = it has none, else above 0."""
        owner = self._owners.get(name)
        return max(now - owner.connected_at, 1e-9) if owner is not None and owner.gone_at is None else 0.0

    def opened_at(self, name: OwnerName) -> int:
        """Return the time at which an owner opened its stream, by its own clock; 0 = unknown."""
        owner = self._owners.get(name)
        return owner.opened_at if owner is not None and owner.gone_at is None else 0

    def add(self, booking: Booking, name: OwnerName, now: float) -> None:
        """Give a booking to an owner; one without a stream counts as gone from now."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(gone_at=now)
        booking.owner = name
        owner.bookings[booking] = None

    def drop(self, booking: Booking) -> None:
        """Take a booking from its owner, if it has one."""
        self.remember(booking)
        name = booking.owner
        owner = self._owners.get(name) if name is not None else None
        if name is not None and owner is not None:
            owner.bookings.pop(booking, None)
            if not owner.bookings and owner.gone_at is not None:
                del self._owners[name]

    def owns(self, booking: Booking) -> bool:
        """Return whether a booking is with its owner."""
        owner = self._owners.get(booking.owner) if booking.owner is not None else None
        return owner is not None and booking in owner.bookings

    def forgotten(self, limit: int) -> list[Booking]:
        """Return bookings that their owners did not list when they came back, oldest first, `limit` at most."""
        return list(islice(self._forgotten, limit))

    def expired(self, now: float, limit: int) -> list[Booking]:
        """Return bookings of owners that have been gone for too long, `limit` at most."""
        overdue = (
            booking
            for owner in self._owners.values()
            if owner.gone_at is not None and owner.gone_at + self._grace_seconds <= now
            for booking in owner.bookings
        )
        return list(islice(overdue, limit))
