"""One request as the policy would run it, beside the one that runs.

It is booked at the scheduler where the policy would send it, for as long as it really runs: the scheduler's load is
that of a fleet that runs all of these requests by its own choices. Caches are those that there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Final

from kvscout_common.errors import KvscoutError
from kvscout_common.http.dialect import Usage
from kvscout_common.http.http import Headers
from kvscout_common.identity.identity import Identity
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import Role
from kvscout_gateway.engines.observation import predicted_cached_tokens
from kvscout_gateway.fronts.body import JsonBody
from kvscout_gateway.fronts.context import FrontContext
from kvscout_gateway.fronts.json_request import request_of
from kvscout_gateway.fronts.shadow.report import Comparison, LeftOut, ShadowReport
from kvscout_gateway.ladder.ladders import Placed
from kvscout_gateway.values.booking import Booking
from kvscout_gateway.values.decision import Decision
from kvscout_gateway.values.dialects import ApiDialect

log = logging.getLogger("kvscout.gateway")
_defects = RateLimitedLog(log, period_seconds=60.0)

MAX_SCORES: Final = 4_000
"""At once; what comes above is passed on and not scored."""
LATE_SECONDS: Final = 1.0
"""Longest wait for a decision once the request is over."""


@dataclass(frozen=True, slots=True)
class ScoredRequest:
    """A client's request for output."""

    api: ApiDialect
    body: JsonBody
    tenant: str
    model: str
    headers: Headers
    identity: Identity


class Scores:
    """Requests that are being scored."""

    def __init__(self, context: FrontContext, report: ShadowReport) -> None:
        self._context = context
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, generation: ScoredRequest) -> Score:
        """Begin to score a request that goes to the balancer now."""
        score = Score(self._context, self._report, generation)
        if len(self._tasks) < MAX_SCORES:
            score.task = asyncio.get_running_loop().create_task(score.run())
            self._tasks.add(score.task)
            score.task.add_done_callback(self._tasks.discard)
        return score

    async def settle(self) -> None:
        """Wait until what is over is counted."""
        if self._tasks:
            await asyncio.wait(list(self._tasks))


class Score:
    """One request; `end` it."""

    def __init__(self, context: FrontContext, report: ShadowReport, generation: ScoredRequest) -> None:
        self._context = context
        self._scheduler = context.exchanges.context.scheduler
        self._ladders = context.exchanges.context.ladders
        self._report = report
        self.generation = generation
        self._at = time.time()
        self._isl_tokens = 0
        self._booking: Booking | None = None
        self._prefilled = False
        self._over = asyncio.Event()
        self._failed = True
        self._usage: Usage | None = None
        self._served_by = ""
        self._looked_at: Placed | None = None
        self.task: asyncio.Task[None] | None = None
        """None = it is not scored."""

    def first_output(self, *, whole_answer: bool = False) -> None:
        """Record the first output: the prompt is computed.

        Args:
            whole_answer: All of it is here. When the prompt was computed nobody knows.
        """
        self._prefilled = True
        if self._booking is not None and not whole_answer:
            self._scheduler.prefill_complete(self._booking)

    def end(self, *, failed: bool, usage: Usage | None, served_by: str) -> None:
        """Record the end of the request.

        Args:
            failed: It came to nothing.
            usage: What its engine said of the prompt.
            served_by: Worker id; "" = nobody said who served it.
        """
        self._failed, self._usage, self._served_by = failed, usage, served_by
        if self.task is None:
            self._count(LeftOut.MANY)
        elif self._booking is None and not self.task.done():
            asyncio.get_running_loop().call_later(LATE_SECONDS, self._give_up, self.task)
        self._over.set()

    def _give_up(self, task: asyncio.Task[None]) -> None:
        if self._booking is None:
            task.cancel()

    async def run(self) -> None:
        """Place and book the request, wait for its end, and count it."""
        outcome: Comparison | LeftOut = LeftOut.LATE
        try:
            placed = await self._place()
            await self._over.wait()
            outcome = self._compared(placed) if isinstance(placed, Decision) else placed
        except Exception as error:
            if not isinstance(error, KvscoutError):
                _defects.warning(type(error).__name__, "a request could not be scored: %r", error, error=error)
            await self._over.wait()
            outcome = LeftOut.HELPERS
        except asyncio.CancelledError:
            if not self._over.is_set():
                raise  # the gateway ends
        finally:
            if self._booking is not None:
                self._scheduler.free(self._booking, self._usage.output_tokens if self._usage is not None else 0)
        self._count(LeftOut.FAILED if self._failed else outcome)

    async def _place(self) -> Decision | LeftOut:
        generation = self.generation
        request = await request_of(
            self._context,
            generation.api.path,
            generation.headers,
            generation.body.fields,
            size=generation.body.size,
            tenant=generation.tenant,
            model=generation.model,
        )
        if request.prompt.unknown:
            return LeftOut.TOKENS
        request = self._context.terms.apply(request, generation.headers, generation.identity, generation.body.fields)
        self._isl_tokens = request.prompt.own_tokens
        roles = self._context.catalog.serving(request).routable_roles
        decision = await self._context.exchanges.context.routing.place(
            replace(
                request,
                # Where prefill and decode are apart, a prompt is found or computed by the former.
                role=Role.PREFILL if Role.PREFILL in roles and Role.AGGREGATED not in roles else Role.AGGREGATED,
                attempt_id=self._context.exchanges.draw_attempt(),
                owned=True,
                lease_seconds=self._context.exchanges.lease_seconds,
            )
        )
        if self._ladders is not None:
            self._looked_at = self._ladders.placed(request, decision, decided=False)
        if decision.booking is not None:
            self._booking = decision.booking
            self._scheduler.hold(decision.booking)
        if self._prefilled:
            # What it found cached may be what this very request has left there meanwhile.
            self._book_as_running()
            return LeftOut.LATE
        return LeftOut.HELPERS if decision.degraded else decision

    def _book_as_running(self) -> None:
        """Book it as one that runs: its first token was out before, and its prefill time teaches nothing."""
        booking = self._booking
        if booking is not None:
            self._scheduler.free(booking)
            self._booking = booking.again()
            self._scheduler.hold(self._booking)

    def _compared(self, decision: Decision) -> Comparison | LeftOut:
        if self._usage is None:
            return LeftOut.USAGE
        if self._looked_at is not None and self._ladders is not None:
            self._ladders.ended(self._looked_at, self._usage, self._served_by)
        prompt = self._usage.prompt_tokens
        if prompt != self._isl_tokens:
            return LeftOut.TOKENS
        return Comparison(
            prompt=prompt,
            cached=self._usage.cached_tokens,
            policy=predicted_cached_tokens(decision.overlap_blocks, prompt, decision.block_size),
            same=decision.worker.worker_id == self._served_by if self._served_by else None,
        )

    def _count(self, outcome: Comparison | LeftOut) -> None:
        view = self._context.catalog.tenant(self.generation.tenant)
        model = view.resolve(self.generation.model, "").model
        # A name that no worker serves is the client's invention: it gets no hours of its own.
        known = model in view.models
        self._report.add(self._at, self.generation.tenant if known else "", model if known else "", outcome)
