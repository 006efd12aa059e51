"""Workers that may take a request: a chain of filters, each with its own error if it leaves no worker.

allow-list (and exclusions) → pin → required labels → LoRA adapter → not draining → not cooling down → not busy
→ with room, while there is a line and anyone has room

The first four follow from what the request wants (`WorkerConstraints`), the others from how the workers are. Each is a
set of slots (`slot_sets`), so that a filter costs about the same however many workers there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvscout_common.errors import (
    FailedPrecondition,
    KvscoutError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.known_names import or_known
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.values.request import UNCONSTRAINED, SelectionRequest, WorkerConstraints
from kvscout_scheduler.values.slot_sets import slots_in

if TYPE_CHECKING:
    from kvscout_scheduler.load.pool import Pool

Fits = Callable[[WorkerRank, WorkerSpec], bool]


class Constraint(NamedTuple):
    """One constraint of a request on its worker."""

    label: str
    """Reason of the workers that do not have it."""
    fits: Fits
    kept: Callable[[Pool, int], int]
    """Returns the slots of a set that fit."""
    refusal: Callable[[Pool, int], KvscoutError]
    """Returns the error when no worker of a pool, of a number, has it."""


class Exclusions:
    """Reasons why workers are not eligible."""

    def __init__(self) -> None:
        self._labels: dict[str, int] = {}

    def note(self, label: str, slots: int) -> None:
        """Note that a filter leaves slots out."""
        if slots:
            self._labels[label] = slots

    def by_slot(self) -> dict[int, str]:
        """Return why each of them is out."""
        return {slot: label for label, slots in self._labels.items() for slot in slots_in(slots)}


def eligible(pool: Pool, request: SelectionRequest, now: float, dropped: Exclusions | None = None) -> int:
    """Return the workers that may take a request, as a set of slots; at least one.

    Args:
        pool: The workers.
        request: A validated request.
        now: On the scheduler's clock.
        dropped: If given, receives why each other worker is out.

    Raises:
        Unavailable: No worker at all, none of the allowed ones is here, or all drain or cool down.
        NotFound: The pinned worker or rank does not exist.
        FailedPrecondition: No worker has the labels, or the adapter loaded.
        ResourceExhausted: All that remain, or the pinned one, are busy.
    """
    slots, constraints = pool.everyone, request.constraints
    if not slots:
        raise Unavailable(f"model {request.model!r} has no {request.role} worker now")
    if constraints is not UNCONSTRAINED:
        if dropped is None and constraints.pinned_worker_id:
            # All others would be dropped; where the worker is not here, that is what says so.
            slots = pool.named((constraints.pinned_worker_id,)) or slots
        for label, _, keep, refusal in constraints_of(constraints):
            kept = keep(pool, slots)
            if dropped is not None:
                dropped.note(label, slots & ~kept)
            if not kept:
                raise refusal(pool, slots.bit_count())
            slots = kept
    if not (pool.draining or pool.cooldown_until or pool.judged):
        return slots
    for label, leave_out, refuse in _STAGES:
        out = leave_out(pool, request, slots, now)
        if out:
            if dropped is not None:
                dropped.note(label, out)
            if out == slots:
                raise refuse(pool, request, slots, now)
            slots &= ~out
    return slots


def with_room(pool: Pool, slots: int, dropped: Exclusions | None = None) -> int:
    """Return the workers that may take a request and have room for it (`waiting`); all where nobody ever waits.

    Args:
        pool: The workers.
        slots: A set of slots.
        dropped: If given, receives who has no room, unless that is everyone.
    """
    if not pool.queues_requests:
        return slots
    full = slots & pool.load.full()
    if dropped is not None and full != slots:
        dropped.note("no room", full)
    return slots & ~full


def constraints_of(constraints: WorkerConstraints) -> Iterator[Constraint]:
    """Return what a request wants of its worker, in the order in which that is looked at."""
    pin, dp_rank, allowed, excluded, labels, lora = constraints
    if allowed:
        yield Constraint(
            "not allowed",
            lambda rank, _: rank.worker_id in allowed,
            lambda pool, slots: slots & pool.named(allowed),
            lambda _pool, _: Unavailable(
                f"none of the {len(allowed)} allowed workers is registered for this model and role"
            ),
        )
    if excluded:
        yield Constraint(
            "excluded",
            lambda rank, _: rank.worker_id not in excluded,
            lambda pool, slots: slots & ~pool.named(excluded),
            lambda _pool, workers: Unavailable(f"all {workers} workers are excluded"),
        )
    if pin:
        which = f"{pin!r}" if dp_rank is None else f"{pin!r}, rank {dp_rank},"
        yield Constraint(
            "not pinned",
            lambda rank, _: rank.worker_id == pin and dp_rank in (None, rank.dp_rank),
            lambda pool, slots: slots & pool.named((pin,), dp_rank),
            lambda pool, _: NotFound(
                f"pinned worker {which} is not registered for this model and role"
                + ("" if pin in pool.slots_of else or_known(pin, pool.slots_of))
            ),
        )
    if labels:
        yield Constraint(
            "labels",
            lambda _, spec: labels <= spec.labels.items(),
            lambda pool, slots: slots & pool.with_labels(labels),
            lambda _pool, workers: FailedPrecondition(
                f"none of {workers} workers has the labels {dict(sorted(labels))}"
            ),
        )
    if lora:
        yield Constraint(
            "adapter",
            lambda _, spec: any(adapter.name == lora for adapter in spec.adapters),
            lambda pool, slots: slots & pool.with_adapter(lora),
            lambda _pool, workers: FailedPrecondition(f"none of {workers} workers has the adapter {lora!r} loaded"),
        )


def _draining(pool: Pool, request: SelectionRequest, slots: int, now: float) -> int:
    return slots & pool.draining


def _all_drain(pool: Pool, request: SelectionRequest, slots: int, now: float) -> KvscoutError:
    return Unavailable(f"all {slots.bit_count()} workers that could take the request are draining")


def _cooling_down(pool: Pool, request: SelectionRequest, slots: int, now: float) -> int:
    if not pool.cooldown_until:
        return 0
    # A pinned worker that cools down is refused, as others could do; of one worker alone that would leave nobody.
    among = pool.everyone & ~pool.draining if request.constraints.pinned_worker_id else slots
    return slots & pool.left_out(among, now)


def _all_cool_down(pool: Pool, request: SelectionRequest, slots: int, now: float) -> KvscoutError:
    return Unavailable(
        f"all {slots.bit_count()} workers that could take the request are cooling down after a failure",
        retry_after_seconds=min(pool.cooldown_until[slot] for slot in slots_in(slots)) - now,
    )


def _busy(pool: Pool, request: SelectionRequest, slots: int, now: float) -> int:
    return slots & pool.load.busy() if pool.judged else 0


def _all_busy(pool: Pool, request: SelectionRequest, slots: int, now: float) -> KvscoutError:
    return ResourceExhausted(
        f"the pinned worker {request.constraints.pinned_worker_id!r} is busy"
        if request.constraints.pinned_worker_id
        else f"all {slots.bit_count()} workers that could take the request are busy"
    )


_STAGES = (
    ("draining", _draining, _all_drain),
    ("cooling down", _cooling_down, _all_cool_down),
    ("busy", _busy, _all_busy),
)
"""Label, who is out, and the error when that is everyone; by how workers are."""
