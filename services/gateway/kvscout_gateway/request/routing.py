"""Placing a prompt: hash it, ask for overlaps, have a worker selected.

A request does not fail because an upstream did: without the indexer the choice is made on load alone, without any
scheduler the workers take turns. Either way the answer says so (`degraded`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import FailedPrecondition, KvscoutError, NotFound
from kvscout_common.observability import tracing
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.registry.worker_proto import role_to_proto
from kvscout_common.transport.wire_fields import bytes_field, number_field
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.members.catalog import Catalog, Serving, Target, TenantView
from kvscout_gateway.request.metrics import GatewayMetrics
from kvscout_gateway.request.round_robin import RoundRobin, eligible
from kvscout_gateway.upstreams.failover import UpstreamDown
from kvscout_gateway.upstreams.indexer.overlaps import NOTHING_FOUND, Found
from kvscout_gateway.upstreams.indexer.remote import Indexer
from kvscout_gateway.upstreams.scheduler.remote import Scheduler, Selection
from kvscout_gateway.values.booking import UNBOOKED_ATTEMPT, Booking
from kvscout_gateway.values.output import Output
from kvscout_gateway.values.placement import Decision, Placement
from kvscout_gateway.values.prompt import HASH_BYTES, Geometry, PromptTooLong, hash_prompt
from kvscout_gateway.values.request import Request

log = logging.getLogger("kvscout.gateway")


@dataclass(slots=True)
class _Asked:
    """A request, resolved and hashed."""

    target: Target
    view: TenantView
    serving: Serving
    hashes: Mapping[Geometry, bytes]
    output: Output
    found: Found = NOTHING_FOUND


class RoutingFlow:
    """hash → find_matches → select."""

    def __init__(
        self,
        catalog: Catalog,
        indexer: Indexer,
        scheduler: Scheduler,
        metrics: GatewayMetrics,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Place prompts.

        Args:
            catalog: The registered workers.
            indexer: Knows where prompts are cached.
            scheduler: Chooses workers.
            metrics: Counts latencies and degraded decisions.
            clock: Seconds.
        """
        self._catalog = catalog
        self._indexer = indexer
        self._scheduler = scheduler
        self._metrics = metrics
        self._clock = clock
        self._turns = RoundRobin()
        self._warnings = RateLimitedLog(log, period_seconds=10.0)

    async def place(self, request: Request) -> Placement:
        """Pick a worker, and book the request on it if it has an id; one that runs already is booked a moment later.

        Args:
            request: What is asked.

        Raises:
            InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted, Unavailable, AlreadyExists: As the
                scheduler answers, or for a prompt that cannot be hashed.
        """
        started = self._clock()
        asked = self._prepare(request)
        if request.fallback_reason:
            return self._round_robin(asked, request, request.fallback_reason)
        hashed = self._clock()
        if self._wants_overlaps(request):
            with tracing.span("find_matches", tracing.Kind.CLIENT) as span:
                asked.found = await self._indexer.match(
                    asked.target.model, request.tenant, asked.hashes, prompt_tokens=request.prompt.own_tokens
                )
                self._count_missed(asked.found)
                span.record(degraded=bool(asked.found.problems))
        matched = self._clock()
        with tracing.span("select", tracing.Kind.CLIENT) as span:
            try:
                placement = await self._select(asked, request)
            except UpstreamDown as error:
                placement = self._round_robin(asked, request, str(error))
            except NotFound as error:
                placement = self._round_robin_instead(asked, request, error)
            if tracing.enabled():
                _tell(span, request, placement)
        finished = self._clock()
        self._metrics.observe_routing(
            hash_seconds=hashed - started,
            find_matches_seconds=matched - hashed,
            select_seconds=finished - matched,
            total_seconds=finished - started,
        )
        return placement

    async def place_for_caller(self, request: Request) -> Placement:
        """As `place`, for a caller who takes the prompt to its engine: what is booked counts as sent, a query does not.

        Raises:
            KvscoutError: As `place`.
        """
        request.trace()
        placement = await self.place(request)
        if request.request_id:
            self.dispatched(placement)
        return placement

    def dispatched(self, placement: Placement) -> None:
        """The prompt goes to its engine now: the indexers may predict its blocks there. Returns at once."""
        if placement.decision is not None:
            self._indexer.routed(placement.decision)

    def failed(self, placement: Placement) -> None:
        """The engine failed before its first token: what no indexer was told of yet, none needs to know."""
        if placement.decision is not None:
            placement.decision.withdrawn = True

    async def potential_loads(self, request: Request) -> scheduler_pb2.GetPotentialLoadsResponse:
        """The load of each worker, now and with a prompt added; one without tokens adds nothing.

        Raises:
            UpstreamDown: No scheduler answers.
            InvalidArgument, NotFound: As the scheduler answers.
        """
        asked = self._prepare(request)
        found = await self._indexer.match(
            asked.target.model, request.tenant, asked.hashes, prompt_tokens=request.prompt.own_tokens
        )
        self._count_missed(found)
        kind = scheduler_pb2.SchedulerGetPotentialLoadsRequest
        message = kind(
            model=asked.target.model,
            tenant=request.tenant,
            role=role_to_proto(request.role),
            isl_tokens=request.prompt.isl_tokens,
        )
        message.MergeFromString(_hashed(kind, replace(asked, found=found)))
        return await self._scheduler.call(lambda stub: stub.GetPotentialLoads, message)

    def unroutable(self, request: Request) -> tuple[str, ...]:
        """Ids of the workers that Route may choose and Generate must not.

        Raises:
            InvalidArgument: As `place`.
            FailedPrecondition: The gateway can run requests on none of the model's workers, or not on the pinned one.
        """
        view = self._catalog.tenant(request.tenant)
        serving = view.serving(view.resolve(request.model, request.lora_name).model)
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
        """The workers that may run a request, whatever their load and health."""
        view = self._catalog.tenant(request.tenant)
        target = view.resolve(request.model, request.lora_name)
        serving = view.serving(target.model)
        return [spec for spec in eligible(request, target, serving) if spec.worker_id not in serving.unroutable]

    def _prepare(self, request: Request) -> _Asked:
        view = self._catalog.tenant(request.tenant)
        target = view.resolve(request.model, request.lora_name)
        serving = view.serving(target.model)
        longest = serving.longest_prompt
        if longest is not None and request.prompt.own_tokens > longest and not request.prompt.unknown:
            raise PromptTooLong(request.prompt.own_tokens, longest, field=request.prompt.field)
        hashes = hash_prompt(request.prompt, serving.pools, target.lora_name)
        return _Asked(target, view, serving, hashes, request.output.of_adapter(target.lora_name))

    def _wants_overlaps(self, request: Request) -> bool:
        override = request.override
        if override is not None and override.HasField("overlap_score_weight"):
            return override.overlap_score_weight != 0
        return self._scheduler.overlap_score_weight != 0

    def _count_missed(self, found: Found) -> None:
        for upstream in found.problems:
            self._metrics.degraded(upstream)

    def _decision(self, asked: _Asked, request: Request, rank: WorkerRank, pool: Geometry) -> Decision | None:
        """Return what to report to the indexers; None where the scheduler ignores caches and this request does not ask
        for them. One that asks not to see them fills them all the same."""
        hashes = asked.hashes.get(pool)
        if not hashes or not (self._scheduler.overlap_score_weight or self._wants_overlaps(request)):
            return None
        return Decision(request.tenant, asked.target.model, rank, pool, hashes)

    async def _select(self, asked: _Asked, request: Request) -> Placement:
        async def refresh() -> Selection:
            if not self._wants_overlaps(request):
                return _selection(asked, request)
            found = await self._indexer.match(
                asked.target.model, request.tenant, asked.hashes, prompt_tokens=request.prompt.own_tokens
            )
            return _selection(replace(asked, found=found), request)

        ref = _ref(asked, request)
        answer, found, booking = await self._scheduler.reserve(
            # What is there is not chosen a place for, and not booked as if it came now: `attachment` does that.
            scheduler_pb2.RequestRef() if request.running else ref,
            _selection(asked, request),
            owned=request.owned,
            knows_workers=bool(asked.serving.specs),
            queue_wait_seconds=request.queue_wait_seconds,
            refresh=refresh,
        )
        worker = WorkerRank(answer.worker.worker_id, answer.worker.dp_rank)
        spec = asked.view.specs.get(worker.worker_id)
        block_size = answer.block_size or next((pool.block_size for pool in asked.hashes), 0)
        geometry = Geometry(block_size, bool(spec and spec.eagle))
        hashes = asked.hashes.get(geometry, b"")
        if request.running:
            booking = Booking(ref)
        if booking is not None:
            cached_tokens = request.prompt.isl_tokens - answer.uncached_tokens
            _describe(booking, asked, request, worker, hashes, cached_tokens=cached_tokens)
        return Placement(
            worker=worker,
            endpoint=answer.http_endpoint,
            spec=spec,
            engine_model=asked.target.lora_name or asked.target.model,
            num_blocks=len(hashes) // HASH_BYTES,
            block_size=geometry.block_size,
            overlap_blocks=answer.overlap_blocks,
            confirmed_blocks=found.confirmed(geometry, request.tenant, worker, answer.overlap_blocks),
            effective_overlap_blocks=answer.effective_overlap_blocks,
            uncached_tokens=answer.uncached_tokens,
            cost=answer.cost,
            degraded=_degraded(request, found),
            explanation=answer.explanation if answer.HasField("explanation") else None,
            booking=booking,
            decision=self._decision(asked, request, worker, geometry),
        )

    def _round_robin(self, asked: _Asked, request: Request, problem: str) -> Placement:
        spec, rank = self._turns.take(request, asked.target, asked.serving)
        pool = Geometry(spec.block_size, spec.eagle)
        self._metrics.degraded("scheduler")
        self._warnings.warning("turns", "workers take turns, nothing is booked: %s", problem)
        hashes = asked.hashes.get(pool, b"")
        booking: Booking | None = None
        if request.owned and request.request_id:
            ref = _ref(asked, request)
            ref.attempt_id |= UNBOOKED_ATTEMPT
            booking = Booking(ref)
            _describe(booking, asked, request, rank, hashes)
        return Placement(
            worker=rank,
            endpoint=spec.http_endpoint,
            spec=spec,
            engine_model=asked.target.lora_name or asked.target.model,
            num_blocks=len(hashes) // HASH_BYTES,
            block_size=spec.block_size,
            uncached_tokens=request.prompt.isl_tokens,
            degraded=(*_degraded(request, asked.found), problem),
            booking=booking,
            decision=self._decision(asked, request, rank, pool),
        )

    def _round_robin_instead(self, asked: _Asked, request: Request, error: NotFound) -> Placement:
        """Where no scheduler knows what was asked for, but this gateway does: the request need not wait until they
        are told."""
        if not asked.serving.specs:
            raise error
        try:
            return self._round_robin(asked, request, f"scheduler: {error}")
        except KvscoutError:
            raise error from None


