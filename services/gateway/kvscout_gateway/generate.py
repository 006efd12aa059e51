"""Running a request: place it, dispatch it, stream its output, account for it.

A worker that fails before its first token costs one more try elsewhere; after that token nothing is retried. Whatever
happens (end, error, cancellation), the booking is freed exactly once.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from kvscout_common.errors import InternalError, InvalidArgument, KvscoutError, Unavailable
from kvscout_gateway.engine import Chunk, Dispatch, EngineFailed, VllmEngine
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.observation import Observations, predicted_cached_tokens
from kvscout_gateway.releases import Bookings
from kvscout_gateway.routing import Placement, RoutingFlow, Wish, refuse_when_full


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a request's output; `placement` tells where it runs, once a try."""

    chunk: Chunk
    placement: Placement | None = None


class GenerateFlow:
    """select → dispatch → stream → free."""

    def __init__(
        self,
        routing: RoutingFlow,
        engine: VllmEngine,
        bookings: Bookings,
        observations: Observations,
        metrics: GatewayMetrics,
        *,
        report_failure: Callable[[str, Placement, str], object],
        migration_limit: int,
        max_in_flight: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._routing = routing
        self._engine = engine
        self._bookings = bookings
        self._observations = observations
        self._metrics = metrics
        self._report_failure = report_failure
        self._migration_limit = migration_limit
        self._max_in_flight = max_in_flight
        self._clock = clock
        self.in_flight = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self.requests = 0
        self.failures = 0

    async def run(self, wish: Wish, parameters: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Runs one request.

        Args:
            wish: What is asked of the worker; has a request_id.
            parameters: Sampling and stop parameters, named as vLLM names them.

        Raises:
            KvscoutError: As `RoutingFlow.place`; InvalidArgument if the engine refuses the request;
                Unavailable if engines failed before the first token; InternalError if one failed after it.
        """
        refuse_when_full(self.in_flight, self._max_in_flight)
        self.in_flight += 1
        self.idle.clear()
        self.requests += 1
        self._metrics.in_flight.inc()
        outcome = "cancelled"
        try:
            async with aclosing(self._tries(wish, parameters)) as pieces:
                async for piece in pieces:
                    yield piece
            outcome = "ok"
        except KvscoutError as error:
            outcome = type(error).__name__
            self.failures += 1
            raise
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self.idle.set()
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(outcome).inc()

    async def _tries(self, wish: Wish, parameters: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        started = self._clock()
        for attempt in range(self._migration_limit + 1):
            tried = replace(wish, attempt_id=attempt + 1)  # 0 would mean: attempts are not told apart
            placement = await self._routing.place(tried)
            streamed = False
            try:
                async with aclosing(self._one_try(tried, placement, parameters, started)) as pieces:
                    async for piece in pieces:
                        streamed = streamed or bool(piece.chunk.token_ids or piece.chunk.text)
                        yield piece
                return
            except EngineFailed as error:
                self._observations.of(wish.tenant, placement.worker).failures += 1
                if error.client_fault:
                    raise InvalidArgument(error.message, field="request") from error
                self._report_failure(wish.tenant, placement, error.message)
                if streamed:
                    raise InternalError(f"failed after its first token: {error.message}") from error
                if attempt == self._migration_limit or wish.pinned:
                    raise Unavailable(error.message, retry_after_seconds=1.0) from error
                wish = replace(wish, excluded=(*wish.excluded, placement.worker.worker_id))

    async def _one_try(
        self, wish: Wish, placement: Placement, parameters: Mapping[str, Any], started: float
    ) -> AsyncGenerator[Piece, None]:
        if placement.booking is not None:
            self._bookings.add(placement.booking)
        try:
            if not placement.endpoint:
                raise EngineFailed(f"worker {placement.worker.worker_id} has no HTTP endpoint")
            self._observations.of(wish.tenant, placement.worker).requests += 1
            yield Piece(Chunk(), placement)
            many_ranks = placement.spec is not None and placement.spec.dp_size > 1
            dispatch = Dispatch(
                endpoint=placement.endpoint,
                model=placement.engine_model,
                token_ids=array("I", wish.prompt.token_ids).tolist(),
                request_id=wish.request_id,
                dp_rank=placement.worker.dp_rank if many_ranks else None,
                parameters=parameters,
            )
            previous: float | None = None
            async with aclosing(self._engine.generate(dispatch)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids or chunk.text:
                        now = self._clock()
                        if previous is None:
                            self._metrics.ttft.observe(now - started)
                            if placement.booking is not None:
                                self._bookings.mark_prefill_complete(placement.booking)
                        else:
                            self._metrics.itl.observe((now - previous) / max(1, len(chunk.token_ids)))
                        previous = now
                    if chunk.cached_tokens is not None:
                        self._check_prediction(wish, placement, chunk.cached_tokens)
                    yield Piece(chunk)
        finally:
            if placement.booking is not None:
                self._bookings.free(placement.booking)

    def _check_prediction(self, wish: Wish, placement: Placement, cached: int) -> None:
        if placement.degraded:
            return  # nobody predicted anything
        predicted = predicted_cached_tokens(placement.overlap_blocks, wish.prompt.isl_tokens, placement.block_size)
        totals, error = self._observations.check(
            wish.tenant, placement.worker, isl_tokens=wish.prompt.isl_tokens, predicted=predicted, cached=cached
        )
        worker = f"{placement.worker.worker_id}/{placement.worker.dp_rank}"
        self._metrics.hit_rate.labels(worker).set(totals.hit_rate)
        self._metrics.prediction_error.labels(worker).inc(error)
