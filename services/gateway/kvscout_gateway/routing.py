"""Placing a prompt: hash it, ask for overlaps, have a worker selected.

A request does not fail because a helper did: without the indexer the choice is made on load alone, without any
scheduler the workers take turns. Either way the answer says so (`degraded`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvscout.v1 import indexer_pb2, indexer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, types_pb2
from kvscout_common.errors import NotFound, ResourceExhausted, Unavailable
from kvscout_common.registry import Registry
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_common.worker_proto import role_to_proto
from kvscout_gateway.failover import Failover, HelperDown, Member
from kvscout_gateway.metrics import GatewayMetrics
from kvscout_gateway.prompt import Geometry, Prompt, Target, geometries, require_block_size, resolve_target

Indexers: TypeAlias = "Failover[indexer_pb2_grpc.IndexerAsyncStub]"
Schedulers: TypeAlias = "Failover[scheduler_pb2_grpc.SchedulerAsyncStub]"
SchedulerMember: TypeAlias = "Member[scheduler_pb2_grpc.SchedulerAsyncStub]"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of its worker."""

    model: str
    tenant: str
    prompt: Prompt
    lora_name: str = ""
    role: Role = Role.AGGREGATED
    request_id: str = ""
    """"" = query only."""
    attempt_id: int = 0
    allowed: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    pinned: str = ""
    pinned_rank: int | None = None
    required_labels: Mapping[str, str] = field(default_factory=dict)
    override: types_pb2.RouterConfigOverride | None = None
    priority: int = 0
    expected_output_tokens: int = 0
    explain: bool = False
    lease_seconds: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prompt goes."""

    worker: WorkerRank
    endpoint: str
    spec: WorkerSpec | None
    """The worker's registration; None if this gateway does not know it (yet)."""
    engine_model: str
    """The name under which the engine serves what was asked for: the adapter's, or the model's."""
    num_blocks: int
    block_size: int
    overlap_blocks: int
    effective_overlap_blocks: float
    cost: float
    degraded: tuple[str, ...]
    explanation: scheduler_pb2.Explanation | None
    booking: Booking | None
    """None where nothing was booked: query only, or no scheduler."""


@dataclass(frozen=True, slots=True)
class Booking:
    """A reservation that somebody owes a Free, and the scheduler that has it."""

    ref: scheduler_pb2.RequestRef
    scheduler: SchedulerMember