def _tell(span: tracing.Span, request: Request, placement: Placement) -> None:
    """The facts of a decision."""
    span.record(
        tenant=request.tenant,
        model=request.model,
        role=request.role.value,
        request_id=request.request_id,
        worker=placement.worker.worker_id,
        dp_rank=placement.worker.dp_rank,
        isl_tokens=request.prompt.isl_tokens,
        blocks=placement.num_blocks,
        overlap_blocks=placement.overlap_blocks,
        uncached_tokens=placement.uncached_tokens,
        cost=placement.cost,
        degraded=bool(placement.degraded),
    )


def _degraded(request: Request, found: Found) -> tuple[str, ...]:
    """Return why less was known than usual, besides the scheduler."""
    unknown = request.prompt.unknown
    return (*((unknown,) if unknown else ()), *found.problems.values())


_HasPrompt: TypeAlias = type[scheduler_pb2.SelectRequest | scheduler_pb2.SchedulerGetPotentialLoadsRequest]


def _hashed(kind: _HasPrompt, asked: _Asked) -> bytes:
    """The fields of a scheduler's message that tell the prompt, for each kind of the model's workers."""
    fields: list[bytes] = []
    for pool, hashes in asked.hashes.items():
        overlaps = asked.found.overlaps.get(pool)
        if not fields:
            fields.append(number_field(kind.BLOCK_SIZE_FIELD_NUMBER, pool.block_size))
            fields += _prompt(kind, hashes, overlaps)
            continue
        other = scheduler_pb2.PoolPrompt(block_size=pool.block_size, eagle=pool.eagle).SerializeToString()
        other += b"".join(_prompt(scheduler_pb2.PoolPrompt, hashes, overlaps))
        fields.append(bytes_field(kind.OTHER_POOLS_FIELD_NUMBER, other))
    return b"".join(fields)


