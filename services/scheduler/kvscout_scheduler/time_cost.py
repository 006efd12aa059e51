"""What it costs to put a request on each worker, in seconds: the formula of `kv-time` (`policies.kv_time` explains it).

::

    cost(w)    = overlap_score_weight · (ahead(w) + crowding(w) · pace(w) · own · (uncached(w) + kept · evicted(w)))
                 + decode · (contexts(w) + requests(w) · isl)
    evicted(w) = max(0, uncached(w) − room(w))                                                  tokens

What is known of workers is a table of numbers, one row each, that the policy writes and both twins read; the other twin
is `native/src/load/time_cost.rs`. Both compute every number in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from math import inf
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
    room: float = inf
    """Tokens that its cache could take without evicting any."""


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
    kept: float
    """What an evicted token counts, in uncached ones of the request: the share of all caches that is empty."""

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
    table, row_of, now, weight, own, decode, kept = question
    rows, costs = list(ROW.iter_unpack(table)), []
    for slot, cached in zip(slots, cached_tokens, strict=True):
        behind, due_at, pace, used, seen, contexts, requests, prefills, room = rows[row_of[slot]]
        ahead, crowding = ahead_of(behind, due_at, prefills, now), crowding_of(used, seen, prefills, now)
        costs.append(
            weight * (ahead + crowding * pace * own * priced_tokens(isl_tokens - cached, room, kept))
            + decode * (contexts + requests * isl_tokens)
        )
    return costs


def priced_tokens(uncached: float, room: float, kept: float) -> float:
    """Uncached tokens of a prompt, and those that they evict, as much as they count; see `TimeRow`, `TimeQuestion`."""
    return uncached + kept * max(0.0, uncached - room)


def ahead_of(behind: float, due_at: float, prefills: float, now: float) -> float:
    """Seconds of prefill that are left of what is booked; see `TimeRow`."""
    if not prefills:
        return 0.0
    left = due_at - now
    return behind + (left if left > 0 else min(-left, MOST_OVERDUE_SECONDS))


def crowding_of(used: float, seen: float, prefills: float, now: float) -> float:
    """1 / (1 − `used`) at a time; see `TimeRow`."""
    passed = 1.0 + (now - seen) / HORIZON_SECONDS
    crowding = passed / (1.0 - used if prefills else passed - used)
    return crowding if crowding < MOST_CROWDED else MOST_CROWDED
