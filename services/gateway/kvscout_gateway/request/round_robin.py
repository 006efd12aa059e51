"""Placing a prompt without any scheduler: the workers of a model in turn, nothing booked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvscout_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvscoutError,
    NotFound,
    Unavailable,
)
from kvscout_common.known_names import or_known
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_gateway.values.request import Request

Slot: TypeAlias = tuple[WorkerSpec, WorkerRank]


class RoundRobin:
    """One round for each (tenant, model, role) that ever had workers."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, str, Role], int] = {}

    def take(self, request: Request, specs: Sequence[WorkerSpec], models: Iterable[str] = ()) -> Slot:
        """Return the next worker rank that may take a request.

        Args:
            request: By the name of its base model.
            specs: Workers of the model.
            models: Models of the tenant, for the error.

        Raises:
            InvalidArgument: The pin is outside the allow-list.
            NotFound: No worker of the model is known here, or not the pinned one.
            FailedPrecondition: No worker has the labels, or the adapter loaded.
            Unavailable: Those that could take it drain, or were excluded.
        """
        if not specs:
            known = or_known(request.model, models)
            raise NotFound(f"no worker of model {request.model!r} is registered{known}", field="model")
        if request.pinned and request.allowed and request.pinned not in request.allowed:
            raise InvalidArgument(f"{request.pinned!r} is not among the allowed workers", field="worker_id")
        slots = _slots(request, specs)
        for keeps, error in _filters(request):
            slots = [slot for slot in slots if keeps(slot)]
            if not slots:
                raise error
        key = (request.tenant, request.model, request.role)
        count = self._next[key] = self._next.get(key, -1) + 1
        return slots[count % len(slots)]


def eligible(request: Request, specs: Iterable[WorkerSpec]) -> list[WorkerSpec]:
    """Return the workers that may take a request, whatever their load is.

    Args:
        request: By the name of its base model.
        specs: Workers of the model.
    """
    slots = _slots(request, specs)
    for keeps, _ in _filters(request):
        slots = [slot for slot in slots if keeps(slot)]
    return list({spec.worker_id: spec for spec, _ in slots}.values())


def _slots(request: Request, specs: Iterable[WorkerSpec]) -> list[Slot]:
    return [(spec, rank) for spec in specs if spec.role is request.role for rank in spec.ranks]


def _filters(request: Request) -> list[tuple[Callable[[Slot], bool], KvscoutError]]:
    """Return the rules of eligibility, in the scheduler's order, each with the error of a request that none passes."""
    return [
        (
            lambda slot: not request.allowed or slot[0].worker_id in request.allowed,
            Unavailable("none of the allowed workers is registered for this model and role"),
        ),
        (
            lambda slot: slot[0].worker_id not in request.excluded,
            Unavailable("all workers that could take the request are excluded", retry_after_seconds=1.0),
        ),
        (
            lambda slot: request.pinned in ("", slot[0].worker_id) and request.pinned_rank in (None, slot[1].dp_rank),
            NotFound(f"pinned worker {request.pinned!r} is not registered for this model and role"),
        ),
        (
            lambda slot: request.required_labels.items() <= slot[0].labels.items(),
            FailedPrecondition(f"no worker has the labels {dict(request.required_labels)}"),
        ),
        (
            lambda slot: not request.lora_name or any(a.name == request.lora_name for a in slot[0].adapters),
            FailedPrecondition(f"no worker has the adapter {request.lora_name!r} loaded"),
        ),
        (
            lambda slot: not slot[0].draining,
            Unavailable("all workers that could take the request are draining", retry_after_seconds=1.0),
        ),
    ]