def _prompt(
    kind: _HasPrompt | type[scheduler_pb2.PoolPrompt], hashes: bytes, overlaps: types_pb2.Overlaps | None
) -> Iterator[bytes]:
    if hashes:
        yield bytes_field(kind.BLOCK_HASHES_FIELD_NUMBER, hashes)
    if overlaps is not None:
        yield bytes_field(kind.OVERLAPS_FIELD_NUMBER, overlaps.SerializeToString())


def _selection(asked: _Asked, request: Request) -> Selection:
    kind, output = scheduler_pb2.SelectRequest, asked.output
    # What is empty is not told: each collection that a message takes over costs more than all plain fields.
    message = kind(
        model=asked.target.model,
        tenant=request.tenant,
        role=role_to_proto(request.role),
        request_id="" if request.running else request.request_id,
        isl_tokens=request.prompt.isl_tokens,
        allowed_worker_ids=request.allowed or None,
        pinned_worker_id=request.pinned,
        pinned_dp_rank=request.pinned_rank,
        excluded_worker_ids=request.excluded or None,
        required_labels=request.required_labels or None,
        lora_name=asked.target.lora_name,
        router_config_override=request.override,
        priority=request.priority,
        expected_output_tokens=output.expected_tokens,
        max_output_tokens=output.max_tokens,
        output_class=output.output_class,
        estimate_prefill_complete=output.unseen,
        explain=request.explain,
        traceparent=tracing.traceparent(),
        lease_seconds=request.lease_seconds,
        prefill_elsewhere=request.remote_prefill,
    )
    return Selection(message.SerializeToString() + _hashed(kind, asked), asked.found)


def _ref(asked: _Asked, request: Request) -> scheduler_pb2.RequestRef:
    """The name of the booking that is asked for."""
    return scheduler_pb2.RequestRef(
        model=asked.target.model,
        tenant=request.tenant,
        role=role_to_proto(request.role),
        request_id=request.request_id,
        attempt_id=request.attempt_id,
    )


def _describe(
    booking: Booking, asked: _Asked, request: Request, worker: WorkerRank, hashes: bytes, *, cached_tokens: int = 0
) -> None:
    """Note what books a request anew; of one that this gateway does not run, its caller knows."""
    if request.owned:
        booking.worker = worker
        booking.block_hashes = hashes
        booking.isl_tokens = request.prompt.isl_tokens
        booking.cached_tokens = cached_tokens
        booking.output = asked.output
