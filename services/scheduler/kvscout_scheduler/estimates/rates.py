"""Straight lines and means that are learned from what happens, old observations counting less and less; pure."""

from __future__ import annotations

from math import exp, log
from statistics import median
from typing import Final

KEPT: Final = 0.995
"""Weight left of an observation when the next one has come: the last two hundred or so make the line."""
LEAST_SLOPE: Final = 0.2
"""A line grows at least by this share of what it would if it went through 0: what many small observations in one place
seem to say of its growth is mostly noise."""

LEAST_BASE: Final = 1e-6
"""Nothing takes no time at all."""
FEW: Final = 9
"""Observations that change the scale of a belief, and not yet its shape."""
AGREED: Final = 3
"""Observations without which the belief has a say in how wrong it is."""
MOST_BESIDE: Final = 3.0
"""So many times more or less than the others say counts one of few."""


def within(value: float, least: float, most: float) -> float:
    """Return a value, or the bound that it is beyond."""
    # A third of what `min` and `max` take: requests are learned from ten times each.
    return least if value < least else most if value > most else value


class FittedLine:
    """A straight line through observations (x, y), none negative, that begins as a belief.

    Of the belief only the shape counts: it is scaled to what the observations are in all, so that a belief that is
    wrong by a factor of a hundred does not take hundreds of them to correct. One alone says little: a reply from a
    cache of answers takes no time, and one that hung an hour. While there are few, the line is the belief, times the
    median of what they are in it, where 1 stands for each that is missing to `AGREED`. Then it is fitted to them, and
    each of those few adds at most `MOST_BESIDE` times more or less than that median says.

    Args:
        base: Believed value at 0.
        slope: Believed growth.
        at: Where the belief is held: it counts like two observations, at 0 and here.
        least_slope: It grows at least by this share of what it would if it went through 0.
    """

    __slots__ = ("_belief", "_first", "_least_slope", "_n", "_trust", "_x", "_xx", "_xy", "_y", "base", "slope")

    def __init__(self, base: float, slope: float, at: float, least_slope: float = LEAST_SLOPE) -> None:
        self.base = base
        self.slope = slope
        self._least_slope = least_slope
        self._belief = (base, slope, at)
        self._first: list[tuple[float, float]] | None = []
        """Observations, while they are few."""
        self._trust = 1.0
        """Weight left of the first estimate."""
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def is_belief(self) -> bool:
        """Return whether there is no observation."""
        return self._first is not None and not self._first

    @property
    def is_settled(self) -> bool:
        """Return whether there are more than few observations."""
        return self._first is None

    def believe(self, base: float, slope: float) -> None:
        """Take another belief, as long as there is no observation."""
        if self.is_belief:
            self.base, self.slope = base, slope
            self._belief = (base, slope, self._belief[2])

    def add(self, x: float, y: float) -> None:
        """Take one observation."""
        if self._first is None:
            self._sum(x, y)
            base, slope, _ = self._belief
            believed = base * self._n + slope * self._x
            self._follow(self._y / believed if believed else 1.0)
            return
        self._first.append((x, y))
        scale = self._scale(self._first)
        if len(self._first) >= FEW:
            self._begin(self._first, scale)
        else:
            base, slope, _ = self._belief
            self.base, self.slope = max(LEAST_BASE, scale * base), scale * slope

    def at(self, x: float) -> float:
        """Return the value at a place."""
        return self.base + self.slope * x

    def _scale(self, observed: list[tuple[float, float]]) -> float:
        """Return the scale of observations in units of the first estimate."""
        base, slope, _ = self._belief
        logs = [log(max(LEAST_BASE, y / believed)) for x, y in observed if (believed := base + slope * x)]
        return exp(median(logs + [0.0] * (AGREED - len(logs))))

    def _begin(self, observed: list[tuple[float, float]], scale: float) -> None:
        """Fit the line to its first observations."""
        base, slope, _ = self._belief
        for x, y in observed:
            usual = scale * (base + slope * x)
            self._sum(x, min(max(y, usual / MOST_BESIDE), usual * MOST_BESIDE) if usual else y)
        self._first = None
        self._follow(scale)

    def _sum(self, x: float, y: float) -> None:
        self._n = KEPT * self._n + 1.0
        self._x = KEPT * self._x + x
        self._y = KEPT * self._y + y
        self._xx = KEPT * self._xx + x * x
        self._xy = KEPT * self._xy + x * y
        self._trust *= KEPT

    def _follow(self, scale: float) -> None:
        """Fit the line to the sums, and to the belief at a scale."""
        base, slope, at = self._belief
        trust = self._trust
        near, far = trust * scale * base, trust * scale * (base + slope * at)
        n, sum_x, sum_y = self._n + 2.0 * trust, self._x + trust * at, self._y + near + far
        if not sum_x:
            self.base = max(LEAST_BASE, sum_y / n)
            return
        through_zero = sum_y / sum_x
        sum_xx, sum_xy = self._xx + trust * at * at, self._xy + at * far
        spread = n * sum_xx - sum_x * sum_x
        if spread > 1e-3 * n * sum_xx:
            slope = (n * sum_xy - sum_x * sum_y) / spread
            self.slope = within(slope, self._least_slope * through_zero, through_zero)
        else:
            # All in one place: of the growth nothing is learned.
            self.slope = min(self.slope, through_zero)
        base = (sum_y - self.slope * sum_x) / n
        self.base = base if base > LEAST_BASE else LEAST_BASE


class DecayingMean:
    """A mean that begins as a belief.

    Args:
        believed: Its first value.
        weight: Observations that it counts for.
    """

    __slots__ = ("_kept", "_sum", "_weight")

    def __init__(self, believed: float, weight: float = 1.0, kept: float = KEPT) -> None:
        self._sum = believed * weight
        self._weight = weight
        self._kept = kept

    def add(self, value: float, weight: float = 1.0) -> None:
        """Take one value."""
        self._sum = self._kept * self._sum + value * weight
        self._weight = self._kept * self._weight + weight

    @property
    def value(self) -> float:
        """Return the mean."""
        return self._sum / self._weight
