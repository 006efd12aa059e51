"""Costs of the scheduler's core in this process: of a request's life, and of a dequeue while the queue is long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random

from kvscout.v1 import scheduler_pb2
from kvscout_bench.scheduler_process import prompts
from kvscout_bench.service_process import BLOCK_SIZE, MODEL
from kvscout_common.errors import KvscoutError
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_lab.statistics import percentile
from kvscout_scheduler.messages.codec import Codec
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.operations import Select
from kvscout_scheduler.values.request import UNCONSTRAINED, Prompt, SelectionRequest, WorkerConstraints, pack_hashes
from kvscout_scheduler.values.reservation import OwnerName, RequestKey
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.thresholds import BusyThresholds

FILLING_BLOCKS = 64
"""Blocks of each prompt in a queue; one prompt fills a worker."""
PINNED_EVERY = 16
"""Interval of waiting requests that are pinned to a worker."""
PROMPTS = 256
BLOCKS = 32
"""Blocks of each prompt."""
HOLDERS = 8
"""Workers on which a part of a prompt is cached."""
OUTSTANDING = 64
"""Requests at once."""
OUTPUT_TOKENS = 64


def life_us(lives: int, *, workers: int, unwell: bool, seed: int) -> float:
    """Return the CPU microseconds of one life: select_and_reserve, prefill complete, free, as a stream's owner sends.

    Args:
        lives: Number measured; a tenth more come first.
        workers: Workers of the pool.
        unwell: One worker cools down, and every request excludes another one.
        seed: Seed of the draws.
    """
    core = _Core(workers, unwell, seed)
    core.live(lives // 10 + OUTSTANDING)
    began = time.process_time_ns()
    core.live(lives)
    return (time.process_time_ns() - began) / lives / 1e3


class _Core:
    def __init__(self, workers: int, unwell: bool, seed: int) -> None:
        rng = Random(seed)
        names = [f"worker-{number:05d}" for number in range(workers)]
        self._scheduler = Scheduler(SchedulerSettings(), clock=time.monotonic, rng=rng)
        for name in names:
            spec = WorkerSpec(name, MODEL, BLOCK_SIZE, max_num_batched_tokens=8_192, total_kv_blocks=10_000)
            self._scheduler.workers.worker_added(spec)
        self._owner = OwnerName("*", "bench")
        self._scheduler.connect_owner(self._owner, [])
        self._wanted = UNCONSTRAINED
        if unwell:
            self._wanted = WorkerConstraints(excluded_worker_ids=frozenset({names[-1]}))
            self._scheduler.cool_downs.report("default", WorkerRank(names[0], 0), 60.0)
        self._prompts = _prompts(names, rng)
        self._lived = 0

    def live(self, lives: int) -> None:
        while lives > 0:
            some = [self._request() for _ in range(min(lives, OUTSTANDING))]
            for request in some:
                self._scheduler.reserve_or_wait(request, _decided, owner=self._owner)
            for request in some:
                self._scheduler.mark_prefill_complete(request.key, request.attempt_id)
            for request in some:
                self._scheduler.free(request.key, request.attempt_id, output_tokens=OUTPUT_TOKENS)
            lives -= len(some)

    def _request(self) -> SelectionRequest:
        self._lived += 1
        return SelectionRequest(
            MODEL,
            BLOCKS * BLOCK_SIZE,
            self._prompts[self._lived % len(self._prompts)],
            request_id=str(self._lived),
            attempt_id=self._lived,
            constraints=self._wanted,
        )


def _decided(outcome: Decision | KvscoutError) -> None:
    if isinstance(outcome, KvscoutError):
        raise outcome


def _prompts(names: Sequence[str], rng: Random) -> list[Prompt]:
    """Return prompts as a stream's messages bring them."""
    codec, made = Codec(""), []
    for number in range(PROMPTS):
        (selection,) = prompts(1, BLOCKS, sorted(rng.sample(names, HOLDERS)), number)
        operation = scheduler_pb2.LifecycleOperation(id=number)
        operation.select_and_reserve.MergeFromString(selection)
        operation.select_and_reserve.request_id = str(number)
        for _, read in codec.read(scheduler_pb2.LifecycleRequest(operations=[operation]).SerializeToString()):
            if isinstance(read, Select):
                made.append(read.request.prompt)
    return made


def dequeue_us(dequeues: int, *, workers: int, waiting: int, seed: int) -> Mapping[str, float]:
    """Return p50 and p99 of the microseconds of a dequeue from a queue of constant length.

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
    return {"p50": percentile(taken, 50) or 0.0, "p99": percentile(taken, 99) or 0.0}


class _FullQueue:
    def __init__(self, workers: int, waiting: int, rng: Random) -> None:
        budget = FILLING_BLOCKS * BLOCK_SIZE
        settings = SchedulerSettings(
            queue_threshold=0.5, queue_limit=waiting + 1, thresholds=BusyThresholds(0.95, 2 * budget)
        )
        self._names = [f"worker-{number:05d}" for number in range(workers)]
        self._arrivals = 0
        self._in_prefill: deque[RequestKey] = deque()
        self._scheduler = Scheduler(settings, clock=time.monotonic, rng=rng)
        for name in self._names:
            spec = WorkerSpec(name, MODEL, BLOCK_SIZE, max_num_batched_tokens=budget, total_kv_blocks=100_000)
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
        first = self._arrivals * FILLING_BLOCKS
        request = SelectionRequest(
            MODEL,
            FILLING_BLOCKS * BLOCK_SIZE,
            Prompt(pack_hashes(range(first, first + FILLING_BLOCKS))),
            request_id=str(self._arrivals),
            constraints=WorkerConstraints(pinned_worker_id) if pinned_worker_id else UNCONSTRAINED,
        )

        def answered(outcome: Decision | KvscoutError) -> None:
            if isinstance(outcome, KvscoutError):
                raise outcome
            self._in_prefill.append(request.key)

        self._scheduler.reserve_or_wait(request, answered)
