"""Speed of workers' outputs, each compared with the others of its pool. Pure.

Seconds a token, of the answers that were streamed in the last seconds, from their first tokens to their last ones. Load
makes an engine slower, and a pool's workers have about the same; a worker that is several times as slow as the others
has another trouble.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvscout_common.worker import WorkerRank
from kvscout_gateway.engines.worker_state import WELL, Judgement, WorkerState

SAMPLE_SECONDS = 1.0
WINDOW_SAMPLES = 4
SLOW_FACTOR = 4.0
"""A worker that takes this many times as long for a token as the median of the others is slow."""
SLOW_SECONDS = 0.003
"""And at least so long: what is faster than that differs by the gateway's own turns."""
ENOUGH_TOKENS = 20
ENOUGH_SECONDS = 2.0
"""Tokens of a window, or seconds that answers were streamed in it, from which on its speed says something."""
KEPT_SECONDS = 30.0
"""A speed is that of a worker for so long after its last window that had enough."""

Key: TypeAlias = tuple[str, WorkerRank]


@dataclass(slots=True)
class _Speed:
    totals: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_SAMPLES + 1))
    """Seconds of streaming, all requests together, and tokens, since start."""
    seconds_a_token: float = 0.0
    """0 = unknown."""
    known_at: float = 0.0
    slow_since: float | None = None
    others: float = 0.0
    """Seconds a token of the other workers, while it is slow."""

    @property
    def is_over(self) -> bool:
        """Tell whether nothing is known of it, and nothing has been streamed for a whole window."""
        full = len(self.totals) == self.totals.maxlen
        return full and not self.seconds_a_token and self.totals[0] == self.totals[-1]

    def sample(self, now: float, total: tuple[float, int]) -> None:
        """Take one sample."""
        self.totals.append(total)
        seconds, tokens = (last - first for last, first in zip(self.totals[-1], self.totals[0], strict=True))
        if tokens >= ENOUGH_TOKENS or seconds >= ENOUGH_SECONDS:
            self.seconds_a_token, self.known_at = seconds / max(1, tokens), now
        elif now - self.known_at > KEPT_SECONDS:
            self.seconds_a_token, self.slow_since = 0.0, None


class Speeds:
    """The speeds of one gateway's workers."""

    def __init__(self) -> None:
        self._by_rank: dict[Key, _Speed] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._by_rank

    def sample(
        self, now: float, totals: Mapping[Key, tuple[float, int]], pool_of: Callable[[Key], Hashable | None]
    ) -> None:
        """Take a sample of all worker ranks, and compare them.

        Args:
            now: Seconds.
            totals: Seconds of streaming and tokens since start, of each rank that streamed since the last sample or is
                known here.
            pool_of: Gives what ranks have in common that are compared; None = it is gone.
        """
        for gone in self._by_rank.keys() - totals.keys():
            del self._by_rank[gone]
        pools: dict[Hashable, list[_Speed]] = {}
        for key, total in totals.items():
            speed = self._by_rank.setdefault(key, _Speed())
            speed.sample(now, total)
            if speed.is_over:
                del self._by_rank[key]
            if speed.seconds_a_token and (pool := pool_of(key)) is not None:
                pools.setdefault(pool, []).append(speed)
        for speeds in pools.values():
            _compare(now, speeds)

    def judge(self, key: Key, now: float) -> Judgement:
        """Return the state of a worker rank as its speed shows it."""
        speed = self._by_rank.get(key)
        if speed is None or speed.slow_since is None:
            return WELL
        cause = f"takes {1000 * speed.seconds_a_token:.3g} ms a token, the other workers {1000 * speed.others:.3g} ms"
        return Judgement(WorkerState.SLOW, cause, now - speed.slow_since)


def _compare(now: float, speeds: list[_Speed]) -> None:
    ordered = sorted(one.seconds_a_token for one in speeds)
    middle = (len(ordered) - 1) // 2
    for speed in speeds:
        # The lower median of the others: of two workers, the other one.
        faster_half = speed.seconds_a_token <= ordered[middle]
        speed.others = ordered[min(middle + 1, len(ordered) - 1) if faster_half else middle]
        if len(ordered) < 2 or speed.seconds_a_token < max(SLOW_SECONDS, SLOW_FACTOR * speed.others):
            speed.slow_since = None
        elif speed.slow_since is None:
            speed.slow_since = now
