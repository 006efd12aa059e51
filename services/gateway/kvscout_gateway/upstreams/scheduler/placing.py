"""One request at the schedulers: the first that answers decides. The one place that asks again.

* A scheduler that does not answer has lost its turn: the next one is asked. What it may have booked all the same is
  freed, and the next one books another attempt.
* One that was gone while the request stood in line there: all are asked anew, with all the time for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import KvscoutError, NotFound
from kvscout_gateway.upstreams.failover import Member
from kvscout_gateway.upstreams.indexer.overlaps import Found
from kvscout_gateway.upstreams.scheduler.booking import Booking, SchedulerMember, Schedulers
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.link import LeftInLine, PendingReservation, Selection

log = logging.getLogger("kvscout.gateway")


class Chosen(NamedTuple):
    """What the schedulers answered."""

    response: scheduler_pb2.SelectResponse
    found: Found
    """The overlaps on which it was decided."""
    booking: Booking | None
    """None for a query."""


class Placing:
    """Asks schedulers.

    Args:
        schedulers: In order of preference.
        bookings: Told of what is being booked, and frees what may have been although the answer did not come.
        timeout_seconds: Longest wait for all schedulers together.
        queue_wait_seconds: Longest wait in line at one of them.
        resync: Told of a scheduler that does not know workers which this gateway knows.
        draw_attempt: An attempt id that no other booking call has.
    """

    def __init__(
        self,
        schedulers: Schedulers,
        bookings: Bookings,
        *,
        timeout_seconds: float,
        queue_wait_seconds: float,
        resync: Callable[[Member[Any]], object],
        draw_attempt: Callable[[], int],
    ) -> None:
        self._schedulers = schedulers
        self._bookings = bookings
        self._timeout = timeout_seconds
        self._queue_wait = queue_wait_seconds
        self._resync = resync
        self._draw_attempt = draw_attempt

    async def place(
        self,
        ref: scheduler_pb2.RequestRef,
        selection: Selection,
        *,
        owned: bool,
        knows_workers: bool,
        queue_wait_seconds: float | None,
        refresh: Callable[[], Awaitable[Selection]],
    ) -> Chosen:
        """Has a worker chosen, and the request booked on it if it has an id.

        Args:
            ref: Its name, and its first attempt.
            selection: What is asked.
            owned: This gateway runs it.
            knows_workers: This gateway knows workers that can take it; a scheduler that does not is to be told.
            queue_wait_seconds: Longest wait in line for this one; None = as for all.
            refresh: What is asked, with overlaps of now.

        Raises:
            UpstreamDown: No scheduler answers.
            KvscoutError: As the first one that does.
        """
        booking = Booking(ref) if ref.request_id else None
        ends_at = time.monotonic() + (self._queue_wait if queue_wait_seconds is None else queue_wait_seconds)
        asking = PendingReservation(selection, ref, ends_at, refresh, books=booking is not None, owned=owned)
        undecided: list[SchedulerMember] = []

        def lost(member: SchedulerMember) -> None:
            if booking is None:
                return
            if not owned:
                undecided.append(member)
                return
            # One that only hung goes on with this attempt, and with its Free. Schedulers may share their bookings: what
            # the next one books is another attempt, which neither of them can mean.
            self._bookings.free_lost(Booking(booking.ref, member))
            asking.given_up.append(booking.ref)
            another = scheduler_pb2.RequestRef()
            another.CopyFrom(booking.ref)
            another.attempt_id = self._draw_attempt()
            booking.ref = asking.ref = another

        def is_stale(member: SchedulerMember, error: KvscoutError) -> bool:
            """It may have restarted, with the workers that this gateway knows still under way to it."""
            if not isinstance(error, NotFound) or not knows_workers:
                return False
            self._resync(member)
            return True

        held: AbstractContextManager[None] = (
            self._bookings.asking(booking) if booking is not None and owned else nullcontext()
        )
        with held:
            while True:
                try:
                    reserved, member = await self._schedulers.call(
                        lambda stub: stub.place,
                        asking,
                        timeout_seconds=self._timeout,
                        lost=lost,
                        is_stale=is_stale,
                    )
                except LeftInLine as error:
                    log.debug("%s is asked for anew: %s", ref.request_id, error)
                    asking.selection = await refresh()
                    continue
                except BaseException:
                    # Its caller frees it by the attempt that it named: unless it is booked nowhere, that is left to it.
                    for member in undecided:
                        self._bookings.free_lost(Booking(asking.ref, member))
                    raise
                if booking is not None:
                    booking.scheduler, booking.leased = member, reserved.leased
                return Chosen(reserved.response, asking.selection.found, booking)
