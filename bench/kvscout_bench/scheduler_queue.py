"""Cost of a scheduler's queue while it is long: the core, in this process."""

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
from kvscout_scheduler.values.request import UNCONSTRAINED, Prompt, SelectionRequest, WorkerConstraints, pack_hashes
from kvscout_scheduler.values.reservation import RequestKey
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.thresholds import BusyThresholds

BLOCK_SIZE = 16
BLOCKS = 64
"""Blocks of each prompt; one prompt fills a worker."""
PINNED_EVERY = 16
"""Interval of waiting requests that are pinned to a worker."""


@dataclass(frozen=True, slots=True)
class DequeueCost:
    """Wall time of one dequeue, in microseconds."""

    p50: float
    p99: float


def measure(dequeues: int, *, workers: int, waiting: int, seed: int) -> DequeueCost:
    """Dequeue from a queue that stays as long as it is.

    Every worker has one prompt in prefill, and none has room. A dequeue is three operations: the prefill that began
    first ends, and the next request is booked; the request of that prefill is freed; another one comes, and waits. Busy
    thresholds are on.

    Args:
        dequeues: Number measured.
        workers: Workers of the pool.
        waiting: Requests in the queue.
        seed: Seed of the draws.
    """
    queue = _FullQueue(workers, waiting, Random(seed))
    taken = []
    for _ in range(dequeues):
        began = time.perf_counter_ns()
        queue.dequeue()
        taken.append((time.perf_counter_ns() - began) / 1e3)
    taken.sort()
    return DequeueCost(percentile(taken, 50) or 0.0, percentile(taken, 99) or 0.0)


class _FullQueue:
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

    def dequeue(self) -> None:
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
            constraints=WorkerConstraints(pinned_worker_id) if pinned_worker_id else UNCONSTRAINED,
        )

        def answered(outcome: Decision | KvscoutError) -> None:
            if isinstance(outcome, KvscoutError):
                raise outcome
            self._in_prefill.append(request.key)

        self._scheduler.reserve_or_wait(request, answered)
