"""Bookings of this gateway: every booking is held while it runs and freed exactly once.

A booking is held by the stream to its scheduler (`attachment`), and follows its request when this gateway goes to
another scheduler. Reports go over the stream and nobody waits for them. What a stream that broke left undelivered needs
no repeating: the next hello lists what is in flight, and the scheduler frees everything else of this gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

from kvscout.v1 import scheduler_pb2
from kvscout_gateway.upstreams.scheduler.lifecycle import Name, name_of
from kvscout_gateway.upstreams.scheduler.link import SchedulerLink, SchedulerMember
from kvscout_gateway.values.booking import Booking

log = logging.getLogger("kvscout.gateway")


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
        booking.scheduler, booking.prefill_reported = member, False
        if booking in self._open:
            self._report_prefill(booking)
        else:
            self._send_free(booking)  # it ended meanwhile

    def prefill_complete(self, booking: Booking) -> None:
        """Report the first token."""
        if booking in self._open:
            booking.prefilled = True
            self._report_prefill(booking)

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

    def _report_prefill(self, booking: Booking) -> None:
        if not booking.prefilled or booking.prefill_reported or booking.scheduler is None:
            return
        operation = _link_of(booking.scheduler).send("prefill_complete", booking.ref)
        if operation is not None:
            operation.answer.add_done_callback(partial(self._prefill_reported, booking))

    @staticmethod
    def _prefill_reported(booking: Booking, answer: asyncio.Future[scheduler_pb2.LifecycleResult | None]) -> None:
        # If the stream ended, it is sent again over the next one.
        booking.prefill_reported = answer.result() is not None

    def _send_free(self, booking: Booking) -> None:
        if booking.scheduler is None:
            return
        operation = _link_of(booking.scheduler).send("free", booking.ref, booking.output_tokens)
        if operation is None:
            self.undelivered += 1
        else:
            operation.answer.add_done_callback(partial(self._freed, booking))

    def _freed(self, booking: Booking, answer: asyncio.Future[scheduler_pb2.LifecycleResult | None]) -> None:
        result = answer.result()
        if result is None or result.code:
            self.undelivered += 1
            why = result.message if result is not None else "the stream ended"
            log.debug("Free of %s was not acknowledged: %s", booking.request_id, why)


def _link_of(scheduler: object) -> SchedulerLink:
    return cast("SchedulerMember", scheduler).stub
