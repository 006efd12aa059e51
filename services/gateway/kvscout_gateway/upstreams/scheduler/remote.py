"""The schedulers of a gateway, as one.

::

    reserve ──▶ the stream of the scheduler that is attached (attachment.py)
       │              ├─ answered, or waits in line: overlaps are refreshed meanwhile
       │              └─ it ends: the same at the scheduler that is attached next, as another attempt
       └── for a caller of Route: a unary call with a lease, for as long as that stream says that the scheduler is there
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2
from kvscout_common.errors import (
    Draining,
    KvscoutError,
    NotFound,
)
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.observability import tracing
from kvscout_common.rpc.channel import to_error
from kvscout_common.rpc.request_names import free_request
from kvscout_common.worker import ALL_TENANTS, WorkerRank
from kvscout_gateway.upstreams.failover import Failover, Member, UpstreamDown, is_member_fault
from kvscout_gateway.upstreams.scheduler.attachment import Attachment
from kvscout_gateway.upstreams.scheduler.bookings import Bookings
from kvscout_gateway.upstreams.scheduler.lifecycle import LifecycleStream, body_of
from kvscout_gateway.upstreams.scheduler.link import RETRY_SECONDS, SchedulerLink, SchedulerMember, Schedulers, error_of
from kvscout_gateway.upstreams.scheduler.queue_wait import (
    REFRESH_SECONDS,
    QueueWait,
    WaitedTooLong,
)
from kvscout_gateway.upstreams.scheduler.rpcs import SchedulerRpcs
from kvscout_gateway.upstreams.scheduler.select_request import select_request
from kvscout_gateway.values.booking import Booking, draw_attempt
from kvscout_gateway.values.decision import Choice
from kvscout_gateway.values.overlaps import Overlaps
from kvscout_gateway.values.request import DeadlinePassed, Request

MAX_STREAMS = 4
"""Streams that may end under one request that does not wait in line."""

SETTINGS_SECONDS = 5.0
"""Seconds between two reads of the scheduler's settings."""
UNDO_SECONDS = (0.1, 0.5, 2.0)
"""After each try of a Free for a call that was cancelled."""
MAX_FAILURE_REPORTS = 256
"""Reports of ejected workers, under way; more are dropped: this gateway ejects them all the same."""

log = logging.getLogger("kvscout.gateway")

Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True, eq=False)
class PendingReservation:
    """A request that wants a worker, from scheduler to scheduler."""

    request: Request
    booking: Booking | None
    """Its name, and the attempt that is made now; None for a query."""
    overlaps: Overlaps
    """Overlaps that were sent last."""
    wait: QueueWait
    refresh: Callable[[], Awaitable[Overlaps]]
    """Gives the overlaps of now."""
    given_up: list[scheduler_pb2.RequestRef] = field(default_factory=list)
    """Attempts at other schedulers, which the next one may know: freed first."""

    def message(self) -> bytes:
        """Serialise the `SelectRequest`."""
        return select_request(self.request, self.overlaps, self.booking)

    def give_up_attempt(self, booking: Booking) -> None:
        """Begin another attempt: a booking of the one before, by a scheduler that only hung, cannot be meant."""
        self.given_up.append(booking.ref)
        booking.attempt_id = draw_attempt()


_STREAM_METRICS: tuple[
    tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[SchedulerLink], float]], ...
] = (
    (
        GaugeMetricFamily,
        "kvscout_scheduler_stream_connected",
        "1 = the Lifecycle stream to this scheduler is open",
        lambda link: float(link.stream is not None),
    ),
    (
        CounterMetricFamily,
        "kvscout_scheduler_stream_connects",
        "Times that the stream was opened",
        lambda link: link.connects,
    ),
    (
        CounterMetricFamily,
        "kvscout_scheduler_stream_operations",
        "Operations sent over the stream",
        lambda link: link.operations,
    ),
    (
        CounterMetricFamily,
        "kvscout_scheduler_stream_messages",
        "Messages in which they went",
        lambda link: link.messages,
    ),
    (
        CounterMetricFamily,
        "kvscout_rebooked_requests",
        "Running requests booked anew at a scheduler that did not know them",
        lambda link: link.rebooked,
    ),
    (
        GaugeMetricFamily,
        "kvscout_requests_waiting_in_line",
        "Requests that wait at the scheduler for a worker with room",
        lambda link: link.waiting,
    ),
)


