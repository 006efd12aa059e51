"""`kvscout bench scheduler`: what requests cost the scheduler, over the wire and in its native core, against goals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from kvscout_bench.harness import Case, Goal, Row, compare, values_of
from kvscout_bench.machine import this_machine, usable_cores
from kvscout_bench.peer import Driver, native_driver
from kvscout_bench.scheduler_life import HOLDERS, life_us
from kvscout_bench.scheduler_process import (
    BLOCK_SIZE,
    Gateway,
    SchedulerProcess,
    bytes_a_booking,
    lifecycle_cpu_us,
    prompts,
)
from kvscout_bench.scheduler_queue import DequeueCost
from kvscout_bench.scheduler_queue import measure as measure_queue
from kvscout_bench.scheduler_replication import measure as measure_replica
from kvscout_bench.selection import Selection

SEED = 1
WORKERS = 256
PROMPTS = 256
OUTSTANDING = 64
OPERATIONS = 16
"""In one message, at most."""
MANY_WORKERS = 2_000
LIFECYCLES, QUICK_LIFECYCLES = 10_000, 200
BOOKINGS, QUICK_BOOKINGS = 4_000, 100
WAITING = 1_024
DEQUEUES, QUICK_DEQUEUES = 5_000, 50
PER_SECOND = 1_000
"""Bookings, where they are watched from another replica."""
SECONDS, QUICK_SECONDS = 0.5, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCase(Case):
    """A row, and the sizes of its measurement."""

    tokens: int = 0
    """Tokens of each prompt, in rows of lifecycles."""
    workers: int = WORKERS
    holders: int = 0
    """Workers on which a part of each prompt is cached; 0 = all."""
    unwell: bool = False
    """One worker cools down and another one is excluded."""
    blocks: int = 0
    """Blocks of each prompt, in rows of the native core."""


def _case(
    name: str,
    title: str,
    goal: float,
    *,
    unit: str = "µs",
    workload: str = "",
    value: Callable[[Any], float] = float,
    **more: Any,
) -> SchedulerCase:
    return SchedulerCase(
        name=name, title=title, unit=unit, goal=Goal(goal), workload=workload or name, value=value, **more
    )


def _lifecycle(tokens: int, goal_us: float, published: tuple[float, float]) -> SchedulerCase:
    title = f"CPU a lifecycle, {tokens:,} tokens, {WORKERS} workers, {OUTSTANDING} at once"
    return _case(f"process/lifecycle/{tokens}", title, goal_us, tokens=tokens, published=published)


def _few_holders(workers: int, goal_us: float) -> SchedulerCase:
    name = f"process/lifecycle/{workers}-workers/{HOLDERS}-holders"
    title = f"CPU a lifecycle, 512 tokens, cached on {HOLDERS} of {workers:,} workers, {OUTSTANDING} at once"
    return _case(name, title, goal_us, tokens=512, workers=workers, holders=HOLDERS)


def _life(workers: int, goal_us: float, *, unwell: bool = False) -> SchedulerCase:
    suffix, state = ("/unwell", ", one cooling down and one excluded") if unwell else ("", "")
    title = f"CPU of the core a life, {workers:,} workers{state}"
    return _case(f"core/life/{workers}-workers{suffix}", title, goal_us, workers=workers, unwell=unwell)


def _core(workload: str, title: str, unit: str, goal: float, *, workers: int, blocks: int) -> SchedulerCase:
    thousands = 1e3 if unit == "µs" else 1.0
    return _case(
        f"native/{workload}/{workers}-workers/{blocks}-blocks",
        f"{title}, {blocks:,} blocks, {workers:,} workers",
        goal,
        unit=unit,
        workload=workload,
        value=lambda sample: float(sample["median_ns"]) / thousands,
        p99=lambda sample: float(sample["p99_ns"]) / thousands,
        workers=workers,
        blocks=blocks,
    )


LIFECYCLE_CASES = (
    _lifecycle(512, 140.0, (136.0, 172.0)),
    _lifecycle(4_096, 170.0, (337.0, 373.0)),
    _lifecycle(16_384, 280.0, (1_002.0, 1_366.0)),
    _few_holders(WORKERS, 60.0),
    _few_holders(MANY_WORKERS, 90.0),
)
MEMORY = _case("process/memory", "memory an active request of 1,024 blocks", 24.0, unit="KiB")
REPLICA = _case("replica/visible_p99", "a booking to another replica, p99, 1,000 bookings/s", 5.0, unit="ms")
QUEUE = _case(
    "core/queue/1000-workers/1024-waiting",
    "a dequeue: a prefill ends, the next is booked, another waits; 1,000 workers, 1,024 waiting",
    200.0,
    value=lambda sample: float(sample.p50),
    p99=lambda sample: float(sample.p99),
)
LIFE_CASES = (
    _life(WORKERS, 60.0),
    _life(WORKERS, 70.0, unwell=True),
    _life(MANY_WORKERS, 80.0),
    _life(MANY_WORKERS, 100.0, unwell=True),
)
_RESERVE = "select, reserve and free"
CORE_CASES = (
    _core("select_and_free", _RESERVE, "µs", 8.0, workers=64, blocks=16),
    _core("select_and_free", _RESERVE, "µs", 16.0, workers=512, blocks=16),
    _core("select_and_free", _RESERVE, "µs", 40.0, workers=256, blocks=1_024),
    _core("select_and_free", _RESERVE, "µs", 100.0, workers=1_000, blocks=1_024),
    _core("score", "score, a worker", "ns", 20.0, workers=256, blocks=1_024),
)
ROWS: Sequence[str] = [case.name for case in (*LIFECYCLE_CASES, MEMORY, REPLICA, QUEUE, *LIFE_CASES, *CORE_CASES)]


@dataclass(frozen=True, slots=True)
class SchedulerBench(Selection):
    """Rows to run. Errors as of `Selection`."""

    @classmethod
    def rows(cls) -> Iterable[str]:
        """See `Selection.rows`."""
        return ROWS

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measure row by row; blocks.

        Args:
            say: Reports progress, a line a call.

        Raises:
            DriverFailed: A process cannot be started, or fails.
        """
        machine = this_machine()

        def row(case: Case, measure: Callable[[], Any]) -> Row:
            ours = values_of(case, [measure() for _ in range(self.rounds_to_run)])
            return compare(case, ours, None, judge=not self.quick, machine=machine)

        for case, measure in self._measures():
            if self.wanted(case.name):
                say(case.name)
                yield row(case, measure)
        wanted = [case for case in CORE_CASES if self.wanted(case.name)]
        if wanted:
            say("native: building what is not up to date")
            with Driver(native_driver("scheduler")) as driver:
                driver.pin(usable_cores()[0], usable_cores()[0])
                for case in wanted:
                    yield row(case, partial(self._core, driver, case))

    def _measures(self) -> Iterator[tuple[Case, Callable[[], Any]]]:
        """Yield the rows that need no native driver, and what measures each."""
        for case in LIFECYCLE_CASES:
            yield case, partial(self._lifecycle, case)
        yield MEMORY, self._memory
        yield REPLICA, self._replica
        yield QUEUE, self._queue
        for case in LIFE_CASES:
            yield case, partial(self._life, case)

    def _lifecycle(self, case: SchedulerCase) -> float:
        with SchedulerProcess(case.workers) as process:
            holders = sorted(Random(SEED).sample(process.worker_ids, case.holders or case.workers))
            requests = prompts(PROMPTS, case.tokens // BLOCK_SIZE, holders, SEED)
            gateway = Gateway(requests, outstanding=OUTSTANDING, operations=OPERATIONS)
            return lifecycle_cpu_us(process, gateway, QUICK_LIFECYCLES if self.quick else LIFECYCLES)

    def _life(self, case: SchedulerCase) -> float:
        lives = QUICK_LIFECYCLES if self.quick else LIFECYCLES
        return life_us(lives, workers=case.workers, unwell=case.unwell, seed=SEED)

    def _memory(self) -> float:
        with SchedulerProcess(WORKERS) as process:
            return bytes_a_booking(process, QUICK_BOOKINGS if self.quick else BOOKINGS, blocks=1_024) / 1024

    def _replica(self) -> float:
        return measure_replica(QUICK_BOOKINGS if self.quick else BOOKINGS, PER_SECOND).p99 * 1e3

    def _queue(self) -> DequeueCost:
        return measure_queue(QUICK_DEQUEUES if self.quick else DEQUEUES, workers=1_000, waiting=WAITING, seed=SEED)

    def _core(self, driver: Driver, case: SchedulerCase) -> Any:
        seconds = QUICK_SECONDS if self.quick else SECONDS
        return driver.request(
            "run", workload=case.workload, seconds=seconds, workers=case.workers, blocks=case.blocks, rows="shuffled"
        )
