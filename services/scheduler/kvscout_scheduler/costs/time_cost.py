"""Cost of a request on each worker, in seconds: the formula of `kv-time`.

::

    cost(w)     = overlap_score_weight · (ahead(w) + crowding(w) · own(w)) + decode(w)

    ahead(w)    = what is left of the prompts booked there before
    own(w)      = pace(w) · seconds a token · (uncached(w) − discount · copied(w) + (empty + reuse(w)) · evicted(w))
    copied(w)   = tokens of uncached(w) that are in a popular prefix; discount: what those pay who come later
    evicted(w)  = tokens of uncached(w) for which there is no room in the cache of w
    empty       = share of all caches that is empty
    reuse(w)    = chance that what w evicts next would soon be used again, weighted (session_reuse_weight, 0 by default)
    crowding(w) = 1 / (1 − busy(w)) + 3 · waiting + 0.05 · decoding(w)
    busy(w)     = share of the last 20 s or so in which w had prompts to compute
    waiting     = prompts that wait where the fewest do
    decoding(w) = requests that get no token while a prompt is computed
    decode(w)   = decode pace(w) · Σ stages (weight of it · output in it · (seconds a step + seconds a token of context
                  · (contexts in it(w) + requests in it(w) · isl)))

While a worker computes a prompt, others who come wait: the more of them, the less idle it is, and all who wait already
where no worker is idle. That is what `crowding` counts: a cached prefix is worth more the more there is to do, and
another worker is given a copy of it when its holder has no time and the other has, or when it is wanted so often
that the copy soon pays. What a full cache loses for a prompt has to be computed again, which is needless as far as
other caches have room.

In `decode`, contexts are what slows this request down, and requests times its own context are what it slows down, each
for as long as both decode: that is what the stages of an output are for (`output_lengths`). Beside a long answer that
has just begun, a short one decodes for the first stage only.

What is known of workers is a table of numbers, one row each, that `learned_times` writes and both backends read; the
native one is `native/src/load/time_cost.rs`. Both compute every number in the same order.
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
"""So many times a prompt counts at most for how busy a worker is."""
WAITING_WEIGHT: Final = 3.0
"""Weight of the requests that wait where the fewest do: while they are computed, as many come again, and again."""
DECODING_WEIGHT: Final = 0.05
"""Weight of a request that gets no token while a prompt is computed."""
MOST_OVERDUE_SECONDS: Final = 5.0
"""Seconds that an overdue prefill adds at most: its end may not have been reported."""
STAGE_WEIGHTS: Final = (0.25, 0.25, 0.125, 0.0625, 0.03125)
"""Weight of a second between tokens in each stage of an output, against seconds before the first: they are shared by
many tokens and go by while something is being read, the more so the longer it is."""


class TimeRow(NamedTuple):
    """Load of one worker, all of it as floats."""

    behind: float = 0.0
    """Seconds of prefill of those behind the first."""
    due_at: float = 0.0
    """Time when the first should be done."""
    pace: float = 1.0
    """Time of a prefill here, divided by its time in the pool."""
    used: float = 0.0
    """Share of the time lately in which there was a prompt to compute, as of `seen`; below 1."""
    seen: float = 0.0
    prefills: float = 0.0
    """Requests without a first token."""
    room: float = inf
    """Tokens that its cache could take without evicting any."""
    reuse: float = 0.0
    """Chance that a token which it evicts next would soon be used again, weighted."""
    decode_pace: float = 1.0
    """Time of a decode step here, divided by its time in the pool."""
    decoding: float = 0.0
    """Requests with a first token."""
    contexts_0: float = 0.0
    """Tokens in the contexts of its requests, each as far as it is expected to go through the first stage of an output
    from now. Shared ones are counted each time: each request reads its own at every step."""
    contexts_1: float = 0.0
    contexts_2: float = 0.0
    contexts_3: float = 0.0
    contexts_4: float = 0.0
    requests_0: float = 0.0
    """Requests, each as far as it is expected to go through the first stage."""
    requests_1: float = 0.0
    requests_2: float = 0.0
    requests_3: float = 0.0
    requests_4: float = 0.0


ROW: Final = Struct(f"{len(TimeRow._fields)}d")
"""One in the table."""


class TimeCostInputs(NamedTuple):
    """Estimates for the cost of one request in seconds."""

    table: array[float]
    """A `ROW` after the other."""
    row_of: array[int]
    """Number of its row, by slot."""
    now: float
    weight: float
    """Weight of prompts against decoding."""
    own_seconds: float
    """A token of the request's prompt."""
    empty: float
    """Weight of an evicted token, in uncached ones of the request: the share of all caches that is empty."""
    popular_tokens: float
    """Tokens of the prompt that are worth a copy on another worker."""
    popular_discount: float
    """Share of computing them that those pay who come later."""
    step_seconds: float
    """All decode steps of the request, without contexts; weighted."""
    stage_seconds: tuple[float, float, float, float, float]
    """A token of context that is decoded beside the request through each stage of its output; weighted."""

    def row(self, slot: int) -> TimeRow:
        """Return the row of a slot."""
        return TimeRow._make(ROW.unpack_from(self.table, self.row_of[slot] * ROW.size))


