"""Placing a prompt without any scheduler: the workers of a model in turn, nothing booked."""

from __future__ import annotations

from collections.abc import Callable

from kvscout_common.errors import (
    FailedPrecondition,
    InvalidArgument,
    KvscoutError,
    NotFound,
    Unavailable,
)
from kvscout_common.worker import Role, WorkerRank, WorkerSpec
from kvscout_gateway.members.catalog import Serving, Target
from kvscout_gateway.values.request import Request

Seat = tuple[WorkerSpec, WorkerRank]


class RoundRobin:
    """One round for each (tenant, model, role) that ever had workers."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, str, Role], int] = {}

    def take(self, request: Request, target: Target, serving: Serving) -> Seat:
        """The next worker rank that may take a request.

        Raises:
            InvalidArgument: The pin is outside the allow-list.
            NotFound: No worker of the model is known here, or not the pinned one.
            FailedPrecondition: No worker has the labels, or the adapter loaded.
            Unavailable: Those that could take it drain, or were excluded.
        """
        if not serving.specs:
            raise NotFound(f"no worker of model {request.model!r} is registered", field="model")
        if request.pinned and request.allowed and request.pinned not in request.allowed:
            raise InvalidArgument(f"{request.pinned!r} is not among the allowed workers", field="worker_id")
        seats = _seats(request, serving)
        for keeps, error in _filters(request, target):
            seats = [seat for seat in seats if keeps(seat)]
            if not seats:
                raise error
        key = (request.tenant, target.model, request.role)
        turn = self._next[key] = self._next.get(key, -1) + 1
        return seats[turn % len(seats)]


def eligible(request: Request, target: Target, serving: Serving) -> list[WorkerSpec]:
    """The workers that may take a request; whatever their load is."""
    seats = _seats(request, serving)
    for keeps, _ in _filters(request, target):
        seats = [seat for seat in seats if keeps(seat)]
    return list({spec.worker_id: spec for spec, _ in seats}.values())


def _seats(request: Request, serving: Serving) -> list[Seat]:
    return [(spec, rank) for spec in serving.specs if spec.role is request.role for rank in spec.ranks]


def _filters(request: Request, target: Target) -> list[tuple[Callable[[Seat], bool], KvscoutError]]:
    """In the scheduler's order of eligibility."""
    return [
        (
            lambda seat: not request.allowed or seat[0].worker_id in request.allowed,
            Unavailable("none of the allowed workers is registered for this model and role"),
        ),
        (
            lambda seat: seat[0].worker_id not in request.excluded,
            Unavailable("all workers that could take the request are excluded", retry_after_seconds=1.0),
        ),
        (
            lambda seat: request.pinned in ("", seat[0].worker_id) and request.pinned_rank in (None, seat[1].dp_rank),
            NotFound(f"pinned worker {request.pinned!r} is not registered for this model and role"),
        ),
        (
            lambda seat: request.required_labels.items() <= seat[0].labels.items(),
            FailedPrecondition(f"no worker has the labels {dict(request.required_labels)}"),
        ),
        (
            lambda seat: not target.lora_name or any(a.name == target.lora_name for a in seat[0].adapters),
            FailedPrecondition(f"no worker has the adapter {target.lora_name!r} loaded"),
        ),
        (
            lambda seat: not seat[0].draining,
            Unavailable("all workers that could take the request are draining", retry_after_seconds=1.0),
        ),
    ]
