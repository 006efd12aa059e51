"""The last requests and the slowest ones: when each step of them ended, and what their prompts begin with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappush, heapreplace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.prompt import HASH_BYTES, Geometry

if TYPE_CHECKING:
    from kvscout_gateway.request.attempt import Attempt
    from kvscout_gateway.values.request import Request

LAST: Final = 32
SLOWEST: Final = 32
SLOW_SECONDS: Final = 300.0
"""The slowest are those of this time, and of as much before it."""
MAX_ATTEMPTS: Final = 8
"""Attempts of a request that are kept, the last ones."""
PROMPTS: Final = 256
MAX_BLOCKS: Final = 2_048
"""Leading blocks of a prompt that are kept."""


class Step(NamedTuple):
    """An attempt, with the ends of its steps in seconds since the request came; 0 = it did not come to that."""

    worker: WorkerRank
    begin: float
    looked_up: float
    """The indexers have answered."""
    placed: float
    """The scheduler has chosen, after a wait in its queue if there was one."""
    first_output: float
    end: float
    prompt_tokens: int
    cached_tokens: int | None
    """None = the engine does not say."""
    output_tokens: int


class Timeline(NamedTuple):
    """A request that has ended."""

    at: float
    """Time of arrival, in seconds since the Unix epoch."""
    request_id: str
    model: str
    outcome: str
    seconds: float
    ttft_seconds: float
    """0 = there was no output."""
    attempts: tuple[Step, ...]


class PromptPrefix(NamedTuple):
    """Beginning of a prompt."""

    tenant: str
    model: str
    pool: Geometry
    block_hashes: bytes
    """Local hashes, little-endian u64s."""


_Slow: TypeAlias = tuple[float, int, Timeline]
"""Seconds to its first token, or all of them; its number; the request."""


class RecentRequests:
    """A bounded number of requests that have ended.

    Args:
        clock: That of attempts.
        wall_clock: Seconds since the Unix epoch.
    """

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self.last: deque[Timeline] = deque(maxlen=LAST)
        """The newest last."""
        self.prompts: deque[PromptPrefix] = deque(maxlen=PROMPTS)
        self.ended = 0
        """Requests since start."""
        self._slow: tuple[list[_Slow], list[_Slow]] = [], []
        """The slowest of this period, and of the one before it."""
        self._slow_until = 0.0

    def over(self, request: Request, attempts: Sequence[Attempt], outcome: str, started: float) -> None:
        """Add a request that has ended.

        Args:
            request: As its client sent it.
            attempts: What it was run by, in order.
            outcome: "ok", "cancelled", or the kind of its error.
            started: When it came, on the clock.
        """
        now = self._clock()
        ttft = next((one.ttft_seconds for one in reversed(attempts) if one.ttft_seconds), 0.0)
        made = Timeline(
            self._wall_clock() - (now - started),
            request.request_id,
            request.model,
            outcome,
            now - started,
            ttft,
            tuple(_step(attempt, started, now) for attempt in attempts[-MAX_ATTEMPTS:]),
        )
        self.ended += 1
        self.last.append(made)
        self._keep_if_slow(made, now)
        if attempts and attempts[-1].decision.block_hashes:
            decision = attempts[-1].decision
            hashes = decision.block_hashes[: HASH_BYTES * MAX_BLOCKS]
            self.prompts.append(PromptPrefix(decision.tenant, decision.model, decision.pool, hashes))

    def slowest(self) -> list[Timeline]:
        """Return the requests that took longest to their first token, the slowest first."""
        self._begin_period(self._clock())
        return [made for *_, made in sorted((*self._slow[0], *self._slow[1]), reverse=True)[:SLOWEST]]

    def _keep_if_slow(self, made: Timeline, now: float) -> None:
        self._begin_period(now)
        slow, entry = self._slow[0], (made.ttft_seconds or made.seconds, self.ended, made)
        if len(slow) < SLOWEST:
            heappush(slow, entry)
        elif entry > slow[0]:
            heapreplace(slow, entry)

    def _begin_period(self, now: float) -> None:
        if now >= self._slow_until:
            lapsed = now >= self._slow_until + SLOW_SECONDS
            self._slow = [], [] if lapsed else self._slow[0]
            self._slow_until = now + SLOW_SECONDS


def _step(attempt: Attempt, started: float, now: float) -> Step:
    decision, usage = attempt.decision, attempt.usage
    placed = attempt.opened_at - started
    return Step(
        decision.worker,
        placed - decision.seconds,
        placed - decision.select_seconds,
        placed,
        attempt.ttft_seconds,
        (attempt.freed_at or now) - started,
        usage.prompt_tokens if usage is not None else attempt.request.prompt.isl_tokens,
        usage.cached_tokens if usage is not None else None,
        attempt.output_tokens,
    )
