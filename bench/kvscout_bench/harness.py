"""The harness of all benchmarks: sides measured alternately, goals, ratios, rows."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from kvscout_bench.machine import Machine, this_machine
from kvscout_bench.peer import Driver
from kvscout_bench.strangers import DriverFailed
from kvscout_common.errors import InvalidArgument

OURS = "ours"
"""Name of our side; other sides have the names of the peers."""

Sample = Any
"""Result of one run of a workload by one side."""

Samples = Mapping[tuple[str, str], Sequence[Sample]]
"""(side, workload) → one sample a round."""

Measure = Callable[[str, str], Sample | None]
"""Runs a workload on a side, (side, workload) → sample; None: the side does not have it."""

Say = Callable[[str], None]
"""Reports progress, a line a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row to be measured."""

    name: str
    title: str
    unit: str
    value: Callable[[Sample], float]
    """In `unit`."""
    goal: float | None = None
    """In `unit`."""
    more_is_better: bool = False
    workload: str = ""
    """Workload that is run; "": the one with the case's name."""
    p99: Callable[[Sample], float | None] | None = None
    parts: Callable[[Sample], Mapping[str, float]] | None = None
    """The value by process."""
    beside: Callable[[Sample], Mapping[str, float]] | None = None
    """The same of processes that are not measured: load generator, engines."""
    published: tuple[float, float] | None = None
    """Least and largest value that a peer published, shown where no peer is run."""

    def __post_init__(self) -> None:
        if not self.workload:
            object.__setattr__(self, "workload", self.name)

    def met(self, value: float) -> bool | None:
        """Return whether a value reaches the goal; None: there is no goal."""
        if self.goal is None:
            return None
        return value >= self.goal if self.more_is_better else value <= self.goal


def sample_value(key: str, divisor: float = 1.0) -> Callable[[Sample], float]:
    """Return what reads a value of a sample that is a mapping."""
    return lambda sample: float(sample[key]) / divisor


