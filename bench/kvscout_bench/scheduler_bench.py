"""`kvscout bench scheduler`: what requests cost the scheduler, over the wire and in its native core, against goals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvscout_bench.harness import Case, Goal, Row, Side, compare
from kvscout_bench.machine import Machine, this_machine, usable_cores
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
from kvscout_bench.scheduler_queue import TurnCost
from kvscout_bench.scheduler_queue import measure as measure_queue
from kvscout_bench.scheduler_replication import measure
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
TURNS, QUICK_TURNS = 5_000, 50
PER_SECOND = 1_000
"""Bookings, where they are watched from another replica."""
SECONDS, QUICK_SECONDS = 0.5, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleCase(Case):
    """CPU of a scheduler process a request's life."""

    tokens: int
    workers: int = WORKERS
    holders: int = WORKERS
    """Workers on which a part of each prompt is cached."""
    peer: tuple[float, float] | None = None
    """Least and largest of what was published of the peer: it is not run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeCase(Case):
    """CPU of the core a request's life."""

    workers: int
    unwell: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreCase(Case):
    """One operation of the native core."""

    workers: int
    blocks: int


def _itself(sample: Any) -> float:
    return float(sample)


def _turn(sample: Any) -> TurnCost:
    assert isinstance(sample, TurnCost)
    return sample


def _lifecycle(tokens: int, goal_us: float, peer: tuple[float, float]) -> LifecycleCase:
    return LifecycleCase(
        name=f"process/lifecycle/{tokens}",
        title=f"CPU a lifecycle, {tokens:,} tokens, {WORKERS} workers, {OUTSTANDING} at once (peer: published)",
        unit="µs",
        goal=Goal(goal_us),
        workload="lifecycle",
        value=_itself,
        tokens=tokens,
        peer=peer,
    )


def _few_holders(workers: int, goal_us: float) -> LifecycleCase:
    return LifecycleCase(
        name=f"process/lifecycle/{workers}-workers/{HOLDERS}-holders",
        title=f"CPU a lifecycle, 512 tokens, cached on {HOLDERS} of {workers:,} workers, {OUTSTANDING} at once",
        unit="µs",
        goal=Goal(goal_us),
        workload="lifecycle",
        value=_itself,
        tokens=512,
        workers=workers,
        holders=HOLDERS,
    )


def _life(workers: int, goal_us: float, *, unwell: bool) -> LifeCase:
    return LifeCase(
        name=f"core/life/{workers}-workers{'/unwell' if unwell else ''}",
        title=f"CPU of the core a life, {workers:,} workers{', one cooling down and one excluded' if unwell else ''}",
        unit="µs",
        goal=Goal(goal_us),
        workload="life",
        value=_itself,
        workers=workers,
        unwell=unwell,
    )


