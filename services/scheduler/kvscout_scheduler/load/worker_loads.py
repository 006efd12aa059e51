"""What is shown of the load: each worker rank as it is, and as it would be with one prompt more."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvscout_common.errors import InvalidArgument, Unavailable
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.policies.candidates import Candidates
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.request import EMPTY_PROMPT, PoolId, Prompt, SelectionRequest


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
    """Of what its engine says of itself; None = nothing that counts."""


def potential_loads(
    scheduler: Scheduler,
    pool_id: PoolId,
    *,
    isl_tokens: int = 0,
    prompt: Prompt = EMPTY_PROMPT,
    other_prompts: tuple[Prompt, ...] = (),
) -> list[WorkerLoad]:
    """Load of each worker rank, by rank, now and with a prompt added.

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
