"""Two sides measured in turns, and what is said of them: values, goals, ratios. Pure but for the drivers asked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvscout_bench.machine import Machine

Sample = Mapping[str, Any]
"""What a driver says of one run."""

Samples = Mapping[tuple[str, str], Sequence[Sample]]
"""(side, workload) → one sample a round."""


class Measured(Protocol):
    """A driver, as far as rounds need it."""

    def ask(self, verb: str, *, within_seconds: float = ..., **arguments: object) -> Sample:
        """The answer to a command."""
        ...


@dataclass(frozen=True, slots=True)
class Goal:
    """What a value should reach."""

    value: float
    more_is_better: bool = False

    def met(self, value: float) -> bool:
        """Whether a value reaches it."""
        return value >= self.value if self.more_is_better else value <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row to be measured."""

    name: str
    title: str
    unit: str
    goal: Goal | None
    workload: str
    """What drivers are asked to run."""
    value: Callable[[Sample], float]
    """In `unit`."""
    p99: Callable[[Sample], float] | None = None
    more_is_better: bool = False
    """Where no goal says it."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side's values of a workload, one a round."""

    values: tuple[float, ...]
    p99s: tuple[float, ...] = ()
    """99th percentiles of the same; empty: they are not defined."""

    @property
    def value(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.values)

    @property
    def p99(self) -> float | None:
        """The median over the rounds of each round's 99th percentile."""
        return statistics.median(self.p99s) if self.p99s else None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    workload: str
    title: str
    value: float
    """Median over the rounds, in `unit`."""
    unit: str
    goal: float | None
    met: bool | None
    """None: there is no goal, or the run was too short to judge."""
    peer: float | None
    """The peer's median; None: it was not asked for, or has no such workload."""
    ratio: float | None
    """How many times better than the peer; below 1 is worse."""
    p99: float | None
    peer_p99: float | None
    spread: tuple[float, float]
    """Least and largest of the rounds."""
    peer_spread: tuple[float, float] | None
    rounds: int
    machine: Machine = field(repr=False)

    def as_json(self) -> dict[str, Any]:
        """The row as JSON values, numbers to four digits."""
        return {
            "workload": self.workload,
            "title": self.title,
            "value": rounded(self.value),
            "unit": self.unit,
            "goal": rounded(self.goal),
            "met": self.met,
            "peer": rounded(self.peer),
            "ratio": rounded(self.ratio),
            "p99": rounded(self.p99),
            "peer_p99": rounded(self.peer_p99),
            "spread": [rounded(value) for value in self.spread],
            "peer_spread": [rounded(value) for value in self.peer_spread] if self.peer_spread else None,
            "rounds": self.rounds,
            "machine": {name: getattr(self.machine, name) for name in Machine.__dataclass_fields__},
        }


def compare(case: Case, ours: Side, peer: Side | None, *, judge: bool, machine: Machine) -> Row:
    """A row of the two sides of a case.

    Args:
        peer: None: it has no such workload, or was not asked for.
        judge: Whether the run was long enough to say that a goal is met or missed.
    """
    goal = case.goal
    ratio = None
    if peer is not None:
        more_is_better = goal.more_is_better if goal else case.more_is_better
        better, worse = (ours.value, peer.value) if more_is_better else (peer.value, ours.value)
        ratio = better / worse if worse else None
    return Row(
        workload=case.name,
        title=case.title,
        value=ours.value,
        unit=case.unit,
        goal=goal.value if goal else None,
        met=goal.met(ours.value) if goal and judge else None,
        peer=peer.value if peer else None,
        ratio=ratio,
        p99=ours.p99,
        peer_p99=peer.p99 if peer else None,
        spread=(min(ours.values), max(ours.values)),
        peer_spread=(min(peer.values), max(peer.values)) if peer else None,
        rounds=len(ours.values),
        machine=machine,
    )


def side_of(case: Case, side: str, samples: Samples) -> Side | None:
    """A side's values of a case; None: it does not have the workload."""
    taken = samples.get((side, case.workload))
    if not taken:
        return None
    values = tuple(case.value(sample) for sample in taken)
    return Side(values, tuple(case.p99(sample) for sample in taken) if case.p99 else ())


def in_turns(drivers: Mapping[str, Measured], workloads: Sequence[str], *, rounds: int, seconds: float) -> Samples:
    """Runs of every workload, the sides taking turns, and who begins alternating from round to round.

    Args:
        drivers: Side → driver.
        seconds: Length of one run.

    Returns:
        (side, workload) → one sample a round; none for a workload that a side does not have.
    """
    samples: dict[tuple[str, str], list[Sample]] = {}
    order = list(drivers)
    for number in range(rounds):
        sides = order if number % 2 == 0 else order[::-1]
        for workload in workloads:
            for side in sides:
                answer = drivers[side].ask("run", workload=workload, seconds=seconds)
                if "unsupported" not in answer:
                    samples.setdefault((side, workload), []).append(answer)
    return samples


def rounded(value: float | None) -> float | None:
    """A number to four significant digits."""
    return None if value is None else float(f"{value:.4g}")
