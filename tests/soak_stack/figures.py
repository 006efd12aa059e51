"""What a run is judged by: figures of every process at rest, window after window, and which of them grew. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

Figures = Mapping[str, float]
"""Of one process, by what is counted."""


class Limit(NamedTuple):
    """How much a figure may grow over all windows that count."""

    share: float = 0.0
    """Of its median."""
    spare: float = 0.0
    """In its own unit, besides."""


LIMITS: Mapping[str, Limit] = {
    "RSS": Limit(share=0.02),
    # In place of it, of a process with an index: removed blocks stay known, up to 65,536 of a rank, which takes hours.
    # `make soak` judges the index.
    "RSS but index": Limit(share=0.02),
    # What ended is remembered for a while, as much as there was of it.
    "allocations": Limit(share=0.04),
    # Connections to an engine that was restarted are closed when they are found to be dead.
    "descriptors": Limit(spare=4),
    # Of the pool in which files are read and memory is given back, as many as were ever needed at once.
    "threads": Limit(spare=6),
    "tasks": Limit(spare=3),
    "calls": Limit(spare=2),
    # A code with which a call ends shows when the first one does, and models that are gone until another one comes.
    "series": Limit(share=0.1, spare=24),
}
EARLY = frozenset({"RSS", "RSS but index", "allocations", "series"})
"""What processes take more of in their first minutes."""


@dataclass(frozen=True, slots=True)
class Window:
    """All processes at rest, after a window of load."""

    minutes: float
    """Since the load began."""
    processes: Mapping[str, Figures]


class Growth(NamedTuple):
    """What a figure of a process did over the windows that count."""

    process: str
    what: str
    first: float
    last: float
    grown: float
    """By the slope of all windows, not by two of them."""
    most: float
    """What it may grow by."""

    @property
    def too_much(self) -> bool:
        """Whether it is a leak."""
        return self.grown > self.most

    def __str__(self) -> str:
        return (
            f"{self.process}: {self.what} {shown(self.what, self.first)} → {shown(self.what, self.last)}, "
            f"by slope {shown(self.what, self.grown)} more, {shown(self.what, self.most)} may be"
        )


def shown(what: str, value: float) -> str:
    """A figure for people."""
    if what.startswith("RSS"):
        return f"{value / 2**20:.2f} MiB"
    return f"{value:,.0f}"


def slope(values: Sequence[float]) -> float:
    """Growth a window: the median over all pairs, which single outliers do not move (Theil and Sen)."""
    pairs = combinations(enumerate(values), 2)
    slopes = [(later - earlier) / (end - begin) for (begin, earlier), (end, later) in pairs]
    return statistics.median(slopes) if slopes else 0.0


def growths(
    windows: Sequence[Window], young: frozenset[str] = frozenset(), limits: Mapping[str, Limit] = LIMITS
) -> Iterator[Growth]:
    """What each figure of each process did.

    Args:
        windows: Those that count: after the warm-up.
        young: Processes that were started anew meanwhile.
        limits: By what is counted.
    """
    for process, figures in windows[-1].processes.items():
        for what in figures:
            if what not in limits or (process in young and what in EARLY):
                continue
            if what == "RSS" and "RSS but index" in figures:
                continue
            values = [seen for window in windows if (seen := window.processes.get(process, {}).get(what)) is not None]
            limit = limits[what]
            most = limit.share * statistics.median(values) + limit.spare
            yield Growth(process, what, values[0], values[-1], slope(values) * (len(values) - 1), most)


def table(windows: Sequence[Window], what: str) -> Iterator[str]:
    """Lines of one figure of every process, a line a window."""
    processes = [name for name, figures in windows[-1].processes.items() if what in figures]
    yield f"{what:>12}" + "".join(f"{name:>12}" for name in processes)
    for window in windows:
        values = (window.processes.get(name, {}).get(what) for name in processes)
        cells = "".join(f"{'–' if value is None else shown(what, value):>12}" for value in values)
        yield f"{window.minutes:>8.1f} min" + cells
