"""Batches of a source, and the decisions of its sequence on them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

T = TypeVar("T")


def digest(payload: bytes) -> int:
    """Return what identifies a batch beside its number: XXH3_64 of its payload."""
    return xxh3_64_intdigest(payload)


@dataclass(frozen=True, slots=True)
class SequencedBatch(Generic[T]):
    """One batch as it came from a source."""

    event_id: int
    digest: int
    content: T
    """Whatever the caller wants back with `Apply`."""
    size_bytes: int = 0
    epoch: int = 0
    """Incarnation of the engine; 0: the source has none."""
    dp_rank: int | None = None
    """Rank that the batch names; None: none."""
    cleared: bool = False
    """It empties the cache, so that nothing before it matters."""
    reset: bool = False
    """Its publisher says that the source starts anew with it; such a batch is `cleared` as well."""
    missing: str | None = None
    """What is missing after it of what came before, in words of who sends it; "" = nothing, None = nothing is said."""
    malformed: bool = False
    """It could not be decoded. It keeps its place in the sequence and changes nothing."""


class Apply(NamedTuple, Generic[T]):
    """Apply this batch to the index and move the cursor."""

    batch: SequencedBatch[T]


class DropReason(StrEnum):
    """Reason for not applying a batch."""

    DUPLICATE = "duplicate"
    STALE = "stale"
    """It is of a former incarnation, or overtaken by a restart or a Cleared."""
    WRONG_RANK = "wrong_rank"
    QUARANTINED = "quarantined"
    MIXED = "mixed"
    """It is of one of two publishers at one endpoint."""


class Drop(NamedTuple):
    """Do not apply this batch."""

    event_id: int
    reason: DropReason


class RequestReplay(NamedTuple):
    """Request all batches of the source from `first_id` on; pass `attempt` back with each answer.

    Answers to an earlier request may be thrown away.
    """

    first_id: int
    attempt: int


class Reset(NamedTuple):
    """Drop all that is known of the worker rank."""

    reason: str
    """Reason, for people."""


class Demote(NamedTuple):
    """History is lost: what the worker rank holds becomes a prediction."""

    missing: str
    """Missing events, as text."""


Decision = Apply[T] | Drop | RequestReplay | Reset | Demote
