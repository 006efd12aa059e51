"""Lists of active requests, waiting ones included, and of worker loads."""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest
from operator import itemgetter

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.policies.policy import Candidates
from kvscout_scheduler.queue.waiting import Waiter
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import EMPTY_PROMPT, Prompt, SelectionRequest
from kvscout_scheduler.values.reservation import Phase, PoolId, Reservation
from kvscout_scheduler.values.views import ActiveRequest, ListPlace, WorkerLoad


def list_active_requests(
    scheduler: Scheduler,
    tenant: str,
    *,
    model: str = "",
    worker_id: str = "",
    limit: int = 1000,
    after: ListPlace | None = None,
) -> tuple[list[ActiveRequest], int, ListPlace | None]:
    """Return active requests, oldest first; those that wait come last.

    Args:
        scheduler: Whose workers they are on, or wait for.
        tenant: Whose.
        model: "" = all.
        worker_id: "" = all.
        limit: How many at most.
        after: Where an earlier list ended; None = from the beginning.

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
    listed = [_booked(one, now) if isinstance(one, Booking) else _waiting(one, now) for _, one in page]
    return listed, len(found) + len(queued), page[-1][0] if page and len(page) < len(places) else None


def _booked(booking: Booking, now: float) -> ActiveRequest:
    return ActiveRequest(
        reservation=booking.reservation,
        phase=booking.phase,
        prompt_blocks=booking.pool.blocks(booking.allocation.slot, booking.reservation.isl_tokens),
        output_blocks=booking.output_blocks,
        owner=booking.owner,
        age_seconds=now - booking.booked_at,
        lease_remaining_seconds=None if booking.expires_at is None else max(0.0, booking.expires_at - now),
    )


def _waiting(waiter: Waiter, now: float) -> ActiveRequest:
    """Return the view of a request that waits: it has neither worker nor blocks."""
    return ActiveRequest(
        reservation=Reservation(waiter.request.key, waiter.request.attempt_id),
        phase=Phase.QUEUED,
        prompt_blocks=0,
        output_blocks=0,
        owner=waiter.owner,
        age_seconds=now - waiter.since,
        lease_remaining_seconds=None,
    )


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
