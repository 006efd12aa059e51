"""Two sides measured in turns: values, goals, ratios. Pure but for the drivers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvscout_bench.machine import Machine

Sample = Mapping[str, Any]
"""Answer of a driver to one run."""

Samples = Mapping[tuple[str, str], Sequence[Sample]]
"""(side, workload) → one sample a round."""


class Measured(Protocol):
    """A driver, as far as rounds need it."""

    def request(self, verb: str, *, within_seconds: float = ..., **arguments: object) -> Sample:
        """Return the answer to a command."""
        ...


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of a value."""

    value: float
    more_is_better: bool = False

    def met(self, value: float) -> bool:
        """Return whether a value reaches it."""
        return value >= self.value if self.more_is_better else value <= self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row to be measured."""

    name: str
    title: str
    unit: str
    goal: Goal | None
    workload: str
    """Name by which drivers run it."""
    value: Callable[[Sample], float]
    """In `unit`."""
    p99: Callable[[Sample], float] | None = None
    more_is_better: bool = False
    """Direction of cases without a goal."""
    published: tuple[float, float] | None = None
    """Least and largest value that a peer published, shown where no peer is run."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side's values of a workload, one a round."""

    values: tuple[float, ...]
    p99s: tuple[float, ...] = ()
    """99th percentiles of the same; empty: they are not defined."""

    @property
    def value(self) -> float:
        """Return the median over the rounds."""
        return statistics.median(self.values)

    @property
    def p99(self) -> float | None:
        """Return the median over the rounds of each round's 99th percentile."""
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
    """The peer's median; None: it was not run, or has no such workload."""
    ratio: float | None
    """Factor by which ours is better than the peer; below 1 is worse."""
    p99: float | None
    peer_p99: float | None
    spread: tuple[float, float]
    """Least and largest of the rounds."""
    peer_spread: tuple[float, float] | None
    rounds: int
    machine: Machine = field(repr=False)
    parts: Mapping[str, float] = field(default_factory=dict)
    """Our value by process, in microseconds."""

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values, numbers to four digits."""
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
            **({"parts": {name: round(value, 1) for name, value in self.parts.items()}} if self.parts else {}),
        }


def compare(
    case: Case,
    ours: Side,
    peer: Side | None,
    *,
    judge: bool,
    machine: Machine,
    parts: Mapping[str, float] | None = None,
) -> Row:
    """Return the row of the two sides of a case.

    Args:
        peer: None: it has no such workload, or was not run; the ratio is then to the best that it published.
        judge: The run was long enough to say that a goal is met or missed.
        parts: Our value by process.
    """
    goal = case.goal
    title, ratio, peer_spread = case.title, None, None
    if peer is not None:
        peer_spread = min(peer.values), max(peer.values)
    elif case.published is not None:
        title, peer, peer_spread = f"{title} (peer: published)", Side(case.published[:1]), case.published
    if parts:
        title += f" ({', '.join(f'{part} {value:.0f}' for part, value in parts.items())})"
    if peer is not None:
        more_is_better = goal.more_is_better if goal else case.more_is_better
        better, worse = (ours.value, peer.value) if more_is_better else (peer.value, ours.value)
        ratio = better / worse if worse else None
    return Row(
        workload=case.name,
        title=title,
        value=ours.value,
        unit=case.unit,
        goal=goal.value if goal else None,
        met=goal.met(ours.value) if goal and judge else None,
        peer=peer.value if peer else None,
        ratio=ratio,
        p99=ours.p99,
        peer_p99=peer.p99 if peer else None,
        spread=(min(ours.values), max(ours.values)),
        peer_spread=peer_spread,
        rounds=len(ours.values),
        machine=machine,
        parts=parts or {},
    )


def values_of(case: Case, samples: Sequence[Any]) -> Side:
    """Return the values of a case in its samples, one a round."""
    p99s = tuple(case.p99(sample) for sample in samples) if case.p99 else ()
    return Side(tuple(case.value(sample) for sample in samples), p99s)


def side_of(case: Case, side: str, samples: Samples) -> Side | None:
    """Return a side's values of a case; None: it does not have the workload."""
    taken = samples.get((side, case.workload))
    return values_of(case, taken) if taken else None


def alternating(sides: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
    """Yield the order of the sides in each round: the one that begins alternates."""
    for number in range(rounds):
        yield sides if number % 2 == 0 else sides[::-1]


def in_turns(drivers: Mapping[str, Measured], workloads: Sequence[str], *, rounds: int, seconds: float) -> Samples:
    """Run of every workload, the sides taking turns, and who begins alternating from round to round.

    Args:
        drivers: Side → driver.
        seconds: Length of one run.

    Returns:
        (side, workload) → one sample a round; none for a workload that a side does not have.
    """
    samples: dict[tuple[str, str], list[Sample]] = {}
    for sides in alternating(list(drivers), rounds):
        for workload in workloads:
            for side in sides:
                answer = drivers[side].request("run", workload=workload, seconds=seconds)
                if "unsupported" not in answer:
                    samples.setdefault((side, workload), []).append(answer)
    return samples


def rounded(value: float | None) -> float | None:
    """Return a number to four significant digits."""
    return None if value is None else float(f"{value:.4g}")
