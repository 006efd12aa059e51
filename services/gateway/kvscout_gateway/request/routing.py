"""Placing a prompt: hash it, ask for overlaps, have a worker selected.

A request does not fail because a helper did: without the indexer the choice is made on load alone, without any
scheduler the workers take turns. Either way the answer says so (`degraded`).
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import FailedPrecondition, InvalidArgument, KvscoutError, NotFound
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_common.worker_proto import role_to_proto
from kvscout_gateway.catalog import Catalog, Serving, Target, TenantView
from kvscout_gateway.failover import HelperDown, Member
from kvscout_gateway.indexer_client.overlaps import NOTHING_FOUND, Found, OverlapQuery
from kvscout_gateway.indexer_client.reporter import Decision, Reporter
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.request.placement import UNBOOKED_ATTEMPT, Booking, Placement, SchedulerMember, Schedulers, Wish
from kvscout_gateway.request.prompt import Geometry, hash_prompt
from kvscout_gateway.scheduler_client.bookings import Bookings
from kvscout_gateway.scheduler_client.link import LeftInLine, Line, Reserved, ref_of
from kvscout_gateway.scheduler_client.turns import Turns, eligible

log = logging.getLogger("kvscout.gateway")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A wish, resolved and hashed."""

    target: Target
    view: TenantView
    serving: Serving
    hashes: Mapping[Geometry, list[int]]
    found: Found = NOTHING_FOUND


