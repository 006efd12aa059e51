"""The event loop, and the engines in it: one heap, whole picoseconds, nothing by chance that no seed draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from heapq import heappush
from typing import Any, Final

from kvscout_lab.simulation.cluster import Cluster
from kvscout_lab.simulation.index import LateIndex
from kvscout_lab.simulation.records import Run, WorkerRecord
from kvscout_lab.simulation.timing import picoseconds
from kvscout_lab.simulation.worker import NEVER, Job, Worker

FIRST: Final = 0
LATER: Final = 1
"""Order of two events at one time: what reaches a worker comes before what the worker does."""


class Engines(ABC):
    """The workers of a cluster, in simulated time; what their tokens mean is left to who inherits.

    Args:
        cluster: Whose workers they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._now = 0
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._run = Run()
        total = cluster.workers + cluster.prefill_workers
        late = picoseconds(cluster.latencies.event_ms / 1000)
        self._index = LateIndex(total, late, cluster.lost_events, cluster.seed)
        self._tier_index = LateIndex(total, late, cluster.lost_events, cluster.seed)
        """Of device and offload tier together; empty without one."""
        self._workers = [Worker(cluster.engine, *cluster.speeds_of(number)) for number in range(total)]
        self._wakes = [0] * total
        """Number of the planned wake-up of each worker that holds; those before it are void."""
        self._batch_since = [0] * total
        self._run.workers = [WorkerRecord() for _ in range(total)]

    @abstractmethod
    def _token(self, job: Job, finished: bool) -> None:
        """A job has its first token, or its last."""

    def _at(self, time: int, order: int, call: Callable[..., None], *arguments: Any) -> None:
        self._sequence += 1
        heappush(self._heap, (time, order, self._sequence, call, arguments))

    def _give(self, number: int, job: Job) -> None:
        """Hand a job to a worker.

        Raises:
            ConfigError: It fits into no empty cache.
        """
        worker = self._workers[number]
        self._run.workers[number].requests += 1
        idle = worker.end == NEVER
        before = worker.end
        worker.submit(job, self._now)
        if idle:
            self._published(number)
        if worker.end != before:
            self._plan(number)

    def _begin(self, number: int) -> None:
        self._workers[number].begin(self._now)
        self._published(number)
        self._plan(number)

    def _published(self, number: int) -> None:
        events = self._workers[number].cache.take_events()
        if events:
            self._index.publish(number, events, self._now)
        tier_events = self._workers[number].cache.take_tier_events()
        if tier_events:
            self._tier_index.publish(number, tier_events, self._now)

    def _plan(self, number: int) -> None:
        self._wakes[number] += 1
        self._at(self._workers[number].end, LATER, self._wake, number, self._wakes[number])

    def _wake(self, number: int, planned: int) -> None:
        if planned != self._wakes[number]:
            return
        worker, record = self._workers[number], self._run.workers[number]
        batch = worker.batch
        record.batch_time += batch * (self._now - self._batch_since[number])
        record.largest_batch = max(record.largest_batch, batch)
        done, gap, late = worker.finish()
        if gap is not None:
            self._run.gaps.add(gap)
        for since, until in late:
            self._run.gaps.late(until - since)
        for job, finished in done:
            self._token(job, finished)
        self._batch_since[number] = self._now
        worker.begin(self._now)
        self._published(number)
        if worker.end != NEVER:
            self._plan(number)

    def _shorten(self, number: int, change: Callable[[Worker], None]) -> None:
        """Does something to a worker that may bring the end of what it does nearer."""
        worker = self._workers[number]
        before = worker.end
        change(worker)
        if worker.end != before:
            self._plan(number)
