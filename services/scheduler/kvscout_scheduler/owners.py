"""Owners of bookings: gateways, each with one open stream at a time and some patience for its return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvscout_common.errors import FailedPrecondition
from kvscout_scheduler.booking import Booking


@dataclass(slots=True)
class Owner:
    """One owner."""

    session: int = 0
    """Number of its newest stream."""
    connected_at: float = 0.0
    """When that stream began."""
    opened_at: int = 0
    """When its owner opened it, microseconds since the Unix epoch by the owner's clock; 0 = it did not say."""
    gone_at: float | None = None
    """When that stream ended; None = it is open."""
    bookings: set[Booking] = field(default_factory=set)


class Owners:
    """The owners that have a stream open or bookings left.

    Args:
        grace_seconds: How long an owner may be gone before its bookings end.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._owners: dict[str, Owner] = {}
        self._sessions = 0

    def __len__(self) -> int:
        return len(self._owners)

    def connect(self, owner_id: str, now: float, opened_at: int = 0) -> int:
        """Opens a stream of an owner; an older one of it counts no more.

        Returns:
            The session to give to `disconnect`.

        Raises:
            FailedPrecondition: It is the older one itself: what it says is out of date.
        """
        owner = self._owners.setdefault(owner_id, Owner())
        if owner.session and owner.gone_at is None and 0 < opened_at < owner.opened_at:
            raise FailedPrecondition(f"owner {owner_id!r} has opened a later stream")
        self._sessions += 1
        owner.session, owner.connected_at, owner.opened_at, owner.gone_at = self._sessions, now, opened_at, None
        return self._sessions

    def disconnect(self, owner_id: str, session: int, now: float) -> None:
        """Ends a stream; the end of one that was replaced means nothing."""
        owner = self._owners.get(owner_id)
        if owner is not None and owner.session == session:
            if owner.bookings:
                owner.gone_at = now
            else:
                del self._owners[owner_id]

    def connected(self, owner_id: str, now: float) -> float:
        """For how many seconds an owner has had its stream open; 0 = it has none, else above 0."""
        owner = self._owners.get(owner_id)
        return max(now - owner.connected_at, 1e-9) if owner is not None and owner.gone_at is None else 0.0

    def opened_at(self, owner_id: str) -> int:
        """When the owner of an open stream says that it opened it; 0 = there is none, or it did not say."""
        owner = self._owners.get(owner_id)
        return owner.opened_at if owner is not None and owner.gone_at is None else 0

    def add(self, booking: Booking, owner_id: str, now: float) -> None:
        """Gives a booking to an owner; one without a stream counts as gone from now."""
        owner = self._owners.get(owner_id)
        if owner is None:
            owner = self._owners[owner_id] = Owner(gone_at=now)
        booking.owner_id = owner_id
        owner.bookings.add(booking)

    def drop(self, booking: Booking) -> None:
        """Takes a booking from its owner, if it has one."""
        owner = self._owners.get(booking.owner_id)
        if owner is not None:
            owner.bookings.discard(booking)
            if not owner.bookings and owner.gone_at is not None:
                del self._owners[booking.owner_id]

    def owns(self, booking: Booking) -> bool:
        """Whether a booking is with its owner."""
        owner = self._owners.get(booking.owner_id)
        return owner is not None and booking in owner.bookings

    def bookings(self, owner_id: str) -> Iterable[Booking]:
        """What an owner has, oldest first."""
        owner = self._owners.get(owner_id)
        return sorted(owner.bookings, key=lambda booking: booking.booked_at) if owner is not None else ()

    def expired(self, now: float) -> list[Booking]:
        """Bookings of owners that have been gone for too long."""
        return [
            booking
            for owner in self._owners.values()
            if owner.gone_at is not None and owner.gone_at + self._grace_seconds <= now
            for booking in owner.bookings
        ]
