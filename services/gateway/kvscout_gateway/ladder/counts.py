"""Sums of requests, and the ladder that follows from them. Pure.

Of the blocks that some worker holds all is known exactly; of the others the sample says which share is of which kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final

from kvscout_gateway.ladder.reuse import Reuse

LARGER: Final = (1.25, 1.5, 2.0, 4.0)
"""Caches of which is told what they would have held, as multiples of those there are: as `Reuse` has them."""


class Loss(StrEnum):
    """Reason why prompt tokens were not cached; from the top of the ladder to its bottom."""

    NEVER_SEEN = "never_seen"
    OTHER_NAME = "other_name"
    CAPACITY = "capacity"
    SPLIT = "split"
    NOT_REPORTED = "not_reported"
    MOVED = "moved"
    NOT_PLACED = "not_placed"
    OTHER_TOKENS = "other_tokens"
    NOT_THERE = "not_there"


@dataclass(slots=True)
class Counts:
    """Sums of requests, in tokens where nothing else is said."""

    requests: int = 0
    prompt: int = 0
    usable: int = 0
    """Complete blocks that an engine may report as cached."""
    held: int = 0
    """Longest overlap of these with any worker, in tokens."""
    predicted: int = 0
    """Overlap with the worker that was chosen."""
    moved: int = 0
    """Held by another worker than the policy chose."""
    saved_seconds: float = 0.0
    """Seconds saved by moved requests, as estimated by the policy."""
    not_placed: int = 0
    """Lost where the policy had no choice."""
    other_tokens: int = 0
    """Lost where the gateway's tokens are not the engine's."""
    actual: int = 0
    """Cached tokens as engines report them; as predicted, where they report none."""
    not_there: int = 0
    """Predicted, but not reported."""
    unpredicted: int = 0
    """Reported, but not predicted."""
    unreported: int = 0
    """Requests whose engine reports no cached tokens."""
    sampled: int = 0
    """Blocks in the sample."""
    kinds: list[int] = field(default_factory=lambda: [0] * len(Reuse._fields))
    """Tokens that the sampled blocks stand for, as `Reuse`."""

    def add(self, other: Counts) -> None:
        """Add the sums of others."""
        for one in _NUMBERS:
            setattr(self, one, getattr(self, one) + getattr(other, one))
        for place, blocks in enumerate(other.kinds):
            self.kinds[place] += blocks


_NUMBERS: Final = tuple(one.name for one in fields(Counts) if one.name not in ("kinds",))


@dataclass(frozen=True, slots=True)
class Rungs:
    """Prompt tokens of requests that are cached on each rung, and what is lost between them."""

    requests: int
    prompt: int
    ideal: int
    capacity: int
    routing: int
    predicted: int
    actual: int
    unpredicted: int
    unreported: int
    losses: Mapping[Loss, int]
    saved_seconds: float
    """By the requests of `Loss.MOVED`."""
    gains: Mapping[float, int]
    """Tokens that larger caches would have held, by how much larger they are."""


def rungs_of(counts: Counts) -> Rungs:
    """Return the ladder of some requests: no rung but the last is higher than the one above it."""
    reuse = Reuse(*counts.kinds)
    elsewhere = counts.usable - counts.held
    sampled = sum(reuse) - reuse.foreign

    def tokens(*kinds: int) -> int:
        return elsewhere * sum(kinds) // sampled if sampled else 0

    expired = (reuse.expired, reuse.expired_half, reuse.expired_double, reuse.expired_fourfold)
    losses = {
        Loss.OTHER_NAME: tokens(reuse.other_name),
        Loss.CAPACITY: tokens(*expired, reuse.expired_beyond),
        Loss.SPLIT: tokens(reuse.split),
        Loss.NOT_REPORTED: tokens(reuse.recent),
    }
    ideal = counts.held + sum(losses.values())
    return Rungs(
        requests=counts.requests,
        prompt=counts.prompt,
        ideal=ideal,
        capacity=ideal - losses[Loss.OTHER_NAME] - losses[Loss.CAPACITY],
        routing=counts.held,
        predicted=counts.predicted,
        actual=counts.actual,
        unpredicted=counts.unpredicted,
        unreported=counts.unreported,
        saved_seconds=counts.saved_seconds,
        losses={
            # What nothing is known of counts as new.
            Loss.NEVER_SEEN: counts.prompt - ideal,
            **losses,
            Loss.MOVED: counts.moved,
            Loss.NOT_PLACED: counts.not_placed,
            Loss.OTHER_TOKENS: counts.other_tokens,
            Loss.NOT_THERE: counts.not_there,
        },
        gains={larger: tokens(*expired[: place + 1]) for place, larger in enumerate(LARGER)},
    )
