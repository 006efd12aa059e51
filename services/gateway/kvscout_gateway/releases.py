"""Keeping track of what this gateway has booked: every booking is renewed while it runs and freed exactly once.

A Free is delivered in the background, so that neither a cancelled call nor a slow scheduler delays it. What cannot
be delivered within a few tries ends with its lease, is counted and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import KvscoutError
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.routing import Booking

log = logging.getLogger("kvscout.gateway")

_RETRY_SECONDS = (0.1, 0.5, 2.0, 5.0)


class Bookings:
    """The bookings of one gateway: as many as it has requests in flight."""

    def __init__(self, metrics: GatewayMetrics, *, lease_seconds: int, timeout_seconds: float) -> None:
        self._metrics = metrics
        self._lease_seconds = lease_seconds
        self._timeout = timeout_seconds
        self._open: dict[int, Booking] = {}
        self._last: dict[int, asyncio.Task[None]] = {}

    def add(self, booking: Booking) -> None:
        """Takes over a booking that was just made."""
        self._open[id(booking)] = booking

    def mark_prefill_complete(self, booking: Booking) -> None:
        """Reports the first token; returns at once."""
        if id(booking) in self._open:
            self._send(booking, self._prefill_complete)

    def free(self, booking: Booking) -> None:
        """Frees a booking; returns at once. A second call does nothing."""
        if self._open.pop(id(booking), None) is not None:
            self._send(booking, self._free)

    async def settle(self) -> None:
        """Waits until every report under way is delivered or given up."""
        while self._last:
            await asyncio.gather(*self._last.values(), return_exceptions=True)

    async def renew(self) -> None:
        """Renews the leases of what runs, for ever."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            by_member: defaultdict[tuple[int, str], list[Booking]] = defaultdict(list)
            for booking in self._open.values():
                by_member[id(booking.scheduler), booking.ref.tenant].append(booking)
            for (_, tenant), bookings in by_member.items():
                request = scheduler_pb2.RenewRequest(
                    tenant=tenant, requests=[b.ref for b in bookings], lease_seconds=self._lease_seconds
                )
                try:
                    await bookings[0].scheduler.call(lambda stub: stub.Renew, request, self._timeout)
                except KvscoutError as error:
                    log.warning("could not renew %d bookings: %s", len(bookings), error)

    def _send(self, booking: Booking, report: Callable[[Booking], object]) -> None:
        """Runs a report after the earlier ones of its booking."""
        key = id(booking)
        before = self._last.get(key)
        task = asyncio.get_running_loop().create_task(self._after(before, booking, report))
        self._last[key] = task
        task.add_done_callback(lambda done: self._last.pop(key, None) if self._last.get(key) is done else None)

    async def _after(
        self, before: asyncio.Task[None] | None, booking: Booking, report: Callable[[Booking], object]
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        result = report(booking)
        assert asyncio.iscoroutine(result)
        await result

    async def _prefill_complete(self, booking: Booking) -> None:
        try:
            await booking.scheduler.call(lambda stub: stub.MarkPrefillComplete, booking.ref, self._timeout)
        except KvscoutError as error:
            # Free implies it: until then the worker only looks busier than it is.
            log.info("prefill of %s not reported: %s", booking.ref.request_id, error)

    async def _free(self, booking: Booking) -> None:
        for pause in (*_RETRY_SECONDS, None):
            try:
                await booking.scheduler.call(lambda stub: stub.Free, booking.ref, self._timeout)
                return
            except KvscoutError as error:
                if pause is None:
                    self._metrics.unfreed.inc()
                    log.warning("%s is left to its lease: %s", booking.ref.request_id, error)
                    return
                await asyncio.sleep(pause)