@dataclass(frozen=True, slots=True)
class Side:
    """One side's values of a case, one a round."""

    values: tuple[float, ...]
    p99s: tuple[float, ...] = ()
    """99th percentiles of the same; empty: they are not defined."""
    parts: tuple[Mapping[str, float], ...] = ()
    """The values by process."""
    beside: tuple[Mapping[str, float], ...] = ()
    """The same of processes that are not measured."""

    @property
    def value(self) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.values)

    @property
    def p99(self) -> float | None:
        """Return the median over the rounds of each round's 99th percentile."""
        return statistics.median(self.p99s) if self.p99s else None

    @property
    def spread(self) -> tuple[float, float]:
        """Return the least and the largest of the rounds."""
        return min(self.values), max(self.values)

    def as_json(self) -> dict[str, Any]:
        """Return medians and all rounds as JSON values, numbers to four digits."""
        rounds = {"values": self.values, "p99s": self.p99s}
        parts = {"parts": self.parts, "beside": self.beside}
        return {
            "value": rounded(self.value),
            "p99": rounded(self.p99),
            **{name: [*map(rounded, numbers)] for name, numbers in rounds.items() if numbers},
            **{
                name: [{part: rounded(value) for part, value in each.items()} for each in measured]
                for name, measured in parts.items()
                if measured
            },
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result: a case, and the sides that have it."""

    case: Case
    ours: Side
    peers: Mapping[str, Side] = field(default_factory=dict)
    """Those that were run, by name."""
    judged: bool = True
    """The run was long enough to say that a goal is met or missed."""
    machine: Machine = field(default_factory=this_machine, repr=False)

    @property
    def met(self) -> bool | None:
        """Return whether we reach the goal; None: there is none, or the run was too short to judge."""
        return self.case.met(self.ours.value) if self.judged else None

    @property
    def title(self) -> str:
        """Return the title of the case, with the medians of our processes."""
        if not self.ours.parts:
            return self.case.title
        parts = {name: statistics.median(each[name] for each in self.ours.parts) for name in self.ours.parts[0]}
        return f"{self.case.title} ({', '.join(f'{name} {value:.0f}' for name, value in parts.items())})"

    def ratio(self, peer: str) -> float | None:
        """Return the factor by which ours is better than a peer; below 1 is worse."""
        ours, theirs = self.ours.value, self.peers[peer].value
        better, worse = (ours, theirs) if self.case.more_is_better else (theirs, ours)
        return better / worse if worse else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values, numbers to four digits."""
        return {
            "workload": self.case.name,
            "title": self.case.title,
            "unit": self.case.unit,
            "goal": rounded(self.case.goal),
            "met": self.met,
            **self.ours.as_json(),
            "published": self.case.published,
            "peers": {
                name: {"ratio": rounded(self.ratio(name)), **peer.as_json()} for name, peer in self.peers.items()
            },
            "machine": asdict(self.machine),
        }


def side_of(case: Case, side: str, samples: Samples) -> Side | None:
    """Return a side's values of a case; None: it does not have the workload."""
    taken = samples.get((side, case.workload))
    if not taken:
        return None

    def of_each(read: Callable[[Sample], Any] | None) -> tuple[Any, ...]:
        return tuple(value for value in map(read, taken) if value is not None) if read else ()

    return Side(of_each(case.value), *map(of_each, (case.p99, case.parts, case.beside)))


def interleave(sides: Sequence[str], workloads: Sequence[str], measure: Measure, *, rounds: int) -> Samples:
    """Run every workload on every side, round after round; the side that begins alternates.

    Returns:
        (side, workload) → one sample a round; none for a workload that a side does not have.
    """
    samples: dict[tuple[str, str], list[Sample]] = {}
    for number in range(rounds):
        for workload in workloads:
            for side in sides if number % 2 == 0 else reversed(sides):
                sample = measure(side, workload)
                if sample is not None:
                    samples.setdefault((side, workload), []).append(sample)
    return samples


def measure_by(drivers: Mapping[str, Driver], seconds: float) -> Measure:
    """Return what has each side's driver run a workload for some seconds."""

    def measure(side: str, workload: str) -> Sample | None:
        answer = drivers[side].request("run", workload=workload, seconds=seconds)
        return None if "unsupported" in answer else answer

    return measure


@dataclass(frozen=True, slots=True)
class Bench(ABC):
    """A benchmark: its rows, how often they are measured, and beside which peers.

    Raises:
        InvalidArgument: A value is out of range or names nothing.
    """

    CASES: ClassVar[Sequence[Case]] = ()
    PEERS: ClassVar[Collection[str]] = ()
    """Names of the peers that can be measured."""
    SECONDS: ClassVar[tuple[float, float]] = (1.0, 0.1)
    """Default length of a run of one workload by one side, and the length in a quick run."""

    rounds: int = 3
    only: tuple[str, ...] = ()
    """Parts of names of rows; empty: all."""
    quick: bool = False
    """Short: shows that everything works, judges nothing."""
    peers: tuple[str, ...] = ()
    """Measured alternately with ours."""
    seconds: float = 0.0
    """Length of a run of one workload by one side; 0: the benchmark's default."""

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in self.PEERS:
                raise InvalidArgument(f"{peer!r} is not one of {', '.join(self.PEERS)}", field="peer")
        if self.rounds < 1:
            raise InvalidArgument("must be at least 1", field="rounds")
        if self.seconds < 0:
            raise InvalidArgument("must not be negative", field="seconds")
        for part in self.only:
            if not any(part in case.name for case in self.CASES):
                raise InvalidArgument(f"{part!r} is in no workload's name", field="only")

    @property
    def sides(self) -> tuple[str, ...]:
        """Return the names of the sides, ours first."""
        return (OURS, *self.peers)

    @property
    def rounds_to_run(self) -> int:
        """Return the number of rounds: one in a quick run."""
        return 1 if self.quick else self.rounds

    @property
    def run_seconds(self) -> float:
        """Return the length of a run of one workload by one side."""
        default, quick = self.SECONDS
        return quick if self.quick else self.seconds or default

    def selected(self) -> Iterator[Case]:
        """Yield the cases whose rows are wanted."""
        return (case for case in self.CASES if not self.only or any(part in case.name for part in self.only))

    def run(self, say: Say) -> Iterator[Row]:
        """Measure workload by workload, the sides alternately; blocks.

        Args:
            say: Reports progress.

        Raises:
            DriverFailed: A process cannot be built or started, or fails.
        """
        cases: dict[str, list[Case]] = {}
        for case in self.selected():
            cases.setdefault(case.workload, []).append(case)
        with ExitStack() as running:
            measure = self.start(running, say)
            for workload, group in cases.items():
                say(workload)
                yield from self.rows(group, interleave(self.sides, [workload], measure, rounds=self.rounds_to_run))

    @abstractmethod
    def start(self, running: ExitStack, say: Say) -> Measure:
        """Start what all runs share, which `running` ends; return what runs a workload."""

    def rows(self, cases: Sequence[Case], samples: Samples) -> Iterator[Row]:
        """Yield a row for each case.

        Raises:
            DriverFailed: Our side does not have a case.
        """
        for case in cases:
            ours = side_of(case, OURS, samples)
            if ours is None:
                raise DriverFailed(f"{case.name}: our side does not have it")
            peers = {name: side for name in self.peers if (side := side_of(case, name, samples))}
            yield Row(case, ours, peers, judged=not self.quick)


def rounded(value: float | None) -> float | None:
    """Return a number to four significant digits."""
    return None if value is None else float(f"{value:.4g}")
