"""Lists of active requests, waiting ones included, and of worker loads."""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvscout.v1 import scheduler_pb2
from kvscout_common.enum_words import value_of
from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.observability.recent_counts import RECENT_SECONDS
from kvscout_common.registry.worker_proto import rank_to_proto
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.messages.translate import key_to_proto, same_fields
from kvscout_scheduler.policies.policy import Candidates
from kvscout_scheduler.queue.waiting import Waiter
from kvscout_scheduler.values.request import EMPTY_PROMPT, Prompt, SelectionRequest
from kvscout_scheduler.values.reservation import NOWHERE, Phase, PoolId, RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler


class ListPlace(NamedTuple):
    """Place of a request in a list of active ones."""

    queued: bool
    since: float
    """Time when it was booked, or began to wait, on the monotonic clock."""
    key: RequestKey


class WorkerLoad(NamedTuple):
    """Load of one worker rank, now and with a prompt added."""

    rank: WorkerRank
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    busy: bool
    cooldown_seconds: float
    draining: bool
    total_kv_blocks: int
    metrics_age_seconds: float | None
    """Age of the report of its engine; None = there is none that counts."""


MAX_SHARES: Final = 32
"""Shares of a pool's queue in a status."""


def list_active_requests(
    scheduler: Scheduler,
    tenant: str,
    *,
    model: str = "",
    worker_id: str = "",
    limit: int = 1000,
    after: ListPlace | None = None,
    shows_owner: bool = False,
) -> tuple[list[scheduler_pb2.ActiveRequest], int, ListPlace | None]:
    """Return active requests, oldest first; those that wait come last.

    Args:
        scheduler: Whose workers they are on, or wait for.
        tenant: Whose.
        model: "" = all.
        worker_id: "" = all.
        limit: How many at most.
        after: Where an earlier list ended; None = from the beginning.
        shows_owner: Whether the caller may see the ids of owners.

    Returns:
        The first `limit` of them, how many there are, and where to go on if there are more behind these.
    """
    found = [
        booking
        for booking in scheduler.bookings
        if booking.key.tenant == tenant
        and model in ("", booking.key.model)
        and worker_id in ("", booking.reservation.rank.worker_id)
    ]
    queued = (
        []
        if worker_id
        else [w for w in scheduler.waiting if w.request.tenant == tenant and model in ("", w.request.model)]
    )
    places: list[tuple[ListPlace, Booking | Waiter]] = [
        *((ListPlace(False, booking.booked_at, booking.key), booking) for booking in found),
        *((ListPlace(True, waiter.since, waiter.request.key), waiter) for waiter in queued),
    ]
    if after is not None:
        places = [each for each in places if each[0] > after]
    # What was booked in one moment is in the order of the names: a place must distinguish it from its neighbours.
    page = nsmallest(limit, places, key=itemgetter(0))
    now = scheduler.clock()
    listed = [_to_proto(one, now, shows_owner=shows_owner) for _, one in page]
    return listed, len(found) + len(queued), page[-1][0] if page and len(page) < len(places) else None


def _to_proto(active: Booking | Waiter, now: float, *, shows_owner: bool) -> scheduler_pb2.ActiveRequest:
    owner = active.owner.owner_id if shows_owner and active.owner is not None else ""
    if isinstance(active, Waiter):
        return scheduler_pb2.ActiveRequest(
            request=key_to_proto(active.request.key, active.request.attempt_id),
            worker=rank_to_proto(NOWHERE),
            phase=value_of(scheduler_pb2.RequestPhase, Phase.QUEUED),
            owner_id=owner,
            age_seconds=now - active.since,
            session=active.request.session,
        )
    reservation = active.reservation
    return scheduler_pb2.ActiveRequest(
        request=key_to_proto(active.key, reservation.attempt_id),
        worker=rank_to_proto(reservation.rank),
        phase=value_of(scheduler_pb2.RequestPhase, active.phase),
        blocks=active.pool.blocks(active.allocation.slot, reservation.isl_tokens),
        output_blocks=active.output_blocks,
        uncached_tokens=reservation.uncached_tokens,
        owner_id=owner,
        age_seconds=now - active.booked_at,
        lease_remaining_seconds=None if active.expires_at == inf else max(0.0, active.expires_at - now),
        phase_estimated=active.phase is Phase.DECODE and reservation.estimates_prefill,
        session=reservation.session,
    )


