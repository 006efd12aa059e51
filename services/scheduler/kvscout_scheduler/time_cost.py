"""What it costs to put a request on each worker, in seconds: the formula of `kv-time` (`policies.kv_time` explains it).

::

    cost(w) = overlap_score_weight · (ahead(w) + crowding(w) · pace(w) · own · uncached_tokens(w))
              + decode · (contexts(w) + requests(w) · isl)

What is known of workers is a table of numbers, one row each, that the policy writes and both twins read; the other twin
is `native/src/load/time_cost.rs`. Both compute every number in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

HORIZON_SECONDS: Final = 20.0
"""For how long it counts how busy a worker was."""
MOST_CROWDED: Final = 7.0
"""So many times a prompt counts at most."""
MOST_OVERDUE_SECONDS: Final = 5.0
"""What a prefill that takes longer than it should can add: nobody may have told of its end."""


class TimeRow(NamedTuple):
    """What is under way on one worker; all of it as floats."""

    behind: float = 0.0
    """Seconds of prefill of those behind the first."""
    due_at: float = 0.0
    """When the first should be done."""
    pace: float = 1.0
    """What prefills take here, in what they take in the pool."""
    used: float = 0.0
    """Share of the time lately in which there was a prompt to compute, as of `seen`; below 1."""
    seen: float = 0.0
    contexts: float = 0.0
    """Σ prompt tokens of all requests, shared ones counted each time: each request reads its own at every step."""
    requests: float = 0.0
    prefills: float = 0.0
    """Requests without a first token."""

    def ahead(self, now: float) -> float:
        """Seconds of prefill that are left of what is booked."""
        if not self.prefills:
            return 0.0
        left = self.due_at - now
        return self.behind + (left if left > 0 else min(-left, MOST_OVERDUE_SECONDS))

    def crowding(self, now: float) -> float:
        """1 / (1 − `used`) at a time."""
        passed = 1.0 + (now - self.seen) / HORIZON_SECONDS
        return min(MOST_CROWDED, passed / (1.0 - self.used if self.prefills else passed - self.used))


ROW: Final = Struct(f"{len(TimeRow._fields)}d")
"""One in the table."""


class TimeQuestion(NamedTuple):
    """What is known of workers and of the time a request takes."""

    table: array[float]
    """A `ROW` after the other."""
    row_of: array[int]
    """Number of its row, by slot."""
    now: float
    weight: float
    """Of prompts against decoding."""
    own_seconds: float
    """A token of the request's prompt."""
    decode_seconds: float
    """A token of context that is decoded beside the request."""

    def row(self, slot: int) -> TimeRow:
        """What is under way on a slot."""
        return TimeRow._make(ROW.unpack_from(self.table, self.row_of[slot] * ROW.size))


def time_costs(
    question: TimeQuestion, isl_tokens: int, slots: Iterable[int], cached_tokens: Iterable[float]
) -> list[float]:
    """Cost on each of some slots.

    Args:
        question: What is known.
        isl_tokens: Prompt length in tokens.
        slots: The workers.
        cached_tokens: Of the prompt, on each.
    """
    _, _, now, weight, own, decode = question
    return [
        weight * (row.ahead(now) + row.crowding(now) * row.pace * own * (isl_tokens - cached))
        + decode * (row.contexts + row.requests * isl_tokens)
        for row, cached in zip(map(question.row, slots), cached_tokens, strict=True)
    ]
