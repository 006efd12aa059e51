"""`kvscout bench scheduler`: what requests cost the scheduler, over the wire and in its native core, against goals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any

from kvscout_bench.harness import Bench, Case, Measure, Sample, Say, sample_value
from kvscout_bench.machine import usable_cores
from kvscout_bench.peer import Driver, native_driver
from kvscout_bench.scheduler_core import HOLDERS, dequeue_us, life_us
from kvscout_bench.scheduler_process import (
    Gateway,
    SchedulerProcess,
    bytes_a_booking,
    lifecycle_cpu_us,
    prompts,
)
from kvscout_bench.scheduler_replication import visible_seconds
from kvscout_bench.service_process import BLOCK_SIZE

SEED = 1
WORKERS = 256
PROMPTS = 256
OUTSTANDING = 64
OPERATIONS = 16
"""Operations of one message, at most."""
MANY_WORKERS, MANY_ACTIVE = 2_000, 20_000
LIFECYCLES, QUICK_LIFECYCLES = 10_000, 200
BOOKINGS, QUICK_BOOKINGS = 4_000, 100
WAITING = 1_024
DEQUEUES, QUICK_DEQUEUES = 5_000, 50
PER_SECOND = 1_000
"""Rate of bookings, where they are watched from another replica."""

_p50, _p99 = sample_value("p50"), sample_value("p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCase(Case):
    """A row, and what measures it."""

    value: Callable[[Sample], float] = float
    measure: Callable[[SchedulerBench], Sample] | None = None
    """None: the driver of the native core does."""
    workers: int = WORKERS
    blocks: int = 0
    """Blocks of each prompt, in rows of the native core."""


def _lifecycle(
    tokens: int, goal_us: float, *, workers: int = WORKERS, holders: int = 0, held: int = 0, **more: Any
) -> SchedulerCase:
    """Return the row of lives in a process.

    Args:
        tokens: Tokens of each prompt.
        goal_us: CPU time of a life.
        workers: Workers of the pool.
        holders: Workers on which a part of each prompt is cached; 0 = all.
        held: Requests that are active all the time.
    """

    def measure(bench: SchedulerBench) -> float:
        with SchedulerProcess(workers) as process:
            holding = sorted(Random(SEED).sample(process.worker_ids, holders or workers))
            requests = prompts(PROMPTS, tokens // BLOCK_SIZE, holding, SEED)
            active = QUICK_LIFECYCLES if bench.quick else held
            gateway = Gateway(requests, outstanding=OUTSTANDING, operations=OPERATIONS, held=min(active, held))
            return lifecycle_cpu_us(process, gateway, bench.lifecycles)

    name, cached = f"{tokens}", f"{workers:,} workers"
    if holders:
        name, cached = f"{workers}-workers/{holders}-holders", f"cached on {holders} of {cached}"
    title = f"CPU a lifecycle, {tokens:,} tokens, {cached}, {OUTSTANDING} at once"
    if held:
        name, title = f"{name}/{held}-active", f"{title} beside {held:,} that are active"
    return SchedulerCase(
        name=f"process/lifecycle/{name}", title=title, unit="µs", goal=goal_us, measure=measure, **more
    )


def _life(workers: int, goal_us: float, *, unwell: bool = False) -> SchedulerCase:
    suffix, state = ("/unwell", ", one cooling down and one excluded") if unwell else ("", "")
    return SchedulerCase(
        name=f"core/life/{workers}-workers{suffix}",
        title=f"CPU of the core a life, {workers:,} workers{state}",
        unit="µs",
        goal=goal_us,
        measure=lambda bench: life_us(bench.lifecycles, workers=workers, unwell=unwell, seed=SEED),
    )


def _native(workload: str, title: str, unit: str, goal: float, *, workers: int, blocks: int) -> SchedulerCase:
    divisor = 1e3 if unit == "µs" else 1.0
    return SchedulerCase(
        name=f"native/{workload}/{workers}-workers/{blocks}-blocks",
        title=f"{title}, {blocks:,} blocks, {workers:,} workers",
        unit=unit,
        goal=goal,
        value=sample_value("median_ns", divisor),
        p99=sample_value("p99_ns", divisor),
        workers=workers,
        blocks=blocks,
    )


def _memory(bench: SchedulerBench) -> float:
    with SchedulerProcess(WORKERS) as process:
        return bytes_a_booking(process, bench.bookings, blocks=1_024) / 1024


def _dequeue(bench: SchedulerBench) -> Sample:
    dequeues = QUICK_DEQUEUES if bench.quick else DEQUEUES
    return dequeue_us(dequeues, workers=1_000, waiting=WAITING, seed=SEED)


_RESERVE = "select, reserve and free"


@dataclass(frozen=True, slots=True)
class SchedulerBench(Bench):
    """The scheduler benchmark. Errors as of `Bench`."""

    CASES = (
        _lifecycle(512, 140.0, published=(136.0, 172.0)),
        _lifecycle(4_096, 170.0, published=(337.0, 373.0)),
        _lifecycle(16_384, 280.0, published=(1_002.0, 1_366.0)),
        _lifecycle(512, 60.0, workers=WORKERS, holders=HOLDERS),
        _lifecycle(512, 90.0, workers=MANY_WORKERS, holders=HOLDERS),
        _lifecycle(512, 150.0, workers=MANY_WORKERS, holders=HOLDERS, held=MANY_ACTIVE),
        SchedulerCase(
            name="process/memory",
            title="memory an active request of 1,024 blocks",
            unit="KiB",
            goal=24.0,
            measure=_memory,
        ),
        SchedulerCase(
            name="replica/visible_p99",
            title="a booking to another replica, p99, 1,000 bookings/s",
            unit="ms",
            goal=5.0,
            measure=lambda bench: visible_seconds(bench.bookings, PER_SECOND) * 1e3,
        ),
        SchedulerCase(
            name="core/queue/1000-workers/1024-waiting",
            title="a dequeue: a prefill ends, the next is booked, another waits; 1,000 workers, 1,024 waiting",
            unit="µs",
            goal=200.0,
            value=_p50,
            p99=_p99,
            measure=_dequeue,
        ),
        _life(WORKERS, 60.0),
        _life(WORKERS, 70.0, unwell=True),
        _life(MANY_WORKERS, 80.0),
        _life(MANY_WORKERS, 100.0, unwell=True),
        _native("select_and_free", _RESERVE, "µs", 8.0, workers=64, blocks=16),
        _native("select_and_free", _RESERVE, "µs", 16.0, workers=512, blocks=16),
        _native("select_and_free", _RESERVE, "µs", 40.0, workers=256, blocks=1_024),
        _native("select_and_free", _RESERVE, "µs", 100.0, workers=1_000, blocks=1_024),
        _native("score", "score, a worker", "ns", 20.0, workers=256, blocks=1_024),
    )
    SECONDS = (0.5, 0.02)

    @property
    def lifecycles(self) -> int:
        """Return the number of request lives of a run."""
        return QUICK_LIFECYCLES if self.quick else LIFECYCLES

    @property
    def bookings(self) -> int:
        """Return the number of bookings of a run."""
        return QUICK_BOOKINGS if self.quick else BOOKINGS

    def start(self, running: ExitStack, say: Say) -> Measure:
        """See `Bench.start`; processes are new in each run, the driver of the native core starts once."""
        cases = {case.workload: case for case in self.CASES}
        drivers: list[Driver] = []

        def native() -> Driver:
            if not drivers:
                say("native: building what is not up to date")
                drivers.append(running.enter_context(Driver(native_driver("scheduler"))))
                drivers[0].pin(usable_cores()[0], usable_cores()[0])
            return drivers[0]

        def measure(_: str, workload: str) -> Sample:
            case = cases[workload]
            if case.measure is not None:
                return case.measure(self)
            return native().request(
                "run",
                workload=workload.split("/")[1],
                seconds=self.run_seconds,
                workers=case.workers,
                blocks=case.blocks,
                rows="shuffled",
            )

        return measure
