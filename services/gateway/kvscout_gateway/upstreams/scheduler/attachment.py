"""To which scheduler this gateway is attached: the one that decides, and that holds the bookings.

::

    the list ──▶ attach ──────────────▶ stay ───────────▶ move
                 hello: all in flight   book there what   the stream broke, it drains, or one that comes
                 book there what it     it does not       before it in the list has been well for a while
                 does not know          have

Attaching is always the same, whether a scheduler restarted, is another one of the list, or only the connection broke:
all that runs is listed, and what the scheduler does not know is booked there with `reserve`. A copy that an earlier
scheduler has ends by itself: 10 s after the stream there ended, or with the next hello there.

A scheduler that is back is not used immediately (`STABLE_SECONDS`, doubled for one that did not last), so that one that
comes and goes does not take the bookings with it each time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvscout.v1 import types_pb2
from kvscout_common.errors import DeadlineExceeded, Draining, KvscoutError, NotFound
from kvscout_common.process.ticks import until_tick
from kvscout_gateway.upstreams.failover import Member, UpstreamDown
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.lifecycle import CLOSE_SECONDS, LifecycleStream
from kvscout_gateway.upstreams.scheduler.link import SchedulerMember, Schedulers, error_of
from kvscout_gateway.values.booking import Booking

log = logging.getLogger("kvscout.gateway")

RETRY_SECONDS = 0.25
"""Between two rounds of the list while no scheduler of it can be attached to."""
STUCK_SHARE = 0.75
"""Of the time for an answer: a stream on which nothing comes for that long is broken off, where an answer is due."""
REBOOK_SECONDS = 1.0
"""Between two health checks of the schedulers that come before the one in use, and between two tries of booking what
the scheduler refused, mostly because it does not know the worker yet."""
HEALTH_TIMEOUT_SECONDS = 0.5
STABLE_SECONDS = 5.0
MAX_STABLE_SECONDS = 60.0
REBOOK_BATCH = 256


@dataclass(slots=True)
class _Health:
    """A member that is not in use, and comes before the one that is."""

    well_since: float | None = None
    stable_seconds: float = field(default_factory=lambda: STABLE_SECONDS)
    returned_at: float = 0.0
    """Time of the last return to it."""


def owner_name() -> str:
    """Return a name that no other gateway has, for the life of this process."""
    return f"gateway-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Attachment:
    """The streams of one gateway to its schedulers, one at a time."""

    def __init__(
        self,
        schedulers: Schedulers,
        bookings: Bookings,
        *,
        timeout_seconds: float,
        resync: Callable[[Member[Any]], object],
        owner_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Attach to none yet.

        Args:
            schedulers: In order of preference.
            bookings: What is in flight.
            timeout_seconds: Longest wait for one answer of a scheduler.
            resync: Called with a scheduler that does not know workers on which requests run.
            owner_id: Name of this gateway; "" = one that no other has.
            clock: Monotonic seconds.
        """
        self._schedulers = schedulers
        self._bookings = bookings
        self._timeout = timeout_seconds
        self._resync = resync
        self.owner_id = owner_id or owner_name()
        self._clock = clock
        self._health: defaultdict[SchedulerMember, _Health] = defaultdict(_Health)
        self._closing: set[asyncio.Task[None]] = set()
        self._opened_at = 0
        """When the newest stream was opened, microseconds since the Unix epoch."""
        self._down = "no scheduler is attached"
        """Why requests do not wait for a scheduler; "" = there is one, or it is not known yet that there is none."""
        self._round: asyncio.Future[None] | None = None
        """Done when one is attached, or none of the list can be."""

    async def run(self) -> None:
        """Stay attached to the best scheduler there is, for ever."""
        self._down = ""
        member: SchedulerMember | None = None
        first: SchedulerMember | None = None
        while True:
            if member is None:
                member = await self._attach_to_any(first)
            if member is None:
                first = None
                await asyncio.sleep(RETRY_SECONDS)
            else:
                member, first = await self._stay(member)

    async def attached(self) -> tuple[SchedulerMember, LifecycleStream]:
        """Return the scheduler that decides and its stream; wait while it is not known which that is.

        Raises:
            UpstreamDown: There is none.
        """
        while True:
            member = self._schedulers.primary
            stream = member.stub.stream if member is not None else None
            if member is not None and stream is not None and not stream.draining:
                return member, stream
            if self._down:
                raise UpstreamDown(self._down, retry_after_seconds=1.0)
            if self._round is None:
                self._round = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._round])

    def _round_over(self, problem: str = "") -> None:
        self._down = problem
        if self._round is not None:
            self._round.set_result(None)
            self._round = None

    async def close(self) -> None:
        """End every stream; what is still booked ends after the schedulers' grace time."""
        for member in self._schedulers.members:
            self._leave(member)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _attach_to_any(self, first: SchedulerMember | None) -> SchedulerMember | None:
        """Attach to the first one that can be; `first` is tried before the others, those that hang last."""
        problem = "no scheduler is configured"
        for member in sorted(self._schedulers.preferred(), key=lambda member: member is not first):
            try:
                await self._attach(member)
            except KvscoutError as error:
                problem = f"{member.name}: {error}"
                member.failed(error)
                log.debug("not attached to %s: %s", member.name, error)
            else:
                return member
        self._round_over(problem)
        return None

    async def _attach(self, member: SchedulerMember) -> None:
        """Open the stream, and have everything booked there that runs.

        Raises:
            KvscoutError: It is away, or drains.
        """
        link = member.stub
        member.calls += 1
        listed = self._bookings.in_flight()
        self._opened_at = max(time.time_ns() // 1000, self._opened_at + 1)
        stream = LifecycleStream(
            link.open_lifecycle,
            self.owner_id,
            [booking.ref for booking in listed],
            opened_at=self._opened_at,
            stuck_seconds=self._timeout * STUCK_SHARE,
        )
        stream.closed.add_done_callback(lambda closed: self._bookings.stream_ended(stream))
        try:
            async with asyncio.timeout(self._timeout):
                unknown = await asyncio.shield(stream.hello)
        except TimeoutError:
            stream.break_off(DeadlineExceeded("no answer to the hello"))
            raise DeadlineExceeded("no answer to the hello") from None
        except asyncio.CancelledError:
            stream.break_off(DeadlineExceeded("given up"))
            raise
        if unknown is None:
            raise stream.error
        if stream.draining:
            stream.break_off(Draining("the scheduler is draining"))
            raise Draining("the scheduler is draining")
        link.use(stream)
        member.works()
        self._bookings.listed(member, listed, unknown)
        before, self._schedulers.primary = self._schedulers.primary, member
        self._round_over()
        await self._rebook(member, stream)
        if before is not member:
            log.info("%s decides from now on, with %d requests in flight", member.name, len(listed))
        for other in self._schedulers.members:
            if other is not member:
                self._leave(other)

    async def _stay(self, member: SchedulerMember) -> tuple[SchedulerMember | None, SchedulerMember | None]:
        """Follow a stream to its end; return the member that is attached then, and else the one to try first."""
        self._health[member].well_since = None
        while (stream := member.stub.stream) is not None:
            try:
                async with asyncio.timeout(until_tick(REBOOK_SECONDS)):
                    await stream.changed.wait()
            except TimeoutError:
                pass
            gone = member not in self._schedulers.members
            if gone or (stream.draining and not stream.ended):
                log.info("%s %s", member.name, "is no longer there" if gone else "drains")
                return await self._move_from(member), None
            await self._rebook(member, stream)
            better = await self._better(member)
            if better is not None:
                try:
                    await self._attach(better)
                except KvscoutError as error:
                    self._unwell(better)
                    log.debug("could not return to %s: %s", better.name, error)
                else:
                    return better, None
        ended = member.stub.drop_stream()
        why = ended.error if ended is not None else None
        log.warning("the stream to %s was lost: %s", member.name, why)
        self._unwell(member)
        # A connection that broke is made again first; one that hangs, or a scheduler that drains, is tried last.
        if isinstance(why, DeadlineExceeded | Draining):
            member.failed(why)
            return None, None
        return None, member

    def left(self, member: SchedulerMember) -> None:
        """Forget a scheduler that is no longer on the list."""
        self._health.pop(member, None)

    async def _move_from(self, member: SchedulerMember) -> SchedulerMember | None:
        self._unwell(member)
        for other in self._schedulers.members:
            if other is not member:
                try:
                    await self._attach(other)
                except KvscoutError as error:
                    log.debug("not attached to %s: %s", other.name, error)
                else:
                    self._leave(member)  # it may be on the list no more, and no other in its place
                    return other
        # Nowhere to go, and nobody to wait for: it may take a while to drain.
        self._leave(member)
        return None

    async def _rebook(self, member: SchedulerMember, stream: LifecycleStream) -> None:
        """Book at a scheduler what runs and is not booked there."""
        unbooked = self._bookings.unbooked(member)
        for start in range(0, len(unbooked), REBOOK_BATCH):
            await self._rebook_some(member, stream, unbooked[start : start + REBOOK_BATCH])
            if stream.ended:
                return

    async def _rebook_some(self, member: SchedulerMember, stream: LifecycleStream, unbooked: list[Booking]) -> None:
        sent = [(booking, stream.send("reserve", booking.reserve_request())) for booking in unbooked]
        _, late = await asyncio.wait([operation.answer for _, operation in sent], timeout=self._timeout)
        if late:
            stream.break_off(DeadlineExceeded("no answer on the stream"))
        for booking, operation in sent:
            result = operation.answer.result() if operation.answer.done() else None
            if result is None:
                continue
            if result.code:
                error = error_of(result)
                if isinstance(error, NotFound):
                    self._resync(member)
                log.debug("%s is not booked at %s yet: %s", booking.request_id, member.name, error)
                continue
            member.stub.rebooked += 1
            self._bookings.moved(booking, member)

    async def _better(self, used: SchedulerMember) -> SchedulerMember | None:
        """Return a scheduler that comes earlier in the list, and has been well for long enough."""
        earlier = list(itertools.takewhile(lambda member: member is not used, self._schedulers.members))
        if not earlier:
            return None
        answers = await asyncio.gather(*map(self._is_well, earlier))
        now = self._clock()
        for member, well in zip(earlier, answers, strict=True):
            health = self._health[member]
            if not well:
                health.well_since = None
            elif health.well_since is None:
                health.well_since = now
            elif now >= health.well_since + health.stable_seconds:
                health.returned_at = now
                return member
        return None

    async def _is_well(self, member: SchedulerMember) -> bool:
        request = types_pb2.GetStatusRequest(tenant="*")
        try:
            status = await member.call(lambda stub: stub.GetStatus, request, min(self._timeout, HEALTH_TIMEOUT_SECONDS))
        except KvscoutError:
            return False
        return not status.service.draining

    def _unwell(self, member: SchedulerMember) -> None:
        """Record a failure: one soon after it was gone back to has it wait longer the next time."""
        health = self._health[member]
        health.well_since = None
        lasted = self._clock() - health.returned_at
        if health.returned_at and lasted < MAX_STABLE_SECONDS:
            health.stable_seconds = min(2 * health.stable_seconds, MAX_STABLE_SECONDS)
        else:
            health.stable_seconds = STABLE_SECONDS
        health.returned_at = 0.0

    def _leave(self, member: SchedulerMember) -> None:
        stream = member.stub.drop_stream()
        if stream is not None:
            task = asyncio.get_running_loop().create_task(stream.close(CLOSE_SECONDS), name=f"leave {member.name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
