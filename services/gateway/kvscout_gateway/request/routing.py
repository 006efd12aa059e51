"""Placing a prompt: hash it, ask for overlaps, have a worker selected.

A request does not fail because an upstream did: without the indexer the choice is made on load alone, without any
scheduler the workers take turns. Either way the answer says so (`degraded`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound
from kvscout_common.observability import tracing
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_gateway.members.catalog import Catalog, TenantView
from kvscout_gateway.request.metrics import GatewayMetrics
from kvscout_gateway.request.round_robin import RoundRobin, eligible
from kvscout_gateway.upstreams.failover import UpstreamDown
from kvscout_gateway.upstreams.interfaces import Indexer, Scheduler
from kvscout_gateway.upstreams.scheduler.select_request import loads_request
from kvscout_gateway.values.booking import UNBOOKED_ATTEMPT, Booking
from kvscout_gateway.values.decision import POLICY_FAILED, Decision
from kvscout_gateway.values.overlaps import Overlaps, longest
from kvscout_gateway.values.prompt import Geometry, PromptTooLong, hash_prompt
from kvscout_gateway.values.pull import pull_of
from kvscout_gateway.values.request import Request

log = logging.getLogger("kvscout.gateway")


class RoutingFlow:
    """Hash a prompt, match it, have a worker reserved."""

    def __init__(
        self,
        catalog: Catalog,
        indexer: Indexer,
        scheduler: Scheduler,
        metrics: GatewayMetrics,
        *,
        token_seconds: Callable[[str, str], float] = lambda tenant, model: 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Place prompts.

        Args:
            catalog: The registered workers.
            indexer: Knows where prompts are cached.
            scheduler: Chooses workers.
            metrics: Counts latencies and degraded decisions.
            token_seconds: Gives the time in which a prompt token of a tenant's model is computed; 0 = unknown.
            clock: Seconds.
        """
        self._catalog = catalog
        self._indexer = indexer
        self._scheduler = scheduler
        self._metrics = metrics
        self._token_seconds = token_seconds
        self._clock = clock
        self._rounds = RoundRobin()
        self._warnings = RateLimitedLog(log, period_seconds=10.0)

    async def place(self, request: Request) -> Decision:
        """Pick a worker, and book the request on it if it has an id; one that runs already is booked a moment later.

        Args:
            request: The request.

        Raises:
            InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted, Unavailable, AlreadyExists: As the
                scheduler answers, or for a prompt that cannot be hashed.
            DeadlineExceeded: The deadline has passed, or passes in the queue.
        """
        started = self._clock()
        if request.deadline < inf:
            request.seconds_left()
        request, hashes = self._prepare(request)
        overlaps = Overlaps(hashes)
        if request.fallback_reason:
            return self._round_robin(request, overlaps, request.fallback_reason)
        hashed = self._clock()
        if self._wants_overlaps(request):
            with tracing.span("find_matches", tracing.SpanKind.CLIENT) as span:
                overlaps = await self._match(request, hashes)
                self._count_missed(overlaps)
                span.record(degraded=bool(overlaps.problems))
        matched = self._clock()
        with tracing.span("select", tracing.SpanKind.CLIENT) as span:
            try:
                decision = await self._reserve(request, overlaps)
            except UpstreamDown as error:
                decision = self._round_robin(request, overlaps, str(error))
            except NotFound as error:
                decision = self._round_robin_instead(request, overlaps, error)
            if tracing.enabled():
                _record(span, request, decision)
        finished = self._clock()
        decision.seconds = finished - started
        decision.select_seconds = finished - matched
        self._metrics.observe_routing(
            hash_seconds=hashed - started,
            find_matches_seconds=matched - hashed,
            select_seconds=finished - matched,
            total_seconds=finished - started,
        )
        return decision

    async def place_for_caller(self, request: Request) -> Decision:
        """Place a request for a caller who sends it itself: a booking counts as sent, a query does not.

        Raises:
            KvscoutError: As `place`.
        """
        request.trace()
        decision = await self.place(request)
        if request.request_id:
            self.dispatched(decision)
        return decision

    def dispatched(self, decision: Decision) -> None:
        """Let the indexers predict the blocks of a prompt that goes to its engine. Returns at once."""
        if not decision.withdrawn:
            self._indexer.routed(decision)

    def failed(self, decision: Decision) -> None:
        """Withdraw the prediction of an attempt that failed before its first token, if it is not sent yet."""
        decision.withdrawn = True

    async def potential_loads(self, request: Request) -> scheduler_pb2.GetPotentialLoadsResponse:
        """Return the load of each worker, now and with a prompt added; one without tokens adds nothing.

        Raises:
            UpstreamDown: No scheduler answers.
            InvalidArgument, NotFound: As the scheduler answers.
        """
        request, hashes = self._prepare(request)
        overlaps = await self._match(request, hashes)
        self._count_missed(overlaps)
        return await self._scheduler.call(lambda stub: stub.GetPotentialLoads, loads_request(request, overlaps))

    def unroutable(self, request: Request) -> tuple[str, ...]:
        """Return the ids of the workers that Route may choose and Generate must not.

        Raises:
            InvalidArgument: As `place`.
            FailedPrecondition: The gateway can run requests on none of the model's workers, or not on the pinned one.
        """
        serving = self._catalog.serving(request)
        unroutable = serving.unroutable
        if unroutable and (request.pinned in unroutable or len(unroutable) == len(serving.specs)):
            who = (
                repr(request.pinned)
                if request.pinned
                else f"each of the {len(unroutable)} workers of {request.model!r}"
            )
            raise FailedPrecondition(
                f"{who} has no HTTP endpoint or an API that the gateway does not speak: ask Route, and run it yourself"
            )
        return unroutable

    def candidates(self, request: Request) -> list[WorkerSpec]:
        """Return the workers that may run a request, whatever their load and health."""
        request = resolve(request, self._catalog.tenant(request.tenant))
        serving = self._catalog.serving(request)
        return [spec for spec in eligible(request, serving.specs) if spec.worker_id not in serving.unroutable]

    def _prepare(self, request: Request) -> tuple[Request, dict[Geometry, bytes]]:
        """Return the request by the name of its base model, and the block hashes of its prompt."""
        request = resolve(request, self._catalog.tenant(request.tenant))
        serving, prompt = self._catalog.serving(request), request.prompt
        longest = serving.longest_prompt
        if longest is not None and prompt.own_tokens > longest and not prompt.unknown:
            raise PromptTooLong(prompt.own_tokens, longest, field=prompt.field)
        return request, hash_prompt(prompt, serving.pools, request.lora_name)

    def _wants_overlaps(self, request: Request) -> bool:
        override = request.override
        if override is not None and override.HasField("overlap_score_weight"):
            return override.overlap_score_weight != 0
        return self._scheduler.overlap_score_weight != 0

    async def _match(self, request: Request, hashes: Mapping[Geometry, bytes]) -> Overlaps:
        prompt_tokens = request.prompt.own_tokens
        ranks = self._catalog.serving(request).ranks
        return await self._indexer.match(
            request.model, request.tenant, hashes, prompt_tokens=prompt_tokens, ranks=ranks
        )

    def _count_missed(self, overlaps: Overlaps) -> None:
        for upstream in overlaps.problems:
            self._metrics.degraded(upstream)

    async def _reserve(self, request: Request, overlaps: Overlaps) -> Decision:
        async def refresh() -> Overlaps:
            return await self._match(request, overlaps.hashes) if self._wants_overlaps(request) else overlaps

        booking = booking_of(request) if request.request_id else None
        choice, overlaps = await self._scheduler.reserve(
            request,
            overlaps,
            # What runs is not placed, and not booked as if it came now: `attachment` does that.
            None if request.running else booking,
            knows_workers=bool(self._catalog.serving(request).specs),
            refresh=refresh,
        )
        worker = choice.worker
        spec = self._catalog.tenant(request.tenant).specs.get(worker.worker_id)
        block_size = choice.block_size or next((pool.block_size for pool in overlaps.hashes), 0)
        decision = self._decision(request, overlaps, worker, Geometry(block_size, bool(spec and spec.eagle)), booking)
        decision.endpoint = choice.endpoint
        decision.spec = spec
        decision.overlap_blocks = choice.overlap_blocks
        rows = overlaps.rows.get(decision.pool)
        if rows is not None:
            decision.held_blocks = longest(rows)
            decision.confirmed_blocks = rows.confirmed(request.tenant, worker, choice.overlap_blocks)
            # Of a hand-over, where blocks come from is its own to say.
            if spec is not None and request.role is Role.AGGREGATED:
                decision.pull = pull_of(
                    worker,
                    spec,
                    rows,
                    self._catalog.tenant(request.tenant).specs,
                    overlap_blocks=choice.overlap_blocks,
                    block_seconds=block_size * self._token_seconds(request.tenant, request.model),
                )
        decision.effective_overlap_blocks = choice.effective_overlap_blocks
        decision.uncached_tokens = choice.uncached_tokens
        if booking is not None and request.owned:
            booking.cached_tokens = request.prompt.isl_tokens - choice.uncached_tokens
            booking.session_id = choice.session_id or booking.session_id
        decision.session_id = choice.session_id or decision.session_id
        decision.cost, decision.saved_seconds = choice.cost, choice.saved_seconds
        if choice.policy_problem:
            self._metrics.degraded("policy")
            decision.degraded = (f"{POLICY_FAILED}: {choice.policy_problem}", *decision.degraded)
        decision.explanation = choice.explanation
        return decision

    def _round_robin(self, request: Request, overlaps: Overlaps, problem: str) -> Decision:
        spec, rank = self._rounds.take(
            request, self._catalog.serving(request).specs, self._catalog.tenant(request.tenant).models
        )
        self._metrics.degraded("scheduler")
        self._warnings.warning("round-robin", "workers are chosen round-robin, and nothing is booked: %s", problem)
        booking: Booking | None = None
        if request.owned and request.request_id:
            booking = booking_of(request)
            booking.attempt_id |= UNBOOKED_ATTEMPT
        decision = self._decision(request, overlaps, rank, Geometry(spec.block_size, spec.eagle), booking)
        decision.endpoint = spec.http_endpoint
        decision.spec = spec
        decision.uncached_tokens = request.prompt.isl_tokens
        decision.degraded += (problem,)
        if request.explain:
            turn = f"{rank.worker_id}: its turn, as no scheduler chose"
            decision.explanation = scheduler_pb2.Explanation(policy="round-robin", reason="its turn", summary=turn)
        return decision

    def _round_robin_instead(self, request: Request, overlaps: Overlaps, error: NotFound) -> Decision:
        """Place a request for something that no scheduler knows, but this gateway does: it need not wait until they
        know it."""
        if not self._catalog.serving(request).specs:
            raise error
        try:
            return self._round_robin(request, overlaps, f"scheduler: {error}")
        except KvscoutError:
            raise error from None

    def _decision(
        self, request: Request, overlaps: Overlaps, worker: WorkerRank, pool: Geometry, booking: Booking | None
    ) -> Decision:
        hashes = overlaps.hashes.get(pool, b"")
        unknown = request.prompt.unknown or request.prompt.partial
        if booking is not None and request.owned:
            # All that it takes to book it anew; of a request that this gateway does not run, its caller knows.
            booking.worker, booking.block_hashes, booking.output = worker, hashes, request.output
            booking.isl_tokens, booking.session_id = request.prompt.isl_tokens, request.session.session_id
        # A request that asks not to see caches fills them all the same, where the scheduler goes by them.
        cached = self._scheduler.overlap_score_weight or self._wants_overlaps(request)
        return Decision(
            request.tenant,
            request.model,
            worker,
            pool,
            hashes,
            lora_name=request.lora_name,
            session_id=request.session.session_id,
            degraded=(*((unknown,) if unknown else ()), *overlaps.problems.values()),
            booking=booking,
            withdrawn=not (hashes and cached),
        )


def resolve(request: Request, view: TenantView) -> Request:
    """Return a request by the name of its base model: an adapter's name stands for that.

    Raises:
        InvalidArgument: It names no model, or two adapters.
    """
    target = view.resolve(request.model, request.lora_name)
    if not target.lora_name:
        return request
    output = request.output.of_adapter(target.lora_name)
    return replace(request, model=target.model, lora_name=target.lora_name, output=output)


def booking_of(request: Request) -> Booking:
    """Return what a request is booked by."""
    return Booking(request.tenant, request.model, request.role, request.request_id, request.attempt_id)


def _record(span: tracing.Span, request: Request, decision: Decision) -> None:
    """Record a decision."""
    span.record(
        tenant=request.tenant,
        model=request.model,
        role=request.role.value,
        request_id=request.request_id,
        worker=decision.worker.worker_id,
        dp_rank=decision.worker.dp_rank,
        isl_tokens=request.prompt.isl_tokens,
        blocks=decision.blocks,
        overlap_blocks=decision.overlap_blocks,
        uncached_tokens=decision.uncached_tokens,
        cost=decision.cost,
        degraded=bool(decision.degraded),
    )
    if decision.session_id:
        span.record(session=f"{decision.session_id:016x}")