def queue_shares(scheduler: Scheduler, pool_id: PoolId) -> list[scheduler_pb2.QueueShare]:
    """Return what waits for a pool, the `MAX_SHARES` largest shares first."""
    queue = scheduler.waiting.queue(pool_id)
    if queue is None:
        return []
    shares = [(priority, share) for priority, shares in queue.shares.items() for share in shares.report()]
    return [
        scheduler_pb2.QueueShare(
            priority=priority,
            caller=share.flow.caller,
            fairness_id=share.flow.fairness_id,
            waiting=share.waiting,
            ahead_seconds=share.ahead_seconds,
        )
        for priority, share in nsmallest(MAX_SHARES, shares, key=lambda entry: (-entry[1].waiting, -entry[0]))
    ]


def policy_failures(scheduler: Scheduler) -> list[scheduler_pb2.PolicyFailure]:
    """Return the policies that failed, the last one first."""
    failures = scheduler.policies.failures
    recent = failures.counts.recent()
    return [
        scheduler_pb2.PolicyFailure(
            policy=policy,
            total=failures.counts.total[policy],
            recent=recent[policy],
            recent_seconds=RECENT_SECONDS,
            last_error=line,
        )
        for policy, line in reversed(failures.last.items())
    ]


def potential_loads(
    scheduler: Scheduler,
    pool_id: PoolId,
    *,
    isl_tokens: int = 0,
    prompt: Prompt = EMPTY_PROMPT,
    other_prompts: tuple[Prompt, ...] = (),
) -> list[WorkerLoad]:
    """Return load of each worker rank, by rank, now and with a prompt added.

    Args:
        scheduler: Its loads are shown.
        pool_id: Whose loads.
        isl_tokens: Length of the prompt; 0 = none.
        prompt: Its hashes and overlaps.
        other_prompts: The same for workers of other block sizes.

    Raises:
        InvalidArgument: Naming the field.
        NotFound: The model was never seen.
    """
    if not pool_id.model:
        raise InvalidArgument("must not be empty", field="model")
    try:
        pool = scheduler.workers.pool(pool_id)
    except Unavailable:
        return []
    prompts = pool.prompts(prompt, other_prompts, isl_tokens)
    request = SelectionRequest(pool_id.model, isl_tokens, prompt, tenant=pool_id.tenant, role=pool_id.role)
    # What is cached is shown where it is worth nothing to a policy, too.
    settings = replace(scheduler.settings, overlap_score_weight=1.0)
    now = scheduler.clock()
    candidates = Candidates(pool, request, pool.everyone, prompts, settings, now=now)
    pool.judge(scheduler.thresholds.get(pool_id.tenant, pool_id.model))
    busy = pool.load.busy()
    return [
        WorkerLoad(
            rank=pool.ranks[slot],
            potential_prefill_tokens=load.prefill_tokens
            + candidates.uncached_tokens(slot, candidates.overlap(index)[1]),
            potential_decode_blocks=candidates.decode_blocks[index],
            active_requests=load.requests,
            active_prefill_tokens=load.prefill_tokens,
            active_decode_blocks=load.decode_blocks,
            busy=bool(busy >> slot & 1),
            cooldown_seconds=max(0.0, pool.cooldown_until.get(slot, now) - now),
            draining=bool(pool.draining >> slot & 1),
            total_kv_blocks=pool.specs[slot].total_kv_blocks,
            metrics_age_seconds=now - pool.reported_at[slot] if slot in pool.reported_at else None,
        )
        for index, (slot, load) in enumerate((slot, pool.load.at(slot)) for slot in pool.order)
    ]


def load_to_proto(load: WorkerLoad) -> scheduler_pb2.WorkerLoad:
    """Return the load of a worker rank."""
    return scheduler_pb2.WorkerLoad(worker=rank_to_proto(load.rank), **same_fields(load, "rank"))
