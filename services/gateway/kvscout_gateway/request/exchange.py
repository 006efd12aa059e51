"""An exchange: one request of a client from its begin to its end, whichever front it came through.

::

    front ─request▶ Exchange ──plan──▶ attempts: place ─▶ send ─▶ relay ─▶ free
                       │                       └── failed, and nothing passed on: once more, elsewhere
                       └── place: an attempt that the front sends itself, and tells of first output, end, failure

A worker that fails before the client has a byte costs one more try elsewhere; after that nothing is retried. Who pays
for a failure, the request or the worker, is in the table of `engines.faults`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from types import TracebackType
from typing import TypeAlias

from kvscout_common.errors import (
    DeadlineExceeded,
    Draining,
    FailedPrecondition,
    InternalError,
    KvscoutError,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.http.http import SinkGone
from kvscout_common.identity.tenant_limits import Limit, TenantLimits
from kvscout_gateway.engines.causes import cause_of
from kvscout_gateway.engines.faults import Ejection, EngineFailed, failed_everywhere
from kvscout_gateway.request.attempt import Attempt, AttemptContext, Reply
from kvscout_gateway.request.failures import FailureLog, RequestSummary
from kvscout_gateway.request.plan import Plan
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.request import Request, new_request_id
from kvscout_gateway.values.session import worker_of

Tried: TypeAlias = list[tuple[Attempt, EngineFailed]]
"""Attempts that failed, and how."""
MAX_UNREACHABLE = 8
"""Engines without a connection that a request meets beside those that count as tries: after a node or a rack is lost,
all that were there look idle until their health checks say otherwise."""
Use: TypeAlias = Callable[[Attempt], Awaitable[None]]
ReportFailure: TypeAlias = Callable[[str, Decision, EngineFailed, float], object]


class Exchanges:
    """All exchanges of one gateway."""

    def __init__(
        self,
        context: AttemptContext,
        *,
        plan: Callable[[Request], Plan],
        report_failure: ReportFailure,
        failure_log: FailureLog,
        draw_attempt: Callable[[], int],
        migration_limit: int,
        max_in_flight: int,
        lease_seconds: int,
        limits: TenantLimits | None = None,
    ) -> None:
        """Run requests.

        Args:
            context: What attempts are run with.
            plan: How a request is to be run.
            report_failure: Told of each failure of a worker, and for how many seconds it is left out for it.
            failure_log: Counts and remembers requests that fail.
            draw_attempt: A random number, unique to a call, of `MAX_TRIES`s: a request id that is used again is another
                attempt, and what frees the one cannot free the other.
            migration_limit: Further tries of a request after a failure; those without a connection do not count.
            max_in_flight: Exchanges at once.
            lease_seconds: Of bookings that have a lease.
            limits: Of each tenant; None = there are none.
        """
        self.context = context
        self.plan = plan
        self.report_failure = report_failure
        self.failure_log = failure_log
        self.draw_attempt = draw_attempt
        self.migration_limit = migration_limit
        self._max_in_flight = max_in_flight
        self.lease_seconds = lease_seconds
        self.limits = limits if limits is not None else TenantLimits()
        self.draining = False
        """Refuses what is new."""
        self.in_flight = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self.requests = 0
        self.failures = 0

    def begin(self, request: Request, *, admitted: bool = False) -> Exchange:
        """Return an exchange, to be entered and left.

        Args:
            request: What is asked of a worker; without a request_id it gets one.
            admitted: The caller is in `admit` for its request.
        """
        if not request.request_id:
            request = replace(request, request_id=new_request_id())
        request.trace()
        return Exchange(self, request, admitted=admitted)

    def require_open(self) -> None:
        """Raise unless requests are taken.

        Raises:
            Draining: They are not any more.
        """
        if self.draining:
            raise Draining("the gateway is draining")

    def admit(self, tenant: str) -> AdmittedRequest:
        """Return one of the places for requests, to be entered and left: before the body is read, where there is one.

        Args:
            tenant: Whose request it is.
        """
        return AdmittedRequest(self, tenant)

    def enter(self, tenant: str) -> None:
        """Take a place; see `admit`.

        Raises:
            Draining, ResourceExhausted: This gateway takes nothing now, or nothing more of this tenant.
        """
        self.require_open()
        if self.in_flight >= self._max_in_flight:
            raise ResourceExhausted(
                f"{self.in_flight} requests are in flight (limit)", retry_after_seconds=1.0, cause="busy"
            )
        self.limits.take(Limit.REQUESTS, tenant)
        self.in_flight += 1
        self.requests += 1
        if self.in_flight == 1:
            self.idle.clear()

    def leave(self, tenant: str) -> None:
        """Give a place back."""
        self.limits.give_back(Limit.REQUESTS, tenant)
        self.in_flight -= 1
        if self.in_flight == 0:
            self.idle.set()

    def over(self, tenant: str, model: str, error: BaseException | None) -> str:
        """Count a request that has ended; return its outcome."""
        outcome = "ok"
        if isinstance(error, Exception) and not isinstance(error, SinkGone):
            outcome = type(error).__name__ if isinstance(error, KvscoutError) else InternalError.__name__
            self.failures += 1
        elif error is not None:
            outcome = "cancelled"
        self.context.metrics.of(tenant, model).ended(outcome)
        return outcome


class AdmittedRequest:
    """A place for one request; see `Exchanges.admit`."""

    __slots__ = ("_exchanges", "_tenant")

    def __init__(self, exchanges: Exchanges, tenant: str) -> None:
        self._exchanges = exchanges
        self._tenant = tenant

    def __enter__(self) -> None:
        self._exchanges.enter(self._tenant)

    def __exit__(self, *_: object) -> None:
        self._exchanges.leave(self._tenant)


class Exchange:
    """One request of a client; entered before anything is asked of it, and left when nobody waits for it any more."""

    def __init__(self, all_of_them: Exchanges, request: Request, *, admitted: bool) -> None:
        self._all = all_of_them
        self._admitted = admitted
        self._context = all_of_them.context
        self.request = request
        self._started = self._context.clock()
        self._next_attempt = all_of_them.draw_attempt()
        self._all_passed = False
        """The client has all of the answer."""
        self._placed: list[Attempt] = []
        """Attempts of `place`."""
        self._attempts: list[Attempt] = []
        """All of them, in order."""
        self._failed: EngineFailed | None = None
        """The last failure of an engine."""
        self._is_failed = False
        """It is the client's answer, although nothing was raised here."""

    @property
    def request_id(self) -> str:
        """Return the client's request id, or one that was made for it."""
        return self.request.request_id

    def __enter__(self) -> Exchange:
        if not self._admitted:
            try:
                self._all.enter(self.request.tenant)
            except KvscoutError as error:
                self._all.failure_log.failed(self._asked, error)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        served = self._all_passed and isinstance(error, SinkGone | asyncio.CancelledError)
        self._over(None if served else error)
        try:
            while self._placed:
                self._placed.pop().free()
        finally:
            if not self._admitted:
                self._all.leave(self.request.tenant)

    @property
    def _asked(self) -> RequestSummary:
        request = self.request
        return RequestSummary(request.front, request.tenant, request.model, request.request_id)

    def _over(self, error: BaseException | None) -> None:
        """Count the request, and whether it was answered as it should have been."""
        outcome = self._all.over(self.request.tenant, self.request.model, error)
        self._context.recording.over(self.request, self._attempts, outcome, self._started)
        self._context.recent.over(self.request, self._attempts, outcome, self._started)
        log, failed = self._all.failure_log, self._failed
        worker_ids = [attempt.decision.worker.worker_id for attempt in self._attempts]
        if error is None and self._is_failed:
            error = failed
        log.over(self._asked, error, worker_ids)
        if error is not None:
            return
        if failed is not None:
            log.answered(self._asked, cause_of(failed), failed.summary, str(failed), worker_ids)
        if self._attempts and self._attempts[-1].decision.degraded:
            log.degraded(self._asked, self._attempts[-1].decision)

    def run(self, reply: Reply) -> Awaitable[None]:
        """Run the request to its end, by the plan that suits it.

        Args:
            reply: The client.

        Raises:
            KvscoutError: As `RoutingFlow.place`; InvalidArgument if the engine refuses the request; Unavailable if
                engines failed before the client had a byte; InternalError if one failed after it; DeadlineExceeded if
                the client takes nothing, or a whole answer takes too long. `failure_behind` tells what the engine said.
            SinkGone: The client is gone.
        """
        return self._all.plan(self.request).run(self, reply)

    async def place(self, request: Request | None = None) -> Attempt:
        """Book the request on a worker, for a front that has others send it and reports what happens to the attempt.

        It is freed with the exchange, unless the front frees it earlier.

        Args:
            request: What is asked; None = the client's.

        Raises:
            KvscoutError: As `RoutingFlow.place`.
        """
        request = request or self.request
        attempt = await self._open(request, (*request.excluded, *self._ejected(request)), lambda: None)
        self._placed.append(attempt)
        return attempt

    async def probe(self, request: Request) -> Decision:
        """Return where a request would go: nothing is booked.

        Args:
            request: What would be asked.

        Raises:
            KvscoutError: As `RoutingFlow.place`.
        """
        excluded = (*request.excluded, *self._ejected(request))
        return await self._context.routing.place(replace(request, request_id="", excluded=excluded))

    def failed(self, attempt: Attempt, error: EngineFailed, *, is_answer: bool) -> None:
        """Charge a failed attempt of `place` to its worker, where that is at fault.

        Args:
            attempt: The attempt.
            error: What its engine did.
            is_answer: The client gets that; else another worker answers.
        """
        self._failed, self._is_failed = error, is_answer
        self._charge(self.request, attempt, error)

    async def run_attempts(self, request: Request, use: Use) -> None:
        """Run a request on one worker, and on another one if that fails before the client has a byte.

        Args:
            request: Request to the worker.
            use: Sends an attempt to its engine, to its end; raises EngineFailed if the engine fails it.

        Raises:
            KvscoutError: As `run`.
        """
        unroutable = self._context.routing.unroutable(request)
        tried: Tried = []
        while self._may_try(request, tried):
            been_at = [attempt.decision.worker.worker_id for attempt, _ in tried]
            excluded = (*request.excluded, *unroutable, *self._ejected(request, been_at), *been_at)
            try:
                attempt = await self._open(request, excluded, lambda: self._judge(request, tried, ran=True))
            except KvscoutError as error:
                if not tried:
                    raise
                if isinstance(error, DeadlineExceeded):
                    # The client's time is over, and another try by the client would be in vain, too.
                    self._judge(request, tried, ran=False)
                    raise error from tried[-1][1]
                raise self._given_up(request, tried, f"; not tried elsewhere: {error}") from tried[-1][1]
            with attempt:
                try:
                    return await use(attempt)
                except EngineFailed as failure:
                    failure.worker_id = attempt.decision.worker.worker_id
                    self._failed = failure
                    self._charge(request, attempt, failure)
                    if (final := failure.final_error(passed=attempt.passed)) is not None:
                        raise final from failure
                    tried.append((attempt, failure))
                finally:
                    self._all_passed |= attempt.all_passed
        raise self._given_up(request, tried) from tried[-1][1]

    def _may_try(self, request: Request, tried: Tried) -> bool:
        """Tell whether a request may be tried, after these: engines that could not be reached cost it no try."""
        if not tried:
            return True
        limit = 0 if request.pinned else self._all.migration_limit
        unreachable = min(sum(failure.unreachable for _, failure in tried), MAX_UNREACHABLE if limit else 0)
        return len(tried) - unreachable <= limit

    async def _open(self, request: Request, excluded: tuple[str, ...], on_output: Callable[[], None]) -> Attempt:
        attempt_id, self._next_attempt = self._next_attempt, self._next_attempt + 1
        request = request.of_attempt(attempt_id, self._all.lease_seconds)
        # Who is left out now is nothing that the client asked for: the attempt does not keep it.
        placed = replace(request, excluded=excluded) if excluded else request
        decision = await self._nearest(placed) if placed.preferred or placed.session.affinity else None
        if decision is None:
            decision = await self._context.routing.place(placed)
        attempt = Attempt(self._context, request, decision, started=self._started, on_output=on_output)
        self._attempts.append(attempt)
        return attempt

    async def _nearest(self, request: Request) -> Decision | None:
        """Place the request among its preferred workers; None = none of them takes it.

        What is kept on one worker goes to that one, or to any other.
        """
        if request.session.affinity:
            able = self._context.health.reachable(request.tenant, self._context.routing.candidates(request))
            ids = [spec.worker_id for spec in able if not request.preferred or spec.worker_id in request.preferred]
            request = replace(request, preferred=(worker_of(request.session.affinity, ids),) if ids else ())
        preferred = tuple(
            worker_id
            for worker_id in request.preferred
            if worker_id not in request.excluded and (not request.allowed or worker_id in request.allowed)
        )
        if not preferred or request.pinned:
            return None
        try:
            return await self._context.routing.place(replace(request, allowed=preferred))
        except (Unavailable, ResourceExhausted, FailedPrecondition):
            return None

    def _ejected(self, request: Request, tried: Collection[str] = ()) -> set[str]:
        if request.pinned:
            return set()
        return self._context.health.ejected(request.tenant, lambda: self._context.routing.candidates(request), tried)

    def _charge(self, request: Request, attempt: Attempt, failure: EngineFailed) -> None:
        """Have a worker pay for a failure, as far as it is the worker's."""
        if not attempt.passed:
            self._context.routing.failed(attempt.decision)
        match failure.rule.ejection:
            case Ejection.BACKOFF:
                self._context.health.overloaded(attempt.key, failure.retry_after_seconds)
            case Ejection.COUNTS:
                self._count(request, attempt, failure)
            case Ejection.COUNTS_IF_OTHERS_RUN_IT if attempt.passed:
                self._count(request, attempt, failure)

    def _judge(self, request: Request, tried: Tried, *, ran: bool) -> None:
        """Count the failures of workers that refused a request if another one runs it, not if others refuse it too."""
        if ran or (len(tried) == 1 and not request.pinned):
            for attempt, failure in tried:
                if failure.rule.ejection is Ejection.COUNTS_IF_OTHERS_RUN_IT:
                    self._count(request, attempt, failure)

    def _given_up(self, request: Request, tried: Tried, suffix: str = "") -> KvscoutError:
        self._judge(request, tried, ran=False)
        return failed_everywhere([failure for _, failure in tried], suffix)

    def _count(self, request: Request, attempt: Attempt, failure: EngineFailed) -> None:
        attempt.seen.failures += 1
        candidates = self._context.routing.candidates(request)
        ejection_seconds = self._context.health.failed(attempt.key, candidates, is_gone=failure.unreachable)
        self._all.report_failure(request.tenant, attempt.decision, failure, ejection_seconds)
