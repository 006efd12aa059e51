"""Straight lines and means that are learned from what happens, old observations counting less and less; pure."""

from __future__ import annotations

from typing import Final

KEPT: Final = 0.995
"""What an observation still counts when the next one has come: the last two hundred or so make the line."""
LEAST_SLOPE: Final = 0.2
"""A line grows at least by this share of what it would if it went through 0: what many small observations in one place
seem to say of its growth is mostly noise."""

LEAST_BASE: Final = 1e-6
"""Nothing takes no time at all."""


class Line:
    """A straight line through observations (x, y), none negative, that begins as a belief.

    Args:
        base: Believed value at 0.
        slope: Believed growth.
        at: Where the belief is held: it counts like two observations, at 0 and here.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "base", "slope")

    def __init__(self, base: float, slope: float, at: float) -> None:
        self.base = base
        self.slope = slope
        far = base + slope * at
        self._n, self._x, self._y, self._xx, self._xy = 2.0, at, base + far, at * at, at * far

    def add(self, x: float, y: float) -> None:
        """Takes one observation."""
        self._n = KEPT * self._n + 1.0
        self._x = KEPT * self._x + x
        self._y = KEPT * self._y + y
        self._xx = KEPT * self._xx + x * x
        self._xy = KEPT * self._xy + x * y
        if not self._x:
            self.base = max(LEAST_BASE, self._y / self._n)
            return
        through_zero = self._y / self._x
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-3 * self._n * self._xx:
            slope = (self._n * self._xy - self._x * self._y) / spread
            self.slope = min(max(slope, LEAST_SLOPE * through_zero), through_zero)
        else:
            # All in one place: of the growth nothing is learned.
            self.slope = min(self.slope, through_zero)
        self.base = max(LEAST_BASE, (self._y - self.slope * self._x) / self._n)

    def at(self, x: float) -> float:
        """The value at a place."""
        return self.base + self.slope * x


class Mean:
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
        """Takes one value."""
        self._sum = self._kept * self._sum + value * weight
        self._weight = self._kept * self._weight + weight

    @property
    def value(self) -> float:
        """The mean."""
        return self._sum / self._weight
