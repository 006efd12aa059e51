"""Headroom: candidates that keep the targets of a request, and who is refused where none does; formula in
`kvscout_scheduler.costs.targets`."""

from __future__ import annotations

from math import inf
from typing import Final, NamedTuple

from kvscout_common.errors import DeadlineExceeded, ResourceExhausted
from kvscout_scheduler.costs.targets import keeps
from kvscout_scheduler.costs.words import milliseconds
from kvscout_scheduler.policies.eligibility import Exclusions
from kvscout_scheduler.policies.policy import Candidates
from kvscout_scheduler.values.slot_sets import slot_set
from kvscout_scheduler.values.targets import Targets

KV_TIME: Final = "kv-time"
"""The policy that estimates times, and keeps targets."""


class Shed(ResourceExhausted):
    """A request of a priority below 0 for which no worker keeps the targets."""

    cause = "shed"


class Headroom(NamedTuple):
    """Candidates that keep the targets of a request."""

    candidates: Candidates
    note: str = ""
    """For the explanation; "" = there are no targets."""
    missed: bool = False
    """None keeps them: these are all."""


def headroom_of(candidates: Candidates, targets: Targets, dropped: Exclusions | None) -> Headroom:
    """Return the candidates that keep the targets of their request; all, where none does.

    Args:
        candidates: The eligible workers.
        targets: At least one.
        dropped: If given, receives those that do not keep them.

    Raises:
        Shed: None does, and the request may be shed.
    """
    request = candidates.request
    left = targets._replace(ttft_seconds=targets.ttft_seconds - request.waited_seconds)
    times = candidates.response_times()
    keeping = slot_set(slot for slot, each in zip(candidates.slots, times, strict=True) if keeps(each, left))
    if not keeping:
        note = f"none of {len(times)} workers keeps {_words(targets)}"
        if candidates.books and request.priority < 0:
            late = min(ttft for ttft, _ in times) - left.ttft_seconds
            raise Shed(note, retry_after_seconds=max(0.0, late))
        return Headroom(candidates, note, missed=True)
    note = f"{keeping.bit_count()} of {len(times)} workers keep {_words(targets)}"
    if keeping == candidates.members:
        return Headroom(candidates, note)
    if dropped is not None:
        dropped.note("over target", candidates.members & ~keeping)
    return Headroom(candidates.of(keeping), note)


def require_time(candidates: Candidates, slot: int) -> None:
    """Refuse a request whose first token would come after its deadline.

    Args:
        candidates: Of the request.
        slot: The worker that it is for.

    Raises:
        DeadlineExceeded: It would.
    """
    left, ((ttft, _),) = candidates.request.deadline_seconds, candidates.of(1 << slot).response_times()
    if ttft > left:
        raise DeadlineExceeded(
            f"its first token would come in {milliseconds(ttft)}, its deadline is in {milliseconds(left)}"
        )


def _words(targets: Targets) -> str:
    """Return targets in words."""
    words = [
        f"{milliseconds(seconds)} {what}"
        for seconds, what in zip(targets, ("to the first token", "between tokens"), strict=True)
        if seconds < inf
    ]
    return f"the target of {' and '.join(words)}"
