"""Running a request: place it, dispatch it, stream its output, account for it.

A worker that fails before its first token costs one more try elsewhere; after that token nothing is retried. Whatever
happens (end, error, cancellation), each booking is freed exactly once. Who pays for a failure, the request or the
worker, is told by `engine_failure`.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kvscout_common.errors import (
    Draining,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    KvscoutError,
    ResourceExhausted,
    Unavailable,
)
from kvscout_gateway.engines.failure import EngineFailed, Fault
from kvscout_gateway.engines.framing import Chunk
from kvscout_gateway.engines.health import Key, WorkerHealth
from kvscout_gateway.engines.vllm import Dispatch, VllmEngine
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.request.observation import Observations, computes_a_block, predicted_cached_tokens
from kvscout_gateway.request.placement import Placement, Wish
from kvscout_gateway.request.routing import RoutingFlow
from kvscout_gateway.scheduler_client.bookings import Bookings

MAX_TRIES = 256
"""Attempt ids leave eight bits for the number of the try, the highest of which is `UNBOOKED_ATTEMPT`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a request's output: where it runs, once a try, or what the engine sent."""

    placement: Placement | None = None
    chunk: Chunk | None = None


Emit: TypeAlias = Callable[[Piece], Awaitable[None]]


class GenerateFlow:
    """select → dispatch → stream → free."""

    def __init__(
        self,
        routing: RoutingFlow,
        engine: VllmEngine,
        bookings: Bookings,
        observations: Observations,
        health: WorkerHealth,
        *,
        metrics: GatewayMetrics,
        report_failure: Callable[[str, Placement, EngineFailed, float], object],
        draw_attempt: Callable[[], int],
        migration_limit: int,
        max_in_flight: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Runs requests.

        Args:
            routing: Places them.
            engine: Runs them.
            bookings: Keeps what was booked.
            observations: Keeps what was seen of the workers.
            health: Knows which of them to leave alone.
            metrics: Counts.
            report_failure: Told of each failure of a worker, and for how many seconds it is left out for it.
            draw_attempt: A random number, unique to a call, of `MAX_TRIES`s: a request id that is used again is another
                attempt, and what frees the one cannot free the other.
            migration_limit: Further tries after a failure before the first token.
            max_in_flight: Requests that run at once.
            clock: Seconds.
        """
        self._routing = routing
        self._engine = engine
        self._bookings = bookings
        self._observations = observations
        self._health = health
        self._metrics = metrics
        self._report_failure = report_failure
        self._draw_attempt = draw_attempt
        self._migration_limit = migration_limit
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.draining = False
        """Refuses what is new."""
        self.in_flight = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self.requests = 0
        self.failures = 0

    async def run(self, wish: Wish, parameters: Mapping[str, Any], emit: Emit) -> None:
        """Runs one request to its end; cancelling it aborts it everywhere.

        Args:
            wish: What is asked of the worker; has a request_id.
            parameters: Sampling and stop parameters, named as vLLM names them.
            emit: Takes each piece of output; the next is read when it returns.

        Raises:
            KvscoutError: As `RoutingFlow.place`; Draining and ResourceExhausted if this gateway takes nothing now;
                InvalidArgument if the engine refuses the request; Unavailable if engines failed before the first
                token; InternalError if one failed after it.
        """
        if self.draining:
            raise Draining("the gateway is draining")
        if self.in_flight >= self._max_in_flight:
            raise ResourceExhausted(f"{self.in_flight} requests are in flight (limit)", retry_after_seconds=1.0)
        self.in_flight += 1
        self.idle.clear()
        self.requests += 1
        outcome = "cancelled"
        try:
            await self._try_until_it_runs(wish, parameters, emit)
            outcome = "ok"
        except Exception as error:
            outcome = type(error).__name__ if isinstance(error, KvscoutError) else InternalError.__name__
            self.failures += 1
            raise
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self.idle.set()
            self._metrics.requests.labels(outcome).inc()

    async def _try_until_it_runs(self, wish: Wish, parameters: Mapping[str, Any], emit: Emit) -> None:
        started = self._clock()
        attempt = self._draw_attempt()
        undriven = self._routing.undriven(wish)
        tried: list[_Run] = []
        for number in range(self._migration_limit + 1):
            been_at = [run.placement.worker.worker_id for run in tried]
            excluded = (*undriven, *self._left_out(wish), *been_at)
            trying = replace(wish, attempt_id=attempt + number, excluded=excluded, owned=True)
            try:
                placement = await self._routing.place(trying)
            except KvscoutError as error:
                if not tried:
                    raise
                self._judge(wish, tried, ran=False)
                raise _given_up(tried, f"; not tried elsewhere: {error}") from error
            run = _Run(
                placement,
                trying,
                observations=self._observations,
                metrics=self._metrics,
                bookings=self._bookings,
                started=started,
                clock=self._clock,
                on_first_output=self._ran(wish, tried),
            )
            self._health.sent(run.key)
            try:
                await self._dispatch(run, parameters, emit)
                return
            except EngineFailed as error:
                run.failure = error
                self._charge(wish, run)
            finally:
                self._health.withdrawn(run.key)
            tried.append(run)
            if wish.pinned:
                break
            if placement.booking is not None:
                # The request id can be booked again when it is free, not before.
                await self._bookings.freed(placement.booking)
        self._judge(wish, tried, ran=False)
        raise _given_up(tried) from tried[-1].failure

    def _left_out(self, wish: Wish) -> tuple[str, ...]:
        return () if wish.pinned else self._health.left_out(wish.tenant, lambda: self._routing.candidates(wish))

    def _ran(self, wish: Wish, tried: list[_Run]) -> Callable[[Key], None]:
        """To be told which worker put out the first token, after those that were tried before it."""

        def ran(key: Key) -> None:
            self._health.ran(key)
            self._judge(wish, tried, ran=True)

        return ran

    def _charge(self, wish: Wish, run: _Run) -> None:
        """Has a failure paid for; returns if the request may be tried elsewhere.

        Raises:
            KvscoutError: It may not.
        """
        error = run.failure
        assert error is not None
        if not run.has_output:
            self._routing.failed(run.placement)
        match error.fault:
            case Fault.REQUEST:
                raise InvalidArgument(error.message, field="request") from error
            case Fault.GATEWAY:
                raise ResourceExhausted(f"the gateway has no resources left: {error.message}", retry_after_seconds=1.0)
            case Fault.OVERLOAD:
                self._health.overloaded(run.key, error.retry_after_seconds)
            case Fault.REFUSED if not run.has_output:
                pass  # that is seen when it has been tried elsewhere
            case _:
                self._count(wish, run)
        if run.has_output:
            raise InternalError(f"failed after its first token: {error.message}") from error

    def _judge(self, wish: Wish, tried: list[_Run], *, ran: bool) -> None:
        """A worker that refused a request has failed if another one runs it, and not if others refuse it as well."""
        refused = [run for run in tried if run.failure is not None and run.failure.fault is Fault.REFUSED]
        if ran or (len(tried) == 1 and not wish.pinned):
            for run in refused:
                self._count(wish, run)

    def _count(self, wish: Wish, run: _Run) -> None:
        assert run.failure is not None
        run.seen.failures += 1
        out_seconds = self._health.failed(run.key, self._routing.candidates(wish))
        self._report_failure(wish.tenant, run.placement, run.failure, out_seconds)

    async def _dispatch(self, run: _Run, parameters: Mapping[str, Any], emit: Emit) -> None:
        placement, wish = run.placement, run.wish
        if placement.booking is not None:
            self._bookings.add(placement.booking)
        try:
            if not placement.endpoint:
                raise FailedPrecondition(
                    f"worker {placement.worker.worker_id!r} has no HTTP endpoint: Route places requests on it, "
                    "Generate cannot run them"
                )
            run.dispatched()
            await emit(Piece(placement=placement))
            dispatch = Dispatch(
                endpoint=placement.endpoint,
                model=placement.engine_model,
                token_ids=array("I", wish.prompt.token_ids),
                request_id=wish.request_id,
                dp_rank=placement.rank_header,
                parameters=parameters,
                uncached_tokens=placement.uncached_tokens,
                pulse=run.seen.pulse,
            )
            self._routing.dispatched(placement)
            async with aclosing(self._engine.generate(dispatch)) as chunks:
                async for chunk in chunks:
                    run.received(chunk)
                    await emit(Piece(chunk=chunk))
            run.ended()
        finally:
            if placement.booking is not None:
                self._bookings.free(placement.booking)


def _given_up(tried: list[_Run], suffix: str = "") -> KvscoutError:
    """What a client is told whose request no worker ran."""
    failures = [run.failure for run in tried if run.failure is not None]
    busy = all(error.fault is Fault.OVERLOAD for error in failures)
    kind = ResourceExhausted if busy else Unavailable
    waits = [error.retry_after_seconds for error in failures if error.retry_after_seconds is not None]
    return kind(failures[-1].message + suffix, retry_after_seconds=min(waits) if busy and waits else 1.0)


class _Run:
    """The accounts of one request on one worker."""

    def __init__(
        self,
        placement: Placement,
        wish: Wish,
        *,
        observations: Observations,
        metrics: GatewayMetrics,
        bookings: Bookings,
        started: float,
        clock: Callable[[], float],
        on_first_output: Callable[[Key], None],
    ) -> None:
        self._observations = observations
        self._metrics = metrics
        self._bookings = bookings
        self._on_first_output = on_first_output
        self.placement = placement
        self.wish = wish
        self._clock = clock
        self._started = started
        self._previous = 0.0
        self._dispatched_at = 0.0
        self._has_usage = False
        self._cached_tokens: int | None = None
        self.has_output = False
        self.failure: EngineFailed | None = None
        self.key: Key = (wish.tenant, placement.worker)
        self.seen = observations.of(wish.tenant, placement.worker)

    def dispatched(self) -> None:
        """It is sent to its engine."""
        self.seen.requests += 1
        self.seen.prompt_tokens += self.wish.prompt.isl_tokens
        self._dispatched_at = self._clock()

    def received(self, chunk: Chunk) -> None:
        """A piece of output came."""
        if chunk.has_output:
            now = self._clock()
            if self.has_output:
                tokens = len(chunk.token_ids) if chunk.token_ids else 1
                self._metrics.itl.observe((now - self._previous) / tokens)
            else:
                self.has_output = True
                self._on_first_output(self.key)
                self._metrics.ttft.observe(now - self._started)
                if self.placement.booking is not None:
                    self._bookings.mark_prefill_complete(self.placement.booking)
            self._previous = now
        if chunk.prompt_tokens is not None:
            self._has_usage = True
        if chunk.cached_tokens is not None:
            self._cached_tokens = chunk.cached_tokens

    def ended(self) -> None:
        """The engine has sent everything."""
        placement, isl_tokens = self.placement, self.wish.prompt.isl_tokens
        if self._has_usage:
            self._observations.reported(
                self.wish.tenant,
                placement.worker,
                isl_tokens=isl_tokens,
                cached=self._cached_tokens,
                # Only what events confirm is checked: a prediction is allowed to fail.
                predicted=predicted_cached_tokens(placement.confirmed_blocks, isl_tokens, placement.block_size)
                if placement.confirmed_blocks is not None
                else None,
            )
        if computes_a_block(isl_tokens, self._cached_tokens or 0, placement.block_size):
            self.seen.eventful.append(self._dispatched_at)
