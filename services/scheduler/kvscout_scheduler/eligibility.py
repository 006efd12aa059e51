"""Which workers may take a request: a chain of filters, each with its own error for when it leaves nobody.

allow-list (and exclusions) → pin → required labels → LoRA adapter → not draining → not cooling down → not busy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvscout_common.errors import (
    FailedPrecondition,
    KvscoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvscout_scheduler.engine_metrics import NO_METRICS
from kvscout_scheduler.pool import Pool
from kvscout_scheduler.request import SelectionRequest
from kvscout_scheduler.thresholds import BusyThresholds

Stage = tuple[str, Callable[[int], bool], Callable[[list[int]], KvscoutError]]
"""Label of those it drops, the test that keeps, the error from the slots that came in when none is left."""


def eligible(
    pool: Pool,
    request: SelectionRequest,
    thresholds: BusyThresholds,
    now: float,
    dropped: dict[int, str] | None = None,
) -> list[int]:
    """Slots of the workers that may take a request, in the order of their ranks; at least one.

    Args:
        pool: The workers; not to be changed while the answer is in use.
        request: A validated request.
        thresholds: Busy thresholds of its model.
        now: On the scheduler's clock.
        dropped: If given, receives why each other worker is out.

    Raises:
        Unavailable: No worker at all, none of the allowed ones is here, or all drain or cool down.
        NotFound: The pinned worker or rank does not exist.
        FailedPrecondition: No worker has the labels, or the adapter loaded.
        ResourceExhausted: All that remain, or the pinned one, are busy.
    """
    slots = pool.order
    if not slots:
        raise Unavailable(f"model {request.model!r} has no {request.role} worker now")
    for label, keeps, error in _stages(pool, request, thresholds, now):
        kept = [slot for slot in slots if keeps(slot)]
        if dropped is not None:
            dropped.update(dict.fromkeys(set(slots).difference(kept), label))
        if not kept:
            raise error(slots)
        slots = kept
    return slots


def busy(pool: Pool, slot: int, thresholds: BusyThresholds) -> bool:
    """Whether a worker is over a threshold, booked or reported."""
    _, prefill_tokens, decode_blocks = pool.load.at(slot)
    return thresholds.exceeded(
        decode_blocks=decode_blocks,
        prefill_tokens=prefill_tokens,
        total_kv_blocks=pool.specs[slot].total_kv_blocks,
        kv_cache_usage=pool.metrics.get(slot, NO_METRICS).kv_cache_usage,
    )


def _stages(pool: Pool, request: SelectionRequest, thresholds: BusyThresholds, now: float) -> Iterator[Stage]:
    """The filters that can drop anyone at all."""
    ranks, specs = pool.ranks, pool.specs
    if allowed := request.allowed_worker_ids:
        yield (
            "not allowed",
            lambda slot: ranks[slot].worker_id in allowed,
            lambda _: Unavailable(f"none of the {len(allowed)} allowed workers is registered for this model and role"),
        )
    if excluded := request.excluded_worker_ids:
        yield (
            "excluded",
            lambda slot: ranks[slot].worker_id not in excluded,
            lambda slots: Unavailable(f"all {len(slots)} workers are excluded"),
        )
    if request.pinned_worker_id:
        pin, dp_rank = request.pinned_worker_id, request.pinned_dp_rank
        which = f"{pin!r}" if dp_rank is None else f"{pin!r}, rank {dp_rank},"
        yield (
            "not pinned",
            lambda slot: ranks[slot].worker_id == pin and dp_rank in (None, ranks[slot].dp_rank),
            lambda _: NotFound(f"pinned worker {which} is not registered for this model and role"),
        )
    if labels := request.required_labels:
        yield (
            "labels",
            lambda slot: labels.items() <= specs[slot].labels.items(),
            lambda slots: FailedPrecondition(f"none of {len(slots)} workers has the labels {dict(labels)}"),
        )
    if lora := request.lora_name:
        yield (
            "adapter",
            lambda slot: any(adapter.name == lora for adapter in specs[slot].adapters),
            lambda slots: FailedPrecondition(f"none of {len(slots)} workers has the adapter {lora!r} loaded"),
        )
    if draining := pool.draining:
        yield (
            "draining",
            lambda slot: slot not in draining,
            lambda slots: Unavailable(f"all {len(slots)} workers that could take the request are draining"),
        )
    if until := pool.cooldown_until:
        yield (
            "cooling down",
            lambda slot: until.get(slot, now) <= now,
            lambda slots: Unavailable(
                f"all {len(slots)} workers that could take the request are cooling down after a failure",
                retry_after_seconds=min(until[slot] for slot in slots) - now,
            ),
        )
    if not thresholds.off:
        yield (
            "busy",
            lambda slot: not busy(pool, slot, thresholds),
            lambda slots: ResourceExhausted(
                f"the pinned worker {request.pinned_worker_id!r} is busy"
                if request.pinned_worker_id
                else f"all {len(slots)} workers that could take the request are busy"
            ),
        )
