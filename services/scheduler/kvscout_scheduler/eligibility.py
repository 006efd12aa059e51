"""Which workers may take a request: a chain of filters, each with its own error for when it leaves nobody.

allow-list (and exclusions) → pin → required labels → LoRA adapter → not draining → not cooling down → not busy

The first four follow from what the request wants (`Wanted`), the others from how the workers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvscout_common.errors import (
    FailedPrecondition,
    KvscoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.pool import Pool
from kvscout_scheduler.request import ANYONE, SelectionRequest, Wanted

Fits = Callable[[WorkerRank, WorkerSpec], bool]


class Demand(NamedTuple):
    """One thing that a request wants of its worker."""

    label: str
    """Of those that do not have it."""
    fits: Fits
    refusal: Callable[[int], KvscoutError]
    """The error when none of so many has it."""


class Stage(NamedTuple):
    """One filter by how workers are."""

    label: str
    """Of those that it drops."""
    kept: list[int]
    refusal: Callable[[list[int]], KvscoutError]
    """The error when none of these slots is left."""


def eligible(
    pool: Pool,
    request: SelectionRequest,
    now: float,
    dropped: dict[int, str] | None = None,
) -> list[int]:
    """Slots of the workers that may take a request, in the order of their ranks; at least one.

    Args:
        pool: The workers; not to be changed while the answer is in use.
        request: A validated request.
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
    ranks, specs = pool.ranks, pool.specs
    if dropped is None and request.wanted.pinned_worker_id:
        # All others would be dropped; where the worker is not here, that is what says so.
        slots = pool.slots_of.get(request.wanted.pinned_worker_id, slots)
    wanted = request.wanted
    for label, fits, refusal in demands(wanted) if wanted is not ANYONE else ():
        kept = [slot for slot in slots if fits(ranks[slot], specs[slot])]
        _note(dropped, label, slots, kept)
        if not kept:
            raise refusal(len(slots))
        slots = kept
    if not (pool.draining or pool.cooldown_until or pool.judged):
        return slots
    for health in (_draining, _cooling_down, _busy):
        stage = health(pool, request, slots, now)
        if stage is not None:
            _note(dropped, stage.label, slots, stage.kept)
            if not stage.kept:
                raise stage.refusal(slots)
            slots = stage.kept
    return slots


def demands(wanted: Wanted) -> Iterator[Demand]:
    """What a request wants of its worker, in the order in which that is looked at."""
    pin, dp_rank, allowed, excluded, labels, lora = wanted
    if allowed:
        yield Demand(
            "not allowed",
            lambda rank, _: rank.worker_id in allowed,
            lambda _: Unavailable(f"none of the {len(allowed)} allowed workers is registered for this model and role"),
        )
    if excluded:
        yield Demand(
            "excluded",
            lambda rank, _: rank.worker_id not in excluded,
            lambda workers: Unavailable(f"all {workers} workers are excluded"),
        )
    if pin:
        which = f"{pin!r}" if dp_rank is None else f"{pin!r}, rank {dp_rank},"
        yield Demand(
            "not pinned",
            lambda rank, _: rank.worker_id == pin and dp_rank in (None, rank.dp_rank),
            lambda _: NotFound(f"pinned worker {which} is not registered for this model and role"),
        )
    if labels:
        yield Demand(
            "labels",
            lambda _, spec: labels <= spec.labels.items(),
            lambda workers: FailedPrecondition(f"none of {workers} workers has the labels {dict(sorted(labels))}"),
        )
    if lora:
        yield Demand(
            "adapter",
            lambda _, spec: any(adapter.name == lora for adapter in spec.adapters),
            lambda workers: FailedPrecondition(f"none of {workers} workers has the adapter {lora!r} loaded"),
        )


def _draining(pool: Pool, request: SelectionRequest, slots: list[int], now: float) -> Stage | None:
    draining = pool.draining
    if not draining:
        return None
    return Stage(
        "draining",
        [slot for slot in slots if slot not in draining],
        lambda slots: Unavailable(f"all {len(slots)} workers that could take the request are draining"),
    )


def _cooling_down(pool: Pool, request: SelectionRequest, slots: list[int], now: float) -> Stage | None:
    until = pool.cooldown_until
    if not until:
        return None
    # Who pins a worker is told that it cools down, as others could do; of one worker alone that would leave nobody.
    among = slots
    if request.wanted.pinned_worker_id:
        among = [slot for slot in pool.order if slot not in pool.draining]
    left_out = pool.left_out(among, now)
    return Stage(
        "cooling down",
        [slot for slot in slots if slot not in left_out],
        lambda slots: Unavailable(
            f"all {len(slots)} workers that could take the request are cooling down after a failure",
            retry_after_seconds=min(until[slot] for slot in slots) - now,
        ),
    )


def _busy(pool: Pool, request: SelectionRequest, slots: list[int], now: float) -> Stage | None:
    kept = pool.load.not_busy(None if slots is pool.order else slots)
    if kept is None or kept is slots:
        return None
    return Stage(
        "busy",
        kept,
        lambda slots: ResourceExhausted(
            f"the pinned worker {request.wanted.pinned_worker_id!r} is busy"
            if request.wanted.pinned_worker_id
            else f"all {len(slots)} workers that could take the request are busy"
        ),
    )


def _note(dropped: dict[int, str] | None, label: str, slots: list[int], kept: list[int]) -> None:
    if dropped is not None:
        dropped.update(dict.fromkeys(set(slots).difference(kept), label))
