"""Keeping track of what this gateway has booked: every booking is renewed while it runs and freed exactly once.

Reports are delivered in the background, so that neither a cancelled call nor a slow scheduler delays anything. A Free
that cannot be delivered is repeated until the booking's lease is over anyway; that is counted and logged.

Tasks are bounded by bookings: nothing is booked at a scheduler that is down, so that what waits for it is what was in
flight when it went.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import KvscoutError
from kvscout_gateway.failover import is_member_fault
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.placement import Booking

log = logging.getLogger("kvscout.gateway")

RETRY_SECONDS = (0.1, 0.5, 2.0, 5.0)
"""Pauses between tries of a Free; the last one goes on."""
LOST_RETRIES = 2
"""Further tries of a Free for what may have been booked: the scheduler undoes most of it itself."""


class Bookings:
    """The bookings of one gateway: as many as it has requests in flight."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        *,
        lease_seconds: int,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps bookings.

        Args:
            metrics: Where Frees that could not be delivered are counted.
            lease_seconds: Lease of the bookings, renewed at a third of it.
            timeout_seconds: Longest wait for one answer of a scheduler.
            clock: Monotonic seconds.
        """
        self._metrics = metrics
        self._lease_seconds = lease_seconds
        self._timeout = timeout_seconds
        self._clock = clock
        self._open: set[Booking] = set()
        self._reports: dict[Booking, asyncio.Task[None]] = {}
        """The last report of each booking, while it is under way."""
        self._closing = asyncio.Event()

    def add(self, booking: Booking) -> None:
        """Takes over a booking that was just made."""
        self._open.add(booking)

    def mark_prefill_complete(self, booking: Booking) -> None:
        """Reports the first token; returns at once."""
        if booking in self._open:
            self._report(booking, self._prefill_complete(booking))

    def free(self, booking: Booking) -> None:
        """Frees a booking; returns at once. A second call does nothing."""
        if booking in self._open:
            self._open.remove(booking)
            self._report(booking, self._free(booking))

    def free_lost(self, booking: Booking) -> None:
        """Frees what may have been booked by a call whose answer did not come; returns at once."""
        self._report(booking, self._free_lost(booking))

    async def freed(self, booking: Booking) -> None:
        """Waits until the reports of a booking are delivered, at most as long as one answer may take."""
        report = self._reports.get(booking)
        if report is not None:
            await asyncio.wait([report], timeout=self._timeout)

    async def settle(self) -> None:
        """Waits until every report under way is delivered. What fails from now on is tried once more, then left to
        its lease: whoever stops does not wait for a scheduler that is gone."""
        self._closing.set()
        while self._reports:
            await asyncio.wait(self._reports.values())

    async def renew(self) -> None:
        """Renews the leases of what runs, for ever."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            await self.renew_once()

    async def renew_once(self) -> None:
        """Renews the leases of what runs, one call a scheduler and tenant."""
        groups: defaultdict[tuple[int, str], list[Booking]] = defaultdict(list)
        for booking in self._open:
            groups[id(booking.scheduler), booking.ref.tenant].append(booking)
        for (_, tenant), bookings in groups.items():
            scheduler = bookings[0].scheduler
            request = scheduler_pb2.RenewRequest(
                tenant=tenant, requests=[b.ref for b in bookings], lease_seconds=self._lease_seconds
            )
            try:
                answer = await scheduler.call(lambda stub: stub.Renew, request, self._timeout)
            except KvscoutError as error:
                log.warning("could not renew %d bookings at %s: %s", len(bookings), scheduler.name, error)
                continue
            # Those that were freed while the call was under way are no loss.
            gone = sum(bookings[index] in self._open for index in answer.unknown)
            if gone:
                log.warning("%d running requests are no longer booked at %s", gone, scheduler.name)

    def _report(self, booking: Booking, delivery: Coroutine[Any, Any, None]) -> None:
        """Delivers a report after the earlier ones of its booking."""
        before = self._reports.get(booking)

        async def deliver() -> None:
            if before is not None:
                await asyncio.wait([before])
            await delivery

        def done(task: asyncio.Task[None]) -> None:
            if self._reports.get(booking) is task:
                del self._reports[booking]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("report of %s failed", booking.ref.request_id, exc_info=error)

        task = asyncio.get_running_loop().create_task(deliver())
        self._reports[booking] = task
        task.add_done_callback(done)

    async def _prefill_complete(self, booking: Booking) -> None:
        try:
            await booking.scheduler.call(lambda stub: stub.MarkPrefillComplete, booking.ref, self._timeout)
        except KvscoutError as error:
            # Free implies it: until then the worker only looks busier than it is.
            log.debug("prefill of %s not reported: %s", booking.ref.request_id, error)

    async def _free(self, booking: Booking) -> None:
        give_up_at = self._clock() + self._lease_seconds
        for pause in itertools.chain(RETRY_SECONDS, itertools.repeat(RETRY_SECONDS[-1])):
            last = self._closing.is_set()
            error = await self._try_free(booking)
            if error is None:
                return
            if last or not is_member_fault(error) or self._clock() + pause > give_up_at:
                self._metrics.unfreed.inc()
                log.warning("%s is left to its lease: %s", booking.ref.request_id, error)
                return
            await self._pause(pause)

    async def _free_lost(self, booking: Booking) -> None:
        for pause in RETRY_SECONDS[:LOST_RETRIES]:
            if await self._try_free(booking) is None:
                return
            await self._pause(pause)
        error = await self._try_free(booking)
        if error is not None:
            log.debug("%s, if it is booked, is left to its lease: %s", booking.ref.request_id, error)

    async def _try_free(self, booking: Booking) -> KvscoutError | None:
        try:
            await booking.scheduler.call(lambda stub: stub.Free, booking.ref, self._timeout)
        except KvscoutError as error:
            return error
        return None

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but not past the time to stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass
