"""Keeping track of what this gateway has booked: every booking is held while it runs and freed exactly once.

A booking that was made over the stream to its scheduler is held by that stream (`attachment`); one that was made by a
unary call has a lease, which is renewed. A booking follows its request when this gateway goes to another scheduler.

Reports are delivered in the background, so that neither a cancelled call nor a slow scheduler delays anything. A Free
that cannot be delivered is repeated, also at the scheduler in use by then, until a lease would be over anyway; that is
counted and logged.

Tasks are bounded by bookings: nothing is booked at a scheduler that is down, so that what waits for it is what was in
flight when it went.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.rpc.request_names import free_request
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.upstreams.failover import is_member_fault
from kvscout_gateway.upstreams.scheduler.booking import Booking, SchedulerMember, Schedulers
from kvscout_gateway.upstreams.scheduler.lifecycle import Name, name_of

log = logging.getLogger("kvscout.gateway")

RETRY_SECONDS = (0.1, 0.5, 2.0, 5.0)
"""Pauses between tries of a Free; the last one goes on."""
LOST_RETRIES = 2
"""Further tries of a Free for what may have been booked: the scheduler undoes most of it itself."""


class Bookings:
    """The bookings of one gateway: as many as it has requests in flight."""

    def __init__(
        self,
        schedulers: Schedulers,
        metrics: GatewayMetrics,
        *,
        lease_seconds: int,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keeps bookings.

        Args:
            schedulers: In order of preference.
            metrics: Where Frees that could not be delivered are counted.
            lease_seconds: Lease of bookings that have one, renewed at a third of it.
            timeout_seconds: Longest wait for one answer of a scheduler.
            clock: Monotonic seconds.
        """
        self._schedulers = schedulers
        self._metrics = metrics
        self._lease_seconds = lease_seconds
        self._timeout = timeout_seconds
        self._clock = clock
        self._open: set[Booking] = set()
        self._asked: set[Booking] = set()
        self._reports: dict[Booking, asyncio.Future[Any]] = {}
        """The last report of each booking, while it is under way."""
        self._closing = asyncio.Event()

    @contextmanager
    def asking(self, booking: Booking) -> Iterator[None]:
        """For as long as a booking is being made: a scheduler that is attached to meanwhile must not end it."""
        self._asked.add(booking)
        try:
            yield
        finally:
            self._asked.remove(booking)

    def add(self, booking: Booking) -> None:
        """Takes over a booking that was just made, or would have been, had a scheduler answered."""
        self._open.add(booking)

    def in_flight(self) -> list[Booking]:
        """All that runs, and all that is being booked."""
        return [*self._open, *self._asked]

    def unbooked(self, member: SchedulerMember) -> list[Booking]:
        """What runs and is not booked at a scheduler."""
        return [booking for booking in self._open if booking.scheduler is not member]

    def listed(self, member: SchedulerMember, listed: Collection[Booking], unknown: Collection[Name]) -> None:
        """A scheduler has been told what is in flight, and holds it from now on.

        Args:
            member: The scheduler.
            listed: What it was told of.
            unknown: What of it is not booked there.
        """
        for booking in listed:
            if name_of(booking.ref) in unknown:
                if booking.scheduler is member:
                    booking.scheduler = None
            elif booking.scheduler is not member and booking.worker is not None:
                self.moved(booking, member)
            else:
                # Another replica may have had it meanwhile, and may not have heard that its prefill is over.
                booking.leased = booking.prefill_reported = False
                if booking in self._open:
                    self._send_prefill(booking)

    def moved(self, booking: Booking, member: SchedulerMember) -> None:
        """A booking is held by another scheduler from now on."""
        if booking.leased and booking.scheduler is not None and booking.scheduler is not member:
            booking.elsewhere.append(booking.scheduler)
        booking.elsewhere = [other for other in booking.elsewhere if other is not member]
        booking.scheduler, booking.leased, booking.prefill_reported = member, False, False
        if booking in self._open:
            self._send_prefill(booking)
        else:
            # It ended meanwhile. If the stream ends before this comes, the next hello does not list it.
            member.stub.tell("free", booking.ref, booking.output_tokens)

    def mark_prefill_complete(self, booking: Booking) -> None:
        """Reports the first token; returns at once."""
        if booking in self._open:
            booking.prefilled = True
            if not self._send_prefill(booking) and booking.scheduler is not None:
                self._report(booking, self._prefill_complete(booking, booking.scheduler))

    def free(self, booking: Booking, output_tokens: int = 0) -> None:
        """Frees a booking; returns at once. A second call does nothing.

        Args:
            booking: Which.
            output_tokens: That were generated; 0 = unknown.
        """
        if booking not in self._open:
            return
        booking.output_tokens = output_tokens
        self._open.remove(booking)
        for member in booking.elsewhere:
            self.free_lost(Booking(booking.ref, member))
        if booking.scheduler is None:
            return
        before = self._reports.get(booking)
        # One that is under way by a unary call could be overtaken by the stream; operations of one stream keep order.
        stub = booking.scheduler.stub
        operation = None if isinstance(before, asyncio.Task) else stub.tell("free", booking.ref, output_tokens)
        if operation is None:
            self._report(booking, self._free(booking))
            return
        self._reports[booking] = operation.answer
        operation.answer.add_done_callback(partial(self._freed, booking))

    def free_lost(self, booking: Booking) -> None:
        """Frees what may have been booked by a call whose answer did not come; returns at once."""
        self._report(booking, self._free_lost(booking))

    async def freed(self, booking: Booking) -> None:
        """Waits until the reports of a booking are delivered, at most as long as one answer may take."""
        deadline = self._clock() + self._timeout
        while (report := self._reports.get(booking)) is not None and (left := deadline - self._clock()) > 0:
            await asyncio.wait([report], timeout=left)

    async def settle(self) -> None:
        """Waits until every report under way is delivered. What fails from now on is tried once more, then left to
        the schedulers: whoever stops does not wait for one that is gone."""
        self._closing.set()
        while self._reports:
            await asyncio.wait(self._reports.values())

    async def renew(self) -> None:
        """Renews the leases of what runs, for ever."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            await self.renew_once()

    async def renew_once(self) -> None:
        """Renews the leases of what runs and has one, one call a scheduler and tenant."""
        groups: defaultdict[tuple[int, str], list[tuple[Booking, SchedulerMember]]] = defaultdict(list)
        for booking in self._open:
            if booking.leased and booking.scheduler is not None:
                groups[id(booking.scheduler), booking.ref.tenant].append((booking, booking.scheduler))
        for (_, tenant), held in groups.items():
            scheduler = held[0][1]
            request = scheduler_pb2.RenewRequest(
                tenant=tenant, requests=[booking.ref for booking, _ in held], lease_seconds=self._lease_seconds
            )
            try:
                answer = await scheduler.call(lambda stub: stub.Renew, request, self._timeout)
            except KvscoutError as error:
                log.warning("could not renew %d bookings at %s: %s", len(held), scheduler.name, error)
                continue
            # Those that were freed while the call was under way are no loss.
            gone = sum(held[index][0] in self._open for index in answer.unknown)
            if gone:
                log.warning("%d running requests are no longer booked at %s", gone, scheduler.name)

    def _send_prefill(self, booking: Booking) -> bool:
        """Reports the first token over the stream, if it is out; whether that is done, or need not be."""
        if not booking.prefilled or booking.prefill_reported:
            return True
        operation = booking.scheduler.stub.tell("prefill_complete", booking.ref) if booking.scheduler else None
        if operation is None:
            return False
        self._reports[booking] = operation.answer
        operation.answer.add_done_callback(partial(self._prefill_reported, booking))
        return True

    def _prefill_reported(self, booking: Booking, answer: asyncio.Future[scheduler_pb2.LifecycleResult | None]) -> None:
        self._over(booking, answer)
        # If the stream ended, it is told again when the next one is open.
        booking.prefill_reported = answer.result() is not None

    def _freed(self, booking: Booking, answer: asyncio.Future[scheduler_pb2.LifecycleResult | None]) -> None:
        self._over(booking, answer)
        result = answer.result()
        if result is None or result.code:
            self._report(booking, self._free(booking))

    def _over(self, booking: Booking, report: asyncio.Future[Any]) -> None:
        if self._reports.get(booking) is report:
            del self._reports[booking]

    def _report(self, booking: Booking, delivery: Coroutine[Any, Any, None]) -> None:
        """Delivers a report after the earlier ones of its booking."""
        before = self._reports.get(booking)

        async def deliver() -> None:
            if before is not None:
                await asyncio.wait([before])
            await delivery

        def done(task: asyncio.Task[None]) -> None:
            self._over(booking, task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("report of %s failed", booking.ref.request_id, exc_info=error)

        task = asyncio.get_running_loop().create_task(deliver())
        self._reports[booking] = task
        task.add_done_callback(done)

    async def _prefill_complete(self, booking: Booking, scheduler: SchedulerMember) -> None:
        try:
            await scheduler.call(lambda stub: stub.prefill_complete, booking.ref, self._timeout)
        except KvscoutError as error:
            # Free implies it: until then the worker only looks busier than it is.
            log.debug("prefill of %s not reported: %s", booking.ref.request_id, error)
        else:
            booking.prefill_reported = booking.scheduler is scheduler

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
        assert booking.scheduler is not None
        error = await self._free_at(booking.scheduler, booking)
        in_use = self._schedulers.primary
        if error is None or booking.leased or in_use is None or in_use is booking.scheduler:
            return error
        # Where it was ends it by itself; a replica of that may know of it, and would keep it for longer.
        return await self._free_at(in_use, booking) if is_member_fault(error) else error

    async def _free_at(self, scheduler: SchedulerMember, booking: Booking) -> KvscoutError | None:
        try:
            request = free_request(booking.ref, booking.output_tokens)
            await scheduler.call(lambda stub: stub.free, request, self._timeout)
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