class RemoteScheduler(SchedulerRpcs, Collector):
    """Schedulers behind rpcs: one decides, and holds what this gateway has booked.

    Args:
        addresses: In order of preference.
        security: How they are called.
        timeout_seconds: Longest wait for an answer.
        queue_wait_seconds: Longest wait in line.
        resync: Brings a scheduler up to date that does not know workers which this gateway knows; gives when it was
            last registered one.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity,
        *,
        timeout_seconds: float,
        queue_wait_seconds: float,
        resync: Callable[[Member[Any]], asyncio.Future[float]],
    ) -> None:
        peers: Schedulers = Failover("scheduler", addresses, SchedulerLink, security)
        super().__init__(peers, timeout_seconds=timeout_seconds)
        self.bookings = Bookings()
        self.attachment = Attachment(peers, self.bookings, timeout_seconds=timeout_seconds, resync=resync)
        self._queue_wait = queue_wait_seconds
        self._resync = resync
        self._background: set[asyncio.Task[None]] = set()
        self.overlap_score_weight = 1.0
        self.hold = self.bookings.hold
        self.prefill_complete = self.bookings.prefill_complete
        self.free = self.bookings.free

    @property
    def lists(self) -> tuple[Schedulers, ...]:
        """The lists of peers that may change."""
        return (self.peers,)

    @property
    def members(self) -> list[SchedulerMember]:
        """Every scheduler."""
        return self.peers.members

    def join(self, member: SchedulerMember) -> dict[str, Work]:
        """Return what is to run for a scheduler as long as it is there: nothing, one stream is kept for all."""
        return {}

    def leave(self, member: SchedulerMember) -> None:
        """Forget a scheduler that is gone."""
        self.attachment.left(member)

    def tasks(self) -> dict[str, Work]:
        """Return what runs beside the server, by name."""
        return {"attachment": self.attachment.run, "scheduler-settings": self._follow_settings}

    async def _follow_settings(self) -> None:
        """Read the weight of overlaps, for ever."""
        while True:
            try:
                status = await self.call(lambda stub: stub.GetStatus, types_pb2.GetStatusRequest(tenant=ALL_TENANTS))
                self.overlap_score_weight = status.overlap_score_weight
            except KvscoutError as error:
                log.debug("scheduler settings not read: %s", error)
            await asyncio.sleep(SETTINGS_SECONDS)

    async def reserve(
        self,
        request: Request,
        overlaps: Overlaps,
        booking: Booking | None,
        *,
        knows_workers: bool,
        refresh: Callable[[], Awaitable[Overlaps]],
    ) -> tuple[Choice, Overlaps]:
        """Have a worker chosen, and the request booked on it; return the choice, and the overlaps that it is based on.

        Args:
            request: The request, by the name of its base model.
            overlaps: Overlaps of its prompt.
            booking: What is booked, with the request's own attempt: the booking has that which succeeded. None for a
                query.
            knows_workers: This gateway knows workers that can take it; a scheduler that does not is brought up to date.
            refresh: Gives the overlaps of now.

        Raises:
            UpstreamDown: No scheduler answers.
            WaitedTooLong, DeadlinePassed: No worker had room in time.
            KvscoutError: As a scheduler answers.
        """
        queue_wait = self._queue_wait if request.queue_wait_seconds is None else request.queue_wait_seconds
        pending = PendingReservation(request, booking, overlaps, QueueWait(queue_wait, request.deadline), refresh)
        owned = booking if request.owned else None
        problem = "none keeps its stream"
        with self.bookings.reserving(owned) if owned is not None else nullcontext():
            for _ in range(MAX_STREAMS):
                member, stream = await self.attachment.attached()
                member.calls += 1
                began = time.monotonic()
                try:
                    if booking is None:
                        response = await self._select(stream, pending)
                    elif owned is not None:
                        response = await self._book(member, stream, pending, booking.ref)
                    else:
                        response = await self._lease(member, stream, pending, booking.ref)
                except KvscoutError as error:
                    if isinstance(error, NotFound) and knows_workers and await self._lacked_workers(member, began):
                        continue
                    if not is_member_fault(error):
                        member.works()
                        raise
                    member.failed(error)
                    problem = str(error)
                    await self._until_gone(member, stream, error)
                    response = None
                if response is not None:
                    member.works()
                    if booking is not None:
                        booking.scheduler = member
                    return _choice(response), pending.overlaps
                if owned is not None:
                    pending.give_up_attempt(owned)
                if time.monotonic() - began > REFRESH_SECONDS:
                    pending.overlaps = await refresh()
        raise UpstreamDown(f"no scheduler decides: {problem}", retry_after_seconds=RETRY_SECONDS)

    async def _lacked_workers(self, member: SchedulerMember, since: float) -> bool:
        """Bring a scheduler up to date; return whether it has got workers since then."""
        resynced = self._resync(member)
        await asyncio.wait([resynced], timeout=self._timeout)
        return resynced.done() and resynced.result() >= since

    async def _until_gone(self, member: SchedulerMember, stream: LifecycleStream, error: KvscoutError) -> None:
        """Wait until another stream takes the place of one whose scheduler drains, or cannot be reached."""
        try:
            async with asyncio.timeout(0 if error.answered and not isinstance(error, Draining) else self._timeout):
                await stream.changed.wait()
        except TimeoutError:
            raise UpstreamDown(f"{member.name}: {error}", retry_after_seconds=RETRY_SECONDS) from error

    async def _select(
        self, stream: LifecycleStream, pending: PendingReservation
    ) -> scheduler_pb2.SelectResponse | None:
        result = await stream.ask(body_of("select", pending.message()), self._timeout)
        return _checked(result, stream).select if result is not None else None

    async def _book(
        self,
        member: SchedulerMember,
        stream: LifecycleStream,
        pending: PendingReservation,
        ref: scheduler_pb2.RequestRef,
    ) -> scheduler_pb2.SelectResponse | None:
        for given_up in pending.given_up:
            stream.free(given_up)
        operation = stream.send("select_and_reserve", pending.message())
        in_line = False
        try:
            if not await operation.within(min(self._timeout, pending.wait.seconds_left) / 2):
                stream.probe()
            while not await operation.within(pending.wait.pause):
                # A scheduler that hangs later ends the stream: until then the request is still in line.
                in_line = in_line or stream.carried_out(operation)
                if not pending.wait.seconds_left:
                    if in_line:
                        raise pending.wait.over()
                    raise UpstreamDown(f"{member.name} does not answer", retry_after_seconds=RETRY_SECONDS)
                if stream.carried_out(operation):
                    fresh = await pending.refresh()
                    if not operation.answer.done():
                        stream.drop(operation)
                        pending.overlaps = fresh
                        operation = stream.send("select_and_reserve", pending.message())
                pending.wait.refreshed()
            result = operation.answer.result()
            return _checked(result, stream).select if result is not None else None
        except (asyncio.CancelledError, WaitedTooLong, DeadlinePassed, UpstreamDown):
            stream.drop(operation)
            stream.free(ref)
            raise
        finally:
            stream.drop(operation)

    async def _lease(
        self,
        member: SchedulerMember,
        stream: LifecycleStream,
        pending: PendingReservation,
        ref: scheduler_pb2.RequestRef,
    ) -> scheduler_pb2.SelectResponse | None:
        """Book by a unary call, which is cancelled where the stream ends before it."""
        calling: Any = member.stub.select_and_reserve(
            pending.message(), timeout=pending.wait.seconds_left, **tracing.call_options()
        )

        def cancel(closed: object) -> None:
            calling.cancel()

        stream.closed.add_done_callback(cancel)
        stream.unary_calls += 1
        try:
            response: scheduler_pb2.SelectResponse = await calling
            return response
        except asyncio.CancelledError:
            if not stream.closed.done():
                self._in_background(self._undo(member, ref))
                raise
            return None
        except grpc.aio.AioRpcError as error:
            # The deadline is the line's. A scheduler may see it pass a moment before it does here.
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise pending.wait.over() from None
            raise to_error(error) from error
        finally:
            stream.unary_calls -= 1
            stream.closed.remove_done_callback(cancel)

    def report_failure(self, request: scheduler_pb2.ReportFailureRequest) -> None:
        """Report a worker that is ejected, which concerns the other gateways, too; in the background."""
        if len(self._background) < MAX_FAILURE_REPORTS:
            self._in_background(self._deliver_failure(request))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _undo(self, member: SchedulerMember, ref: scheduler_pb2.RequestRef) -> None:
        """Free what a call may have booked that its caller has cancelled; what cannot be is left to its lease."""
        for pause in UNDO_SECONDS:
            try:
                await member.call(lambda stub: stub.Free, free_request(ref), self._timeout)
                return
            except KvscoutError as error:
                log.debug("%s, if it is booked, is not freed yet: %s", ref.request_id, error)
            await asyncio.sleep(pause)

    async def _deliver_failure(self, request: scheduler_pb2.ReportFailureRequest) -> None:
        try:
            await self.call(lambda stub: stub.ReportFailure, request)
        except KvscoutError as error:
            log.warning("failure of %s not reported: %s", request.worker.worker_id, error)

    async def close(self) -> None:
        """End the stream when what is due on it was sent; close every channel."""
        if self._background:
            await asyncio.wait(self._background, timeout=self._timeout)
        await self.attachment.close()
        await self.peers.close()

    def fill_status(self, member: SchedulerMember, status: gateway_pb2.HelperStatus) -> None:
        """Add to the status of a scheduler what is known here."""
        link = member.stub
        status.stream_connected = link.stream is not None
        status.stream_connects = link.connects
        status.stream_operations = link.operations
        status.stream_messages = link.messages
        status.rebooked = link.rebooked
        status.waiting_in_line = link.waiting

    def collect(self) -> Iterator[Metric]:
        """Return samples of the streams."""
        for kind, name, documentation, value in _STREAM_METRICS:
            family = kind(name, documentation, labels=["scheduler"])
            for member in self.peers.members:
                family.add_metric([member.address], value(member.stub))
            yield family
        yield CounterMetricFamily(
            "kvscout_frees_left_to_lease", "Bookings whose Free could not be delivered", self.bookings.undelivered
        )


def _checked(result: scheduler_pb2.LifecycleResult, stream: LifecycleStream) -> scheduler_pb2.LifecycleResult:
    if result.code:
        raise error_of(result, draining=stream.draining)
    return result


def _choice(response: scheduler_pb2.SelectResponse) -> Choice:
    return Choice(
        WorkerRank(response.worker.worker_id, response.worker.dp_rank),
        response.http_endpoint,
        response.block_size,
        response.overlap_blocks,
        response.effective_overlap_blocks,
        response.uncached_tokens,
        response.cost,
        response.explanation if response.HasField("explanation") else None,
        response.session,
        response.policy_problem,
        response.saved_seconds,
    )
