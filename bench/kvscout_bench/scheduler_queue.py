"""What a scheduler's line costs while it is long: the core, in this process."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from random import Random

from kvscout_common.errors import KvscoutError
from kvscout_common.worker import WorkerSpec
from kvscout_lab.statistics import percentile
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import ANYONE, Prompt, SelectionRequest, Wanted, pack_hashes
from kvscout_scheduler.values.reservation import RequestKey
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.thresholds import BusyThresholds

BLOCK_SIZE = 16
BLOCKS = 64
"""Of each prompt; one of them fills a worker."""
PINNED_EVERY = 16
"""Of so many that wait one wants a certain worker."""


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Wall time of one turn, in microseconds."""

    p50: float
    p99: float


def measure(turns: int, *, workers: int, waiting: int, seed: int) -> TurnCost:
    """Gives turns to a line that stays as long as it is.

    Every worker has one prompt in prefill, and none has room. A turn is three operations: the prefill that began first
    ends, and whoever is next is booked; its request is freed; another one comes, and waits. Busy thresholds are on.

    Args:
        turns: How many are measured.
        workers: Of the pool.
        waiting: In line.
        seed: Of the draws.
    """
    line = _FullLine(workers, waiting, Random(seed))
    taken = []
    for _ in range(turns):
        began = time.perf_counter_ns()
        line.turn()
        taken.append((time.perf_counter_ns() - began) / 1e3)
    taken.sort()
    p50, p99 = percentile(taken, 50), percentile(taken, 99)
    assert p50 is not None
    assert p99 is not None
    return TurnCost(p50, p99)


class _FullLine:
    def __init__(self, workers: int, waiting: int, rng: Random) -> None:
        budget = BLOCKS * BLOCK_SIZE
        settings = SchedulerSettings(
            queue_threshold=0.5, queue_limit=waiting + 1, thresholds=BusyThresholds(0.95, 2 * budget)
        )
        self._names = [f"worker-{number:05d}" for number in range(workers)]
        self._arrivals = 0
        self._in_prefill: deque[RequestKey] = deque()
        self._scheduler = Scheduler(settings, clock=time.monotonic, rng=rng)
        for name in self._names:
            spec = WorkerSpec(name, "m", BLOCK_SIZE, max_num_batched_tokens=budget, total_kv_blocks=100_000)
            self._scheduler.workers.worker_added(spec)
        for name in self._names:
            self._arrive(name)
        for number in range(waiting):
            self._arrive(self._names[number % workers] if number % PINNED_EVERY == 0 else "")

    def turn(self) -> None:
        key = self._in_prefill.popleft()
        self._scheduler.mark_prefill_complete(key)
        self._scheduler.free(key)
        self._arrive("")

    def _arrive(self, pinned_worker_id: str) -> None:
        self._arrivals += 1
        first = self._arrivals * BLOCKS
        request = SelectionRequest(
            "m",
            BLOCKS * BLOCK_SIZE,
            Prompt(pack_hashes(range(first, first + BLOCKS))),
            request_id=str(self._arrivals),
            wanted=Wanted(pinned_worker_id) if pinned_worker_id else ANYONE,
        )

        def answered(outcome: Decision | KvscoutError) -> None:
            if isinstance(outcome, KvscoutError):
                raise outcome
            self._in_prefill.append(request.key)

        self._scheduler.reserve_or_wait(request, answered)
