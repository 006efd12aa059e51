"""The scheduler of this process, as its gateway calls it: a function call where `RemoteScheduler` has a stream."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from math import inf
from typing import Any

from kvscout.v1 import gateway_pb2, scheduler_pb2, types_pb2
from kvscout_common.errors import InternalError, KvscoutError
from kvscout_common.observability import tracing
from kvscout_common.worker import ALL_TENANTS
from kvscout_gateway.upstreams.failover import UpstreamDown
from kvscout_gateway.upstreams.interfaces import Answer, Rpc
from kvscout_gateway.upstreams.scheduler.attachment import REBOOK_SECONDS
from kvscout_gateway.upstreams.scheduler.queue_wait import QueueWait, WaitedTooLong
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.decision import Choice
from kvscout_gateway.values.overlaps import Overlaps, Rows
from kvscout_gateway.values.request import DeadlinePassed, Request
from kvscout_scheduler.messages import translate
from kvscout_scheduler.rpc.operations import Operations
from kvscout_scheduler.service import SchedulerService
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.operations import CompletePrefill, Free, Operation, Outcome, Reserve, Select
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, AnyOverlaps, CommonOverlap
from kvscout_scheduler.values.overlaps import Overlaps as ColumnOverlaps
from kvscout_scheduler.values.request import (
    EMPTY_PROMPT,
    NO_OVERRIDE,
    UNCONSTRAINED,
    Prompt,
    SelectionRequest,
    WorkerConstraints,
)
from kvscout_scheduler.values.reservation import OwnerName, RequestKey, Reservation
from kvscout_scheduler.values.targets import NO_TARGETS, Targets
from kvscout_serve.embedded_indexer import FoundRows

log = logging.getLogger("kvscout.serve")


class EmbeddedScheduler:
    """A scheduler in this process.

    Args:
        service: The scheduler.
        queue_wait_seconds: Longest wait in its queue.
    """

    def __init__(self, service: SchedulerService, *, queue_wait_seconds: float) -> None:
        self.address = ""
        """host:port of this process's own server; "" = not bound yet."""
        self.calls = self.failures = 0
        self._service = service
        self._scheduler = service.scheduler
        self._queue_wait = queue_wait_seconds
        self._open: set[Booking] = set()
        self._numbers = count(1)
        self._queued: dict[int, asyncio.Future[Outcome]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        owner = OwnerName(ALL_TENANTS, f"embedded-{secrets.token_hex(8)}")
        self._scheduler.connect_owner(owner, ())
        self._owned = Operations(self._scheduler, owner, self._decided, service.remote_operations)
        self._leased = Operations(self._scheduler, None, self._decided, service.remote_operations)

    @property
    def overlap_score_weight(self) -> float:
        """Return the weight of overlaps; 0 = prefix caches are ignored."""
        return self._scheduler.settings.overlap_score_weight

    async def reserve(
        self,
        request: Request,
        overlaps: Overlaps,
        booking: Booking | None,
        *,
        knows_workers: bool,
        refresh: Callable[[], Awaitable[Overlaps]],
    ) -> tuple[Choice, Overlaps]:
        """Have a worker chosen, and the request booked on it; see `Scheduler.reserve` of the gateway."""
        self.calls += 1
        operations = self._owned if request.owned else self._leased
        number, operation = next(self._numbers), _select(request, overlaps, booking)
        outcome = operations.carry_out(number, operation)
        if outcome is None:
            outcome, overlaps = await self._wait(operations, number, request, overlaps, booking, refresh)
        if isinstance(outcome, InternalError):
            # A defect of the scheduler, not of the request: as of one behind rpcs, the gateway goes on without it.
            self.failures += 1
            raise UpstreamDown(f"scheduler: {outcome}")
        if isinstance(outcome, KvscoutError):
            raise outcome
        if not isinstance(outcome, Decision):
            raise TypeError(f"a selection ended with {outcome!r}")
        if booking is not None:
            booking.scheduler = self
        return _choice(outcome), overlaps

    async def _wait(
        self,
        operations: Operations,
        number: int,
        request: Request,
        overlaps: Overlaps,
        booking: Booking | None,
        refresh: Callable[[], Awaitable[Overlaps]],
    ) -> tuple[Outcome, Overlaps]:
        """Wait in the queue; the request joins it again with overlaps of now, at the place that it has."""
        seconds = self._queue_wait if request.queue_wait_seconds is None else request.queue_wait_seconds
        wait = QueueWait(seconds, request.deadline)
        try:
            while True:
                decided = self._queued[number] = asyncio.get_running_loop().create_future()
                if (await asyncio.wait([decided], timeout=wait.pause))[0]:
                    return decided.result(), overlaps
                if not wait.seconds_left:
                    raise wait.over()
                fresh = await refresh()
                if decided.done():
                    return decided.result(), overlaps
                del self._queued[number]
                number, overlaps = next(self._numbers), fresh
                outcome = operations.carry_out(number, _select(request, overlaps, booking))
                if outcome is not None:
                    return outcome, overlaps
                wait.refreshed()
        except (asyncio.CancelledError, WaitedTooLong, DeadlinePassed):
            if booking is not None:
                operations.carry_out(next(self._numbers), _free(booking))
            raise
        finally:
            self._queued.pop(number, None)

    def _decided(self, number: int, operation: Operation, outcome: Outcome) -> None:
        decided = self._queued.get(number)
        if decided is not None and not decided.done():
            decided.set_result(outcome)
        elif isinstance(outcome, KvscoutError) and not isinstance(operation, Select):
            self._failed(operation, outcome)

    def hold(self, booking: Booking) -> None:
        """Take over a booking; one that was not booked is booked now, as a request that runs."""
        self._open.add(booking)
        if booking.scheduler is None:
            self._book(booking)

    def _book(self, booking: Booking) -> None:
        """Book what runs; what cannot be booked is tried again until it ends."""
        if booking not in self._open or booking.scheduler is not None:
            return
        output = booking.output
        reservation = Reservation(
            _key(booking),
            booking.attempt_id,
            booking.worker,
            booking.isl_tokens,
            booking.isl_tokens - booking.cached_tokens,
            output.expected_tokens,
            booking.block_hashes,
            max_output_tokens=output.max_tokens,
            output_class=output.output_class,
            estimates_prefill=output.unseen,
            running=True,
            prefilled=booking.prefilled,
            session=booking.session_id,
        )
        operation = Reserve(reservation)
        outcome = self._owned.carry_out(next(self._numbers), operation)
        if isinstance(outcome, KvscoutError):
            self._failed(operation, outcome)
            asyncio.get_running_loop().call_later(REBOOK_SECONDS, self._book, booking)
        else:
            booking.scheduler = self

    def prefill_complete(self, booking: Booking) -> None:
        """Report the first token."""
        if booking not in self._open or booking.prefilled:
            return
        booking.prefilled = True
        if booking.scheduler is not None:
            self._carry_out(CompletePrefill(_key(booking), booking.attempt_id))

    def free(self, booking: Booking, output_tokens: int = 0) -> None:
        """Free a booking. A second call does nothing."""
        if booking in self._open:
            self._open.remove(booking)
            booking.output_tokens = output_tokens
            if booking.scheduler is not None:
                self._carry_out(_free(booking))

    def _carry_out(self, operation: Operation) -> None:
        outcome = self._owned.carry_out(next(self._numbers), operation)
        if isinstance(outcome, KvscoutError):
            self._failed(operation, outcome)

    def _failed(self, operation: Operation, error: KvscoutError) -> None:
        self.failures += 1
        log.debug("%s: %s", type(operation).__name__, error)

    async def call(self, method: Rpc[Answer], request: object) -> Answer:
        """Call an rpc of the scheduler.

        Raises:
            KvscoutError: As the scheduler does.
        """
        servicer: Any = self._service.servicer
        answer: Answer = await method(servicer)(request, None)
        return answer

    async def call_booked(
        self, method: Rpc[Answer], request: object, has_it: Callable[[Answer], bool] = lambda answer: True
    ) -> Answer:
        """Call an rpc about a request that Route booked."""
        return await self.call(method, request)

    async def renew(self, request: scheduler_pb2.RenewRequest) -> scheduler_pb2.RenewResponse:
        """Renew leases of requests that Route booked."""
        return await self.call(lambda stub: stub.Renew, request)

    async def set_busy_thresholds(
        self, request: types_pb2.SetBusyThresholdsRequest
    ) -> types_pb2.SetBusyThresholdsResponse:
        """Change thresholds."""
        return await self.call(lambda stub: stub.SetBusyThresholds, request)

    def report_failure(self, request: scheduler_pb2.ReportFailureRequest) -> None:
        """Have a worker cool down, here and at the other replicas."""
        task = asyncio.ensure_future(self._report_failure(request))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _report_failure(self, request: scheduler_pb2.ReportFailureRequest) -> None:
        try:
            await self.call(lambda stub: stub.ReportFailure, request)
        except KvscoutError as error:
            log.debug("a failed worker was not reported: %s", error)

    def status(self) -> gateway_pb2.HelperStatus:
        """Return its state, as of an upstream."""
        return gateway_pb2.HelperStatus(
            kind=gateway_pb2.HELPER_KIND_SCHEDULER,
            address=self.address,
            healthy=True,
            calls=self.calls,
            failures=self.failures,
            waiting_in_line=len(self._queued),
        )


def _select(request: Request, overlaps: Overlaps, booking: Booking | None) -> Select:
    prompts = [
        Prompt(hashes, pool.block_size, pool.eagle, _overlaps(overlaps.rows.get(pool)))
        for pool, hashes in overlaps.hashes.items()
    ]
    if prompts:
        prompts[0].eagle = None  # as the pool's workers want it
    output = request.output
    selection = SelectionRequest(
        model=request.model,
        isl_tokens=request.prompt.isl_tokens,
        prompt=prompts[0] if prompts else EMPTY_PROMPT,
        other_prompts=tuple(prompts[1:]),
        tenant=request.tenant,
        role=request.role,
        request_id=booking.request_id if booking is not None else "",
        attempt_id=booking.attempt_id if booking is not None else 0,
        constraints=_constraints(request),
        override=NO_OVERRIDE if request.override is None else translate.override_from_proto(request.override),
        priority=request.priority,
        caller=request.caller,
        fairness_id=request.fairness_id,
        deadline_seconds=request.seconds_left() if request.deadline < inf else inf,
        targets=_targets(request),
        expected_output_tokens=output.expected_tokens,
        max_output_tokens=output.max_tokens,
        output_class=output.output_class,
        estimates_prefill=output.unseen,
        charge_prefill=not request.remote_prefill,
        explain=request.explain,
        session=request.session.session_id,
        by_lineage=request.session.by_lineage,
        overlaps_unknown=overlaps.unknown,
        parent_session=request.session.parent_id,
    )
    return Select(selection, booking is not None, request.lease_seconds, tracing.traceparent())


def _targets(request: Request) -> Targets:
    ttft, itl = request.ttft_target_seconds, request.itl_target_seconds
    return Targets(ttft, itl) if ttft < inf or itl < inf else NO_TARGETS


def _overlaps(rows: Rows | None) -> AnyOverlaps:
    if isinstance(rows, FoundRows):
        return rows.overlaps
    if rows is None:
        return NO_OVERLAPS
    return ColumnOverlaps(*rows.columns, others=CommonOverlap(*rows.others) if rows.others else None)


def _constraints(request: Request) -> WorkerConstraints:
    pinned, allowed, excluded = request.pinned, request.allowed, request.excluded
    labels, lora_name = request.required_labels, request.lora_name
    if not (pinned or request.pinned_rank is not None or allowed or excluded or labels or lora_name):
        return UNCONSTRAINED
    named = frozenset(allowed), frozenset(excluded), frozenset(labels.items())
    return WorkerConstraints(pinned, request.pinned_rank, *named, lora_name)


def _choice(decision: Decision) -> Choice:
    spec, explanation = decision.spec, decision.explanation
    return Choice(
        decision.rank,
        spec.http_endpoint,
        spec.block_size,
        decision.overlap_blocks,
        decision.effective_overlap_blocks,
        decision.uncached_tokens,
        decision.cost,
        None if explanation is None else translate.explanation_to_proto(explanation),
        decision.session,
        decision.policy_problem,
        decision.saved_seconds,
    )


def _key(booking: Booking) -> RequestKey:
    return RequestKey(booking.tenant, booking.model, booking.role, booking.request_id)


def _free(booking: Booking) -> Free:
    return Free(_key(booking), booking.attempt_id, booking.output_tokens)