def _core(workload: str, title: str, unit: str, goal: float, *, workers: int, blocks: int) -> CoreCase:
    thousands = 1e3 if unit == "µs" else 1.0
    return CoreCase(
        name=f"native/{workload}/{workers}-workers/{blocks}-blocks",
        title=f"{title}, {blocks:,} blocks, {workers:,} workers",
        unit=unit,
        goal=Goal(goal),
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
MEMORY = Case(
    name="process/memory",
    title="memory an active request of 1,024 blocks",
    unit="KiB",
    goal=Goal(24.0),
    workload="memory",
    value=_itself,
)
REPLICA = Case(
    name="replica/visible_p99",
    title="a booking to another replica, p99, 1,000 bookings/s",
    unit="ms",
    goal=Goal(5.0),
    workload="replica",
    value=_itself,
)
QUEUE = Case(
    name="core/queue/1000-workers/1024-waiting",
    title="a turn of the line: a prefill ends, the next is booked, another waits; 1,000 workers, 1,024 waiting",
    unit="µs",
    goal=Goal(200.0),
    workload="queue",
    value=lambda sample: _turn(sample).p50,
    p99=lambda sample: _turn(sample).p99,
)
LIFE_CASES = (
    _life(WORKERS, 60.0, unwell=False),
    _life(WORKERS, 70.0, unwell=True),
    _life(MANY_WORKERS, 80.0, unwell=False),
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
    """What of the rows to run. Errors as of `Selection`."""

    @classmethod
    def rows(cls) -> Iterable[str]:
        """See `Selection.rows`."""
        return ROWS

    def run(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Measures row by row; blocks.

        Args:
            say: Is told what is going on.

        Raises:
            DriverFailed: A process cannot be started, or fails.
        """
        machine = this_machine()
        for case in LIFECYCLE_CASES:
            if self.wanted(case.name):
                say(case.name)
                samples = [self._lifecycle(case) for _ in range(self.rounds_to_run)]
                row = self._row(case, samples, machine, (case.peer or ())[:1])
                yield replace(row, peer_spread=case.peer)
        if self.wanted(MEMORY.name):
            say(MEMORY.name)
            yield self._row(MEMORY, [self._memory() for _ in range(self.rounds_to_run)], machine)
        if self.wanted(REPLICA.name):
            say(REPLICA.name)
            yield self._row(REPLICA, [self._replica() for _ in range(self.rounds_to_run)], machine)
        if self.wanted(QUEUE.name):
            say(QUEUE.name)
            yield self._row(QUEUE, [self._queue() for _ in range(self.rounds_to_run)], machine)
        for life in LIFE_CASES:
            if self.wanted(life.name):
                say(life.name)
                yield self._row(life, [self._life(life) for _ in range(self.rounds_to_run)], machine)
        wanted = [case for case in CORE_CASES if self.wanted(case.name)]
        if wanted:
            say("native: building what is not up to date")
            with Driver(native_driver("scheduler")) as driver:
                driver.pin(usable_cores()[0], usable_cores()[0])
                for core in wanted:
                    yield self._row(core, [self._core(driver, core) for _ in range(self.rounds_to_run)], machine)

    def _row(self, case: Case, samples: Sequence[Any], machine: Machine, peer: Sequence[float] = ()) -> Row:
        p99s = tuple(case.p99(sample) for sample in samples) if case.p99 else ()
        ours = Side(tuple(case.value(sample) for sample in samples), p99s)
        # The ratio is to the best that was published.
        return compare(case, ours, Side(tuple(peer)) if peer else None, judge=not self.quick, machine=machine)

    def _lifecycle(self, case: LifecycleCase) -> float:
        with SchedulerProcess(case.workers) as process:
            holders = sorted(Random(SEED).sample(process.worker_ids, case.holders))
            requests = prompts(PROMPTS, case.tokens // BLOCK_SIZE, holders, SEED)
            gateway = Gateway(requests, outstanding=OUTSTANDING, operations=OPERATIONS)
            return lifecycle_cpu_us(process, gateway, QUICK_LIFECYCLES if self.quick else LIFECYCLES)

    def _life(self, case: LifeCase) -> float:
        lives = QUICK_LIFECYCLES if self.quick else LIFECYCLES
        return life_us(lives, workers=case.workers, unwell=case.unwell, seed=SEED)

    def _memory(self) -> float:
        with SchedulerProcess(WORKERS) as process:
            return bytes_a_booking(process, QUICK_BOOKINGS if self.quick else BOOKINGS, blocks=1_024) / 1024

    def _replica(self) -> float:
        return measure(QUICK_BOOKINGS if self.quick else BOOKINGS, PER_SECOND).p99 * 1e3

    def _queue(self) -> TurnCost:
        return measure_queue(QUICK_TURNS if self.quick else TURNS, workers=1_000, waiting=WAITING, seed=SEED)

    def _core(self, driver: Driver, case: CoreCase) -> Any:
        seconds = QUICK_SECONDS if self.quick else SECONDS
        return driver.ask(
            "run", workload=case.workload, seconds=seconds, workers=case.workers, blocks=case.blocks, rows="shuffled"
        )
