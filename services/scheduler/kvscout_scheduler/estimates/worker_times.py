"""Work and speed of one worker rank, as far as bookings show."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from math import inf
from typing import Final

from kvscout_scheduler.costs.time_cost import HORIZON_SECONDS, ROW
from kvscout_scheduler.estimates.held_sessions import HeldSessions
from kvscout_scheduler.estimates.output_lengths import Stages
from kvscout_scheduler.estimates.rates import DecayingMean, within
from kvscout_scheduler.values.reservation import Reservation

LEAST_PACE: Final = 0.1
MOST_PACE: Final = 10.0
"""Bound of a worker's pace, relative to that of the pool."""
PREFILL_NOISE: Final = 1.1
DECODE_NOISE: Final = 1.3
"""A pace that is within this factor of that of all is that of all: few observations differ by as much."""
MOST_USED: Final = 0.999
STEP_TOKENS: Final = 8_192.0
"""Prompt tokens that an engine computes in one step."""

InStages = tuple[float, float, float, float, float, float, float, float, float, float]
"""`TimeRow.contexts_0` … `requests_4`."""
NONE: Final[InStages] = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class ActiveTimes:
    """Times of one booking."""

    worker: WorkerTimes
    reservation: Reservation
    booked_at: float
    expected: Stages
    """Tokens of its output that are expected in each stage."""
    reaching: Stages
    """Share of each stage from now on that it is expected to go through."""
    context: float
    """Tokens: of its prompt, and of its output when it came into the stage in which it is."""
    expected_ttft: float = 0.0
    """Seconds, when it was booked."""
    stage: int = 0
    first_token_at: float = inf
    """inf = it computes its prompt."""
    contexts: float = -1.0
    """Tokens in all contexts of its worker at its first token; -1 = its times teach nothing."""
    prefilled: float = 0.0
    """`WorkerTimes.prefilled` at its first token."""
    ended: bool = False


@dataclass(slots=True, eq=False)
class WorkerTimes:
    """See the module; `TimeRow` has what is not explained here."""

    row: int
    """Number of its row."""
    since: float
    """Time when the first of its prefills could begin."""
    due_at: float
    seen: float
    prefills: dict[ActiveTimes, None] = field(default_factory=dict)
    """Those without a first token, in order of booking."""
    prefill_tokens: int = 0
    """Σ uncached tokens of theirs."""
    behind: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    """Σ tokens of the prompts of all requests."""
    decoding: int = 0
    """Requests with a first token."""
    first_tokens: float = 0.0
    """Σ times of their first tokens."""
    stages: InStages = NONE
    pace_mean: DecayingMean = field(default_factory=lambda: DecayingMean(1.0, 1.0, kept=0.95))
    pace: float = 1.0
    decode_pace_mean: DecayingMean = field(default_factory=lambda: DecayingMean(1.0, 1.0, kept=0.98))
    decode_pace: float = 1.0
    prefilled: float = 0.0
    """Seconds of all prefills so far: those that decode had to wait meanwhile."""
    used: float = 0.0
    capacity: int = 0
    """Tokens that its cache holds; 0 = unknown, or it is not registered now."""
    held: int = 0
    """Tokens of the cache in use, as booked since then: an engine evicts nothing until there is no room."""
    sessions: HeldSessions = field(default_factory=HeldSessions)
    """Whose tokens these are."""
    reuse: float = 0.0
    """`TimeRow.reuse`, as of the last look."""
    step_ended: float = 0.0
    """When the last prefill step ended of which is known, and what it computed, until that is learned from."""
    step_tokens: int = 0
    step_seconds: float = 0.0

    def look(self, now: float) -> None:
        """Bring `used` up to a time."""
        passed = (now - self.seen) / HORIZON_SECONDS
        if passed > 0.0:
            used = (self.used + (passed if self.prefills else 0.0)) / (1.0 + passed)
            # Never 1, whatever is rounded: nothing is crowded without end.
            self.used = used if used < MOST_USED else MOST_USED
        self.seen = now

    def plan(self, first: int, base: float, slope: float) -> None:
        """Estimate when its prefills should be done.

        Args:
            first: Uncached tokens of the first of them.
            base: Seconds of a step without prompts, here and now.
            slope: Seconds a prompt token.
        """
        steps = first / STEP_TOKENS if first > STEP_TOKENS else 1.0
        self.due_at = self.since + self.pace * (base * steps + slope * first)
        # Prompts that wait are computed together, as many as fit into a step.
        self.behind = self.pace * (self.prefill_tokens - first) * (base / STEP_TOKENS + slope)

    def generated(self, now: float, step: float) -> float:
        """Return output tokens of all that decode, about.

        Args:
            now: On the scheduler's clock.
            step: Seconds of a decode step here.
        """
        seconds = self.decoding * now - self.first_tokens
        return seconds / step if seconds > 0.0 else 0.0

    def add(self, request: ActiveTimes) -> None:
        """Count a request in the stages of its output."""
        a, b, c, d, e, f, g, h, i, j = self.stages
        first, second, third, fourth, last = request.reaching
        context = request.context
        self.stages = (
            a + first * context,
            b + second * context,
            c + third * context,
            d + fourth * context,
            e + last * context,
            f + first,
            g + second,
            h + third,
            i + fourth,
            j + last,
        )

    def remove(self, request: ActiveTimes) -> None:
        """Remove a request from the stages."""
        if self.requests:
            a, b, c, d, e, f, g, h, i, j = self.stages
            first, second, third, fourth, last = request.reaching
            context = request.context
            self.stages = (
                a - first * context,
                b - second * context,
                c - third * context,
                d - fourth * context,
                e - last * context,
                f - first,
                g - second,
                h - third,
                i - fourth,
                j - last,
            )
        else:
            # What rounding left goes with the last one.
            self.stages = NONE

    def prefill_pace(self, ratio: float, weight: float) -> None:
        """Take how long a prefill took, in what it takes in the pool."""
        self.pace_mean.add(ratio if ratio > LEAST_PACE else LEAST_PACE, weight)
        self.pace = _beyond_noise(self.pace_mean.value, PREFILL_NOISE)

    def step_pace(self, ratio: float, weight: float) -> None:
        """Take how long decode steps took, in what they take in the pool."""
        self.decode_pace_mean.add(ratio, weight)
        self.decode_pace = _beyond_noise(self.decode_pace_mean.value, DECODE_NOISE)

    def write(self, table: array[float]) -> None:
        """Write its row of a table."""
        ROW.pack_into(
            table,
            self.row * ROW.size,
            self.behind,
            self.due_at,
            self.pace,
            self.used,
            self.seen,
            len(self.prefills),
            self.capacity - self.held if self.capacity else inf,
            self.reuse,
            self.decode_pace,
            self.decoding,
            *self.stages,
        )


def _beyond_noise(pace: float, noise: float) -> float:
    pace = within(pace, LEAST_PACE, MOST_PACE)
    if pace > noise:
        return pace / noise
    return pace * noise if pace * noise < 1.0 else 1.0
