"""Response times to expect of a request on each worker, in seconds: what targets are held against.

::

    ttft(w) = ahead(w) + pace(w) · (seconds a step + seconds a token · uncached(w))
    itl(w)  = decode pace(w) · (seconds a step + seconds a token of context · (contexts(w) + isl)) / (1 − busy(w))

    ahead(w)    = what is left of the prompts booked there before (`time_cost`)
    busy(w)     = share of the last 20 s or so in which w had prompts to compute: decoding stood still meanwhile
    contexts(w) = tokens in the contexts of its requests, those in prefill included, each as far as it is expected to
                  go through the next stage of its output

Rows and rates are those of `time_cost`. The native backend is `native/src/load/targets.rs`; both compute every number
in the same order. Nothing is computed unless there is a target or a deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvscout_scheduler.costs.time_cost import TimeCostInputs, TimeRow, ahead_of, slowdown_of
from kvscout_scheduler.values.targets import Targets


class StepTimes(NamedTuple):
    """Seconds of the steps of a pool's workers."""

    prefill: float
    """A prefill step, without its tokens."""
    decode: float
    """A decode step, without contexts."""
    context_token: float
    """A token of context in a decode step."""


Times = tuple[float, float]
"""Seconds to the first token, and between tokens, to expect on one worker."""


def keeps(times: Times, targets: Targets) -> bool:
    """Return whether response times are within targets."""
    ttft, itl = times
    return ttft <= targets.ttft_seconds and itl <= targets.itl_seconds


def response_times(
    question: TimeCostInputs, steps: StepTimes, isl_tokens: int, slots: Iterable[int], cached_tokens: Iterable[float]
) -> list[Times]:
    """Return the times to expect on each of some slots.

    Args:
        question: What is known of the workers.
        steps: How long their steps take.
        isl_tokens: Prompt length in tokens.
        slots: The workers.
        cached_tokens: Of the prompt, on each.
    """
    rows = map(question.row, slots)
    return [
        (ttft_of(row, question, steps, isl_tokens, cached), itl_of(row, question.now, steps, isl_tokens))
        for row, cached in zip(rows, cached_tokens, strict=True)
    ]


def ttft_of(row: TimeRow, question: TimeCostInputs, steps: StepTimes, isl_tokens: int, cached: float) -> float:
    """Return seconds until the first token; without a prompt to compute, of what is ahead."""
    own = steps.prefill + question.own_seconds * (isl_tokens - cached) if question.own_seconds else 0.0
    return ahead_of(row, question.now) + row.pace * own


def itl_of(row: TimeRow, now: float, steps: StepTimes, isl_tokens: int) -> float:
    """Return seconds between two tokens, on average."""
    step = row.decode_pace * (steps.decode + steps.context_token * (row.contexts_0 + isl_tokens))
    return slowdown_of(row, now) * step
