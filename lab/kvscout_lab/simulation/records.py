"""Records of a simulated run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import log

from kvscout_lab.simulation.worker import Gap

_RATIO = 1.01
"""Ratio of one bucket of inter-token latencies to the one before it."""
_LOG_RATIO = log(_RATIO)


@dataclass(slots=True)
class Record:
    """One request. Times are in the simulation's picoseconds; -1 = it did not come to that."""

    flow: int
    turn: int
    arrived: int
    """Time of the last try of its client, from which its times count."""
    prompt_tokens: int
    output_tokens: int
    worker: int = -1
    """Worker that computed its prompt."""
    decode_worker: int = -1
    """Worker that generated its output, where that is another one."""
    placed: int = -1
    """Time at which the scheduler booked it."""
    first_token: int = -1
    finished: int = -1
    cached_tokens: int = 0
    predicted_tokens: int = 0
    """Prompt tokens that the scheduler predicted to be cached."""
    error: str = ""
    priority: int = 0
    sent: int = -1
    """Time of its client's first try."""


class Gaps:
    """Inter-token latencies of all tokens, in buckets 1 % wide."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = defaultdict(int)
        """Tokens by bucket."""
        self.total = 0
        """Sum of all, in picoseconds."""
        self._bounds: dict[int, int] = {}

    def add(self, gap: Gap) -> None:
        """Count the tokens of a run of steps, exactly as if each step had been counted."""
        length, growth, steps, requests = gap
        self.total += requests * (steps * length + growth * (steps * (steps - 1) // 2))
        while steps:
            bucket = int(log(length) / _LOG_RATIO)
            if growth:
                inside = min(steps, max(1, -(-(self._bound(bucket + 1) - length) // growth)))
            else:
                inside = steps
            self.counts[bucket] += inside * requests
            length += inside * growth
            steps -= inside

    def late(self, length: int) -> None:
        """Count a token that came late: its request had been preempted."""
        self.add(Gap(length, 0, 1, 1))

    def _bound(self, bucket: int) -> int:
        """Return the least length that falls into a bucket."""
        bound = self._bounds.get(bucket)
        if bound is None:
            bound = int(_RATIO**bucket)
            while int(log(bound) / _LOG_RATIO) < bucket:
                bound += 1
            while int(log(bound - 1) / _LOG_RATIO) >= bucket:
                bound -= 1
            self._bounds[bucket] = bound
        return bound

    def percentile(self, percent: float) -> int:
        """Return the percentile of the lengths over all tokens, to 1 %; 0 without any."""
        wanted, seen = percent / 100 * sum(self.counts.values()), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= wanted:
                return int(_RATIO ** (bucket + 1))
        return 0


@dataclass(slots=True)
class WorkerRecord:
    """One worker."""

    busy: int = 0
    """Picoseconds in which it computed."""
    requests: int = 0
    batch_time: int = 0
    """Requests in its batch, summed over picoseconds."""
    largest_batch: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Run:
    """A whole run."""

    records: list[Record] = field(default_factory=list)
    """In order of arrival."""
    workers: list[WorkerRecord] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    ended: int = 0
    """Time at which the last request ended."""
    queued: int = 0
    """Requests that waited at the scheduler."""
    steps: int = 0
    """Parts that the simulation was computed in."""
