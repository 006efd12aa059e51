"""Bookings of this gateway: every booking is held while it runs and freed exactly once.

A booking is held by the stream to its scheduler (`attachment`), and follows its request when this gateway goes to
another scheduler. Reports go over the stream and nobody waits for them. Of what a stream that broke left undelivered
only ends of prefills are repeated: the next hello lists what is in flight, and the scheduler frees everything else of
this gateway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import cast

from kvscout_gateway.upstreams.scheduler.lifecycle import LifecycleStream, Name, name_of
from kvscout_gateway.upstreams.scheduler.link import SchedulerMember
from kvscout_gateway.values.booking import Booking


class Bookings:
    """The bookings of one gateway: as many as it has requests in flight."""

    def __init__(self) -> None:
        self._open: set[Booking] = set()
        self._reserving: set[Booking] = set()
        self.undelivered = 0
        """Frees that no scheduler has acknowledged."""

    @contextmanager
    def reserving(self, booking: Booking) -> Iterator[None]:
        """List a booking while it is being made, so that a scheduler that is attached to meanwhile does not end it."""
        self._reserving.add(booking)
        try:
            yield
        finally:
            self._reserving.remove(booking)

    def hold(self, booking: Booking) -> None:
        """Take over a booking that was just made, or would have been, had a scheduler answered."""
        self._open.add(booking)

    def in_flight(self) -> list[Booking]:
        """Return all that runs, and all that is being booked."""
        return [*self._open, *self._reserving]

    def unbooked(self, member: SchedulerMember) -> list[Booking]:
        """Return what runs and is not booked at a scheduler."""
        return [booking for booking in self._open if booking.scheduler is not member]

    def listed(self, member: SchedulerMember, listed: Collection[Booking], unknown: Collection[Name]) -> None:
        """Record that a scheduler holds what was listed to it, but for what it does not know.

        Args:
            member: The scheduler.
            listed: What was in flight.
            unknown: What of it is not booked there.
        """
        for booking in listed:
            if booking in self._reserving:
                continue
            if name_of(booking.ref) not in unknown:
                self.moved(booking, member)
            elif booking.scheduler is member:
                booking.scheduler = None

    def moved(self, booking: Booking, member: SchedulerMember) -> None:
        """Record that a scheduler holds a booking from now on. What it knows of its prefill is not known."""
        booking.scheduler = member
        if booking not in self._open:
            self._send_free(booking)  # it ended meanwhile
        elif booking.prefilled:
            self._send_prefill_complete(booking)

    def prefill_complete(self, booking: Booking) -> None:
        """Report the first token. A second call does nothing."""
        if booking in self._open and not booking.prefilled:
            booking.prefilled = True
            self._send_prefill_complete(booking)

    def free(self, booking: Booking, output_tokens: int = 0) -> None:
        """Free a booking. A second call does nothing.

        Args:
            booking: Which.
            output_tokens: That were generated; 0 = unknown.
        """
        if booking in self._open:
            booking.output_tokens = output_tokens
            self._open.remove(booking)
            self._send_free(booking)

    @staticmethod
    def _send_prefill_complete(booking: Booking) -> None:
        stream = _stream_of(booking)
        if stream is not None:
            stream.prefill_complete(booking.ref)

    def _send_free(self, booking: Booking) -> None:
        if booking.scheduler is not None:
            stream = _stream_of(booking)
            if stream is None or not stream.free(booking.ref, booking.output_tokens):
                self.undelivered += 1

    def stream_ended(self, stream: LifecycleStream) -> None:
        """Count the frees that a stream left undelivered."""
        self.undelivered += stream.unacknowledged_frees


def _stream_of(booking: Booking) -> LifecycleStream | None:
    """Return the stream to the scheduler that has a booking; None = it has none, or no stream is open."""
    return cast("SchedulerMember", booking.scheduler).stub.stream if booking.scheduler is not None else None