class RoutingFlow:
    """hash → find_matches → select."""

    def __init__(
        self,
        catalog: Catalog,
        overlaps: OverlapQuery,
        reporter: Reporter,
        schedulers: Schedulers,
        metrics: GatewayMetrics,
        *,
        bookings: Bookings,
        scheduler_timeout_seconds: float,
        queue_wait_seconds: float,
        resync: Callable[[Member[Any]], object],
        draw_attempt: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Places prompts.

        Args:
            catalog: The registered workers.
            overlaps: How indexers are asked.
            reporter: How indexers are told.
            schedulers: In order of preference.
            metrics: Where latencies and degraded decisions are counted.
            bookings: Told of what is being booked, and frees what may have been although the answer did not come.
            scheduler_timeout_seconds: Longest wait for all schedulers together.
            queue_wait_seconds: Longest wait in line at one of them.
            resync: Told of a scheduler that does not know workers which this gateway knows.
            draw_attempt: An attempt id that no other booking call has.
            clock: Seconds.
        """
        self._catalog = catalog
        self._overlaps = overlaps
        self._reporter = reporter
        self._schedulers = schedulers
        self._bookings = bookings
        self._metrics = metrics
        self._scheduler_timeout = scheduler_timeout_seconds
        self._queue_wait = queue_wait_seconds
        self._resync = resync
        self._draw_attempt = draw_attempt
        self._clock = clock
        self._turns = Turns()
        self._warnings = RateLimitedLog(log, period_seconds=10.0)
        self.overlap_score_weight = 1.0
        """The scheduler's; 0 = prefix caches are ignored, the indexer is neither asked nor told."""

    async def place(self, wish: Wish) -> Placement:
        """Picks a worker, and books the request on it if it has an id.

        Args:
            wish: What is asked.

        Raises:
            InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted, Unavailable, AlreadyExists: As the
                scheduler answers, or for a prompt that cannot be hashed.
        """
        started = self._clock()
        asked = self._prepare(wish)
        hashed = self._clock()
        if self._wants_overlaps(wish):
            found = await self._overlaps.find(asked.target.model, wish.tenant, asked.hashes)
            asked = replace(asked, found=found)
            self._count_missed(found)
        matched = self._clock()
        request = _select_request(asked, wish)
        try:
            placement = await self._select(asked, wish, request)
        except HelperDown as error:
            placement = self._take_turn(asked, wish, str(error))
        except NotFound as error:
            placement = self._take_turn_instead(asked, wish, error)
        finished = self._clock()
        self._metrics.observe_routing(
            hash_seconds=hashed - started,
            find_matches_seconds=matched - hashed,
            select_seconds=finished - matched,
            total_seconds=finished - started,
        )
        return placement

    async def place_elsewhere(self, wish: Wish) -> Placement:
        """As `place`, for a caller who takes the prompt to its engine: what is booked counts as sent, a query does not.

        Raises:
            KvscoutError: As `place`.
        """
        placement = await self.place(wish)
        if wish.request_id:
            self.dispatched(placement)
        return placement

    def dispatched(self, placement: Placement) -> None:
        """The prompt goes to its engine now: the indexers may predict its blocks there. Returns at once."""
        if placement.decision is not None:
            self._reporter.report(placement.decision)

    def failed(self, placement: Placement) -> None:
        """The engine failed before its first token: what no indexer was told of yet, none needs to know."""
        if placement.decision is not None:
            placement.decision.withdrawn = True

    async def potential_loads(self, wish: Wish) -> scheduler_pb2.PotentialLoadsResponse:
        """The load of each worker, now and with a prompt added; one without tokens adds nothing.

        Raises:
            HelperDown: No scheduler answers.
            InvalidArgument, NotFound: As the scheduler answers.
        """
        asked = self._prepare(wish)
        found = await self._overlaps.find(asked.target.model, wish.tenant, asked.hashes)
        self._count_missed(found)
        request = scheduler_pb2.PotentialLoadsRequest(
            model=asked.target.model,
            tenant=wish.tenant,
            role=role_to_proto(wish.role),
            isl_tokens=wish.prompt.isl_tokens,
            **_hashed(replace(asked, found=found)),
        )
        answer, _ = await self._schedulers.call(
            lambda stub: stub.GetPotentialLoads, request, timeout_seconds=self._scheduler_timeout
        )
        return answer

    def undriven(self, wish: Wish) -> tuple[str, ...]:
        """Ids of the workers that Route may choose and Generate must not.

        Raises:
            InvalidArgument: As `place`.
            FailedPrecondition: The gateway can run requests on none of the model's workers, or not on the pinned one.
        """
        view = self._catalog.tenant(wish.tenant)
        serving = view.serving(view.resolve(wish.model, wish.lora_name).model)
        undriven = serving.undriven
        if undriven and (wish.pinned in undriven or len(undriven) == len(serving.specs)):
            who = repr(wish.pinned) if wish.pinned else f"each of the {len(undriven)} workers of {wish.model!r}"
            raise FailedPrecondition(
                f"{who} has no HTTP endpoint or an API that the gateway does not speak: ask Route, and run it yourself"
            )
        return undriven

    def candidates(self, wish: Wish) -> list[WorkerSpec]:
        """The workers that may run a request, whatever their load and health."""
        view = self._catalog.tenant(wish.tenant)
        target = view.resolve(wish.model, wish.lora_name)
        serving = view.serving(target.model)
        return [spec for spec in eligible(wish, target, serving) if spec.worker_id not in serving.undriven]

    def _prepare(self, wish: Wish) -> _Asked:
        view = self._catalog.tenant(wish.tenant)
        target = view.resolve(wish.model, wish.lora_name)
        serving = view.serving(target.model)
        longest = serving.longest_prompt
        if longest is not None and wish.prompt.isl_tokens > longest and not wish.prompt.unknown:
            raise InvalidArgument(
                f"{wish.prompt.isl_tokens} tokens; the largest cache of the model's workers holds {longest}",
                field="token_ids" if wish.prompt.token_ids else "block_hashes",
            )
        return _Asked(target, view, serving, hash_prompt(wish.prompt, serving.pools, target.lora_name))

    def _wants_overlaps(self, wish: Wish) -> bool:
        override = wish.override
        if override is not None and override.HasField("overlap_score_weight"):
            return override.overlap_score_weight != 0
        return self.overlap_score_weight != 0

    def _count_missed(self, found: Found) -> None:
        for helper in found.problems:
            self._metrics.degraded(helper)

    def _decision(self, asked: _Asked, wish: Wish, rank: WorkerRank, pool: Geometry) -> Decision | None:
        """What to tell the indexers. Not where the scheduler ignores caches, unless this request asks for them: one
        that asks not to see them fills them all the same."""
        hashes = asked.hashes.get(pool)
        if not hashes or not (self.overlap_score_weight or self._wants_overlaps(wish)):
            return None
        return Decision(wish.tenant, asked.target.model, rank, pool, hashes)

    async def _select(self, asked: _Asked, wish: Wish, request: scheduler_pb2.SelectRequest) -> Placement:
        booking = Booking(ref_of(request)) if wish.request_id else None
        reserved, member, found = await self._ask_scheduler(asked, wish, request, booking)
        answer = reserved.response
        worker = WorkerRank(answer.worker.worker_id, answer.worker.dp_rank)
        spec = asked.view.specs.get(worker.worker_id)
        geometry = Geometry(answer.block_size or request.block_size, bool(spec and spec.eagle))
        hashes = asked.hashes.get(geometry, ())
        if booking is not None:
            booking.scheduler, booking.leased = member, reserved.leased
            _describe(booking, wish, worker, hashes, cached_tokens=wish.prompt.isl_tokens - answer.uncached_tokens)
        return Placement(
            worker=worker,
            endpoint=answer.http_endpoint,
            spec=spec,
            engine_model=request.lora_name or request.model,
            num_blocks=len(hashes),
            block_size=geometry.block_size,
            overlap_blocks=answer.overlap_blocks,
            confirmed_blocks=found.confirmed(geometry, wish.tenant, worker, answer.overlap_blocks),
            effective_overlap_blocks=answer.effective_overlap_blocks,
            uncached_tokens=answer.uncached_tokens,
            cost=answer.cost,
            degraded=_degraded(wish, found),
            explanation=answer.explanation if answer.HasField("explanation") else None,
            booking=booking,
            decision=self._decision(asked, wish, worker, geometry),
        )

    async def _ask_scheduler(
        self, asked: _Asked, wish: Wish, request: scheduler_pb2.SelectRequest, booking: Booking | None
    ) -> tuple[Reserved, SchedulerMember, Found]:
        """Also returns the overlaps on which the scheduler decided."""
        tried = [(request, asked.found)]

        async def refresh() -> scheduler_pb2.SelectRequest:
            if not self._wants_overlaps(wish):
                return request
            found = await self._overlaps.find(asked.target.model, wish.tenant, asked.hashes)
            fresh = _select_request(replace(asked, found=found), replace(wish, attempt_id=request.attempt_id))
            tried.append((fresh, found))
            return fresh

        given_up: list[scheduler_pb2.RequestRef] = []
        undecided: list[SchedulerMember] = []

        def lost(member: SchedulerMember) -> None:
            if booking is None:
                return
            if not wish.owned:
                undecided.append(member)
                return
            # One that only hung goes on with this attempt, and with its Free. Schedulers may share their bookings: what
            # the next one books is another attempt, which neither of them can mean.
            self._bookings.free_lost(Booking(booking.ref, member))
            given_up.append(booking.ref)
            request.attempt_id = self._draw_attempt()
            booking.ref = ref_of(request)

        def uninformed(member: SchedulerMember, error: KvscoutError) -> bool:
            """It may have restarted, with the workers that this gateway knows still under way to it."""
            if not isinstance(error, NotFound) or not asked.serving.specs:
                return False
            self._resync(member)
            return True

        line = Line(time.monotonic() + self._queue_wait, refresh)
        asking: AbstractContextManager[None] = (
            self._bookings.asking(booking) if booking and wish.owned else nullcontext()
        )
        with asking:
            while True:
                try:
                    reserved, member = await self._schedulers.call(
                        lambda stub: partial(
                            stub.place,
                            line=line,
                            books=booking is not None,
                            owned=wish.owned,
                            given_up=tuple(given_up),
                        ),
                        request,
                        timeout_seconds=self._scheduler_timeout,
                        lost=lost,
                        uninformed=uninformed,
                    )
                except LeftInLine as error:
                    log.debug("%s is asked for anew: %s", wish.request_id, error)
                    request = await refresh()
                    continue
                except BaseException:
                    # Its caller frees it by the attempt that it named: unless it is booked nowhere, that is left to it.
                    for member in undecided:
                        self._bookings.free_lost(Booking(ref_of(request), member))
                    raise
                [found] = [found for sent, found in tried if sent is line.sent]
                return reserved, member, found

    def _take_turn(self, asked: _Asked, wish: Wish, problem: str) -> Placement:
        spec, rank = self._turns.take(wish, asked.target, asked.serving)
        pool = Geometry(spec.block_size, spec.eagle)
        self._metrics.degraded("scheduler")
        self._warnings.warning("turns", "workers take turns, nothing is booked: %s", problem)
        hashes = asked.hashes.get(pool, ())
        booking: Booking | None = None
        if wish.owned and wish.request_id:
            ref = ref_of(_select_request(asked, wish))
            ref.attempt_id |= UNBOOKED_ATTEMPT
            booking = Booking(ref)
            _describe(booking, wish, rank, hashes)
        return Placement(
            worker=rank,
            endpoint=spec.http_endpoint,
            spec=spec,
            engine_model=asked.target.lora_name or asked.target.model,
            num_blocks=len(hashes),
            block_size=spec.block_size,
            uncached_tokens=wish.prompt.isl_tokens,
            degraded=(*_degraded(wish, asked.found), problem),
            booking=booking,
            decision=self._decision(asked, wish, rank, pool),
        )

    def _take_turn_instead(self, asked: _Asked, wish: Wish, error: NotFound) -> Placement:
        """Where no scheduler knows what was asked for, but this gateway does: the request need not wait until they
        are told."""
        if not asked.serving.specs:
            raise error
        try:
            return self._take_turn(asked, wish, f"scheduler: {error}")
        except KvscoutError:
            raise error from None


def _degraded(wish: Wish, found: Found) -> tuple[str, ...]:
    """Why less was known than usual, besides the scheduler."""
    unknown = wish.prompt.unknown
    return (*((unknown,) if unknown else ()), *found.problems.values())


def _hashed(asked: _Asked) -> dict[str, Any]:
    """The fields of a scheduler's message that tell the prompt, for each kind of the model's workers."""
    overlaps, pools = asked.found.overlaps, list(asked.hashes)
    first = pools[0] if pools else None
    return {
        "block_hashes": asked.hashes[first] if first else (),
        "block_size": first.block_size if first else 0,
        "overlaps": overlaps.get(first) if first else None,
        "other_pools": [_pool_prompt(pool, asked.hashes[pool], overlaps.get(pool)) for pool in pools[1:]],
    }


def _select_request(asked: _Asked, wish: Wish) -> scheduler_pb2.SelectRequest:
    return scheduler_pb2.SelectRequest(
        model=asked.target.model,
        tenant=wish.tenant,
        role=role_to_proto(wish.role),
        request_id=wish.request_id,
        attempt_id=wish.attempt_id,
        isl_tokens=wish.prompt.isl_tokens,
        **_hashed(asked),
        allowed_worker_ids=wish.allowed,
        pinned_worker_id=wish.pinned,
        pinned_dp_rank=wish.pinned_rank,
        excluded_worker_ids=wish.excluded,
        required_labels=wish.required_labels,
        lora_name=asked.target.lora_name,
        router_config_override=wish.override,
        priority=wish.priority,
        expected_output_tokens=wish.expected_output_tokens,
        explain=wish.explain,
        lease_seconds=wish.lease_seconds,
        prefill_elsewhere=wish.prefill_elsewhere,
    )


def _describe(
    booking: Booking, wish: Wish, worker: WorkerRank, hashes: Sequence[int], *, cached_tokens: int = 0
) -> None:
    """Notes what books a request anew; of one that this gateway does not run, its caller knows."""
    if wish.owned:
        booking.worker = worker
        booking.block_hashes = array("Q", hashes).tobytes()
        booking.isl_tokens = wish.prompt.isl_tokens
        booking.cached_tokens = cached_tokens
        booking.expected_output_tokens = wish.expected_output_tokens


def _pool_prompt(pool: Geometry, hashes: list[int], overlaps: types_pb2.Overlaps | None) -> scheduler_pb2.PoolPrompt:
    return scheduler_pb2.PoolPrompt(
        block_size=pool.block_size, eagle=pool.eagle, block_hashes=hashes, overlaps=overlaps
    )