def time_costs(
    question: TimeCostInputs, isl_tokens: int, slots: Iterable[int], cached_tokens: Iterable[float]
) -> list[float]:
    """Return the cost on each of some slots.

    Args:
        question: What is known.
        isl_tokens: Prompt length in tokens.
        slots: The workers.
        cached_tokens: Of the prompt, on each.
    """
    rows = [question.row(slot) for slot in slots]
    waiting = fewest_waiting(rows)
    return [
        question.weight
        * (
            ahead_of(row, question.now)
            + (crowding_of(row, question.now) + waiting) * own_of(row, question, isl_tokens, cached)
        )
        + decode_of(row, question, isl_tokens)
        for row, cached in zip(rows, cached_tokens, strict=True)
    ]


def fewest_waiting(rows: Iterable[TimeRow]) -> float:
    """Return the weight in `crowding` of the requests that wait where the fewest do."""
    return WAITING_WEIGHT * min((row.prefills for row in rows), default=0.0)


def ahead_of(row: TimeRow, now: float) -> float:
    """Return seconds of prefill that are left of what is booked."""
    if not row.prefills:
        return 0.0
    left = row.due_at - now
    return row.behind + (left if left > 0 else min(-left, MOST_OVERDUE_SECONDS))


def crowding_of(row: TimeRow, now: float) -> float:
    """Return the weight of a prompt there: 1 / (1 − `used`) at a time, and those who decode."""
    return slowdown_of(row, now) + DECODING_WEIGHT * row.decoding


def slowdown_of(row: TimeRow, now: float) -> float:
    """Return 1 / (1 − `used`) at a time: how many times as long as on an idle worker it takes beside its prompts."""
    passed = 1.0 + (now - row.seen) / HORIZON_SECONDS
    times = passed / (1.0 - row.used if row.prefills else passed - row.used)
    return times if times < MOST_CROWDED else MOST_CROWDED


def own_of(row: TimeRow, question: TimeCostInputs, isl_tokens: int, cached: float) -> float:
    """Return weighted seconds of prefill of the uncached tokens of a prompt, and of those that they evict."""
    uncached = isl_tokens - cached
    copied = max(0.0, question.popular_tokens - cached)
    evicted = max(0.0, uncached - row.room)
    lost = (question.empty + row.reuse) * evicted
    return row.pace * question.own_seconds * (uncached - question.popular_discount * copied + lost)


def decode_of(row: TimeRow, question: TimeCostInputs, isl_tokens: int) -> float:
    """Return seconds that count for decoding, the request's own and those of others."""
    seconds = question.step_seconds
    for stage, contexts, requests in zip(question.stage_seconds, row[10:15], row[15:], strict=True):
        seconds += stage * (contexts + requests * isl_tokens)
    return row.decode_pace * seconds
