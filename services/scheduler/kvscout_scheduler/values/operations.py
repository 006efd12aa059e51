"""Operations of callers on bookings, and their outcomes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvscout_common.errors import KvscoutError
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import SelectionRequest
from kvscout_scheduler.values.reservation import FreeOutcome, RequestKey, Reservation


class Select(NamedTuple):
    """Selection of a worker, booked or not."""

    request: SelectionRequest
    books: bool
    lease_seconds: int = 0
    traceparent: str = ""


class Reserve(NamedTuple):
    """Booking on a given worker."""

    reservation: Reservation
    lease_seconds: int = 0


class CompletePrefill(NamedTuple):
    """End of a prefill: the first token is out."""

    key: RequestKey
    attempt_id: int
    age_seconds: float = 0.0
    """Seconds since then."""


class AddOutput(NamedTuple):
    """Further generated blocks."""

    key: RequestKey
    attempt_id: int
    blocks: int


class Free(NamedTuple):
    """End of a request."""

    key: RequestKey
    attempt_id: int
    output_tokens: int = 0
    age_seconds: float = 0.0
    """Seconds since then."""


class Renew(NamedTuple):
    """Renewal of leases."""

    attempts: tuple[tuple[RequestKey, int], ...]
    lease_seconds: int = 0


Operation: TypeAlias = Select | Reserve | CompletePrefill | AddOutput | Free | Renew
Outcome: TypeAlias = Decision | FreeOutcome | int | list[int] | KvscoutError