class RoutingFlow:
    """hash → find_matches → select."""

    def __init__(
        self,
        registry: Registry,
        indexers: Indexers,
        schedulers: Schedulers,
        metrics: GatewayMetrics,
        *,
        indexer_timeout_seconds: float,
        scheduler_timeout_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._registry = registry
        self._indexers = indexers
        self._schedulers = schedulers
        self._metrics = metrics
        self._indexer_timeout = indexer_timeout_seconds
        self._scheduler_timeout = scheduler_timeout_seconds
        self._clock = clock
        self._turn = 0
        self.overlap_score_weight = 1.0
        """The scheduler's; 0 = prefix caches are ignored, the indexer is not asked."""

    async def place(self, wish: Wish) -> Placement:
        """Picks a worker, and books the request on it if it has an id.

        Raises:
            InvalidArgument, NotFound, FailedPrecondition, ResourceExhausted, Unavailable, AlreadyExists: As the
                scheduler answers, or for a prompt that cannot be hashed.
        """
        started = self._clock()
        workers = [entry.spec for entry in self._registry.entries(wish.tenant)]
        target = resolve_target(wish.model, wish.lora_name, workers)
        serving = [spec for spec in workers if spec.model == target.model]
        pools = geometries(serving)
        require_block_size(wish.prompt, pools)
        if not pools and wish.prompt.given_block_size:
            pools = [Geometry(wish.prompt.given_block_size, eagle=False)]
        hashes = {pool: wish.prompt.hashes(pool, target.lora_name) for pool in pools}
        hashed = self._clock()
        degraded: list[str] = []
        overlaps = await self._overlaps(target.model, wish, hashes, degraded)
        matched = self._clock()
        request = _select_request(target, wish, pools, hashes, overlaps)
        try:
            placement = await self._select(request, wish, degraded, hashes)
        except HelperDown as error:
            degraded.append(str(error))
            placement = self._take_turns(wish, serving, hashes, degraded)
        finished = self._clock()
        self._metrics.observe_routing(
            hash_seconds=hashed - started,
            find_matches_seconds=matched - hashed,
            select_seconds=finished - matched,
            total_seconds=finished - started,
        )
        return placement

    async def _overlaps(
        self, model: str, wish: Wish, hashes: Mapping[Geometry, list[int]], degraded: list[str]
    ) -> dict[Geometry, types_pb2.Overlaps]:
        override = wish.override
        weight = self.overlap_score_weight
        if override is not None and override.HasField("overlap_score_weight"):
            weight = override.overlap_score_weight
        if weight == 0 or not self._indexers.members:
            return {}

        async def ask(pool: Geometry) -> tuple[Geometry, types_pb2.Overlaps]:
            request = indexer_pb2.FindMatchesRequest(
                model=model,
                tenant=wish.tenant,
                block_size=pool.block_size,
                eagle=pool.eagle,
                block_hashes=hashes[pool],
            )
            answer, _ = await self._indexers.call(
                lambda stub: stub.FindMatches, request, timeout_seconds=self._indexer_timeout
            )
            return pool, answer.overlaps

        found: dict[Geometry, types_pb2.Overlaps] = {}
        pending = [ask(pool) for pool in hashes if hashes[pool]]
        for result in await asyncio.gather(*pending, return_exceptions=True):
            if isinstance(result, HelperDown):
                degraded.append(str(result))
                self._metrics.degraded("indexer")
            elif isinstance(result, NotFound):
                # The registration has not reached the indexer: it knows no block of this model either.
                degraded.append(f"indexer: {result}")
                self._metrics.degraded("indexer")
            elif isinstance(result, BaseException):
                raise result
            else:
                found[result[0]] = result[1]
        return found

    async def _select(
        self,
        request: scheduler_pb2.SelectRequest,
        wish: Wish,
        degraded: list[str],
        hashes: Mapping[Geometry, list[int]],
    ) -> Placement:
        if wish.request_id:
            answer, member = await self._schedulers.call(
                lambda stub: stub.SelectAndReserve, request, timeout_seconds=self._scheduler_timeout
            )
        else:
            answer, member = await self._schedulers.call(
                lambda stub: stub.Select, request, timeout_seconds=self._scheduler_timeout
            )
        worker = WorkerRank(answer.worker.worker_id, answer.worker.dp_rank)
        spec = self._spec(wish.tenant, worker.worker_id)
        booking = None
        if wish.request_id:
            ref = scheduler_pb2.RequestRef(
                model=request.model,
                tenant=request.tenant,
                role=request.role,
                request_id=request.request_id,
                attempt_id=request.attempt_id,
            )
            booking = Booking(ref, member)
        geometry = Geometry(answer.block_size or request.block_size, bool(spec and spec.eagle))
        return Placement(
            worker=worker,
            endpoint=answer.http_endpoint,
            spec=spec,
            engine_model=request.lora_name or request.model,
            num_blocks=len(hashes.get(geometry, ())),
            block_size=geometry.block_size,
            overlap_blocks=answer.overlap_blocks,
            effective_overlap_blocks=answer.effective_overlap_blocks,
            cost=answer.cost,
            degraded=tuple(degraded),
            explanation=answer.explanation if answer.HasField("explanation") else None,
            booking=booking,
        )

    def _take_turns(
        self, wish: Wish, serving: list[WorkerSpec], hashes: Mapping[Geometry, list[int]], degraded: list[str]
    ) -> Placement:
        """Without any scheduler: the model's workers in turn, unbooked."""
        self._metrics.degraded("scheduler")
        if not serving:
            raise NotFound(f"no worker of model {wish.model!r} was ever registered here", field="model")
        target = resolve_target(wish.model, wish.lora_name, serving)
        fitting = [
            (spec, rank)
            for spec in serving
            for rank in spec.ranks
            if spec.role is wish.role
            and not spec.draining
            and spec.worker_id not in wish.excluded
            and (not wish.allowed or spec.worker_id in wish.allowed)
            and wish.pinned in ("", spec.worker_id)
            and wish.pinned_rank in (None, rank.dp_rank)
            and all(spec.labels.get(key) == value for key, value in wish.required_labels.items())
        ]
        if not fitting:
            raise Unavailable("no scheduler answers, and no worker fits the request", retry_after_seconds=1.0)
        self._turn += 1
        spec, rank = fitting[self._turn % len(fitting)]
        return Placement(
            worker=rank,
            endpoint=spec.http_endpoint,
            spec=spec,
            engine_model=target.lora_name or target.model,
            num_blocks=len(hashes.get(Geometry(spec.block_size, spec.eagle), ())),
            block_size=spec.block_size,
            overlap_blocks=0,
            effective_overlap_blocks=0.0,
            cost=0.0,
            degraded=tuple(degraded),
            explanation=None,
            booking=None,
        )

    def _spec(self, tenant: str, worker_id: str) -> WorkerSpec | None:
        try:
            return self._registry.get(tenant, worker_id).spec
        except NotFound:
            return None


def _select_request(
    target: Target,
    wish: Wish,
    pools: list[Geometry],
    hashes: Mapping[Geometry, list[int]],
    overlaps: Mapping[Geometry, types_pb2.Overlaps],
) -> scheduler_pb2.SelectRequest:
    first = pools[0] if pools else None
    return scheduler_pb2.SelectRequest(
        model=target.model,
        tenant=wish.tenant,
        role=role_to_proto(wish.role),
        request_id=wish.request_id,
        attempt_id=wish.attempt_id,
        block_hashes=hashes[first] if first else (),
        isl_tokens=wish.prompt.isl_tokens,
        block_size=first.block_size if first else 0,
        overlaps=overlaps.get(first) if first else None,
        other_pools=[
            scheduler_pb2.PoolPrompt(
                block_size=pool.block_size,
                eagle=pool.eagle,
                block_hashes=hashes[pool],
                overlaps=overlaps.get(pool),
            )
            for pool in pools[1:]
        ],
        allowed_worker_ids=wish.allowed,
        pinned_worker_id=wish.pinned,
        pinned_dp_rank=wish.pinned_rank,
        excluded_worker_ids=wish.excluded,
        required_labels=wish.required_labels,
        lora_name=target.lora_name,
        router_config_override=wish.override,
        priority=wish.priority,
        expected_output_tokens=wish.expected_output_tokens,
        explain=wish.explain,
        lease_seconds=wish.lease_seconds,
    )


def refuse_when_full(in_flight: int, limit: int) -> None:
    """Refuses a request that would exceed the gateway's own limit.

    Raises:
        ResourceExhausted: With a hint when to come back.
    """
    if in_flight >= limit:
        raise ResourceExhausted(f"{in_flight} requests are in flight, the limit", retry_after_seconds=1.0)
