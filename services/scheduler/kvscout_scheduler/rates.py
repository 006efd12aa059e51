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

    As soon as there is an observation, only the shape of the belief counts: it is scaled to what the observations are
    in all, so that a belief that is wrong by a factor of a hundred does not take hundreds of them to correct.

    Args:
        base: Believed value at 0.
        slope: Believed growth.
        at: Where the belief is held: it counts like two observations, at 0 and here.
    """

    __slots__ = ("_belief", "_n", "_trust", "_x", "_xx", "_xy", "_y", "base", "slope")

    def __init__(self, base: float, slope: float, at: float) -> None:
        self.base = base
        self.slope = slope
        self._belief = (base, slope, at)
        self._trust = 1.0
        """What the belief counts still."""
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Takes one observation."""
        self._n = KEPT * self._n + 1.0
        self._x = KEPT * self._x + x
        self._y = KEPT * self._y + y
        self._xx = KEPT * self._xx + x * x
        self._xy = KEPT * self._xy + x * y
        self._trust *= KEPT
        base, slope, at = self._belief
        believed = base * self._n + slope * self._x
        scale = self._trust * self._y / believed if believed else self._trust
        near, far = scale * base, scale * (base + slope * at)
        self._fit(
            self._n + 2.0 * self._trust,
            self._x + self._trust * at,
            self._y + near + far,
            self._xx + self._trust * at * at,
            self._xy + at * far,
        )

    def _fit(self, n: float, sum_x: float, sum_y: float, sum_xx: float, sum_xy: float) -> None:
        if not sum_x:
            self.base = max(LEAST_BASE, sum_y / n)
            return
        through_zero = sum_y / sum_x
        spread = n * sum_xx - sum_x * sum_x
        if spread > 1e-3 * n * sum_xx:
            slope = (n * sum_xy - sum_x * sum_y) / spread
            self.slope = min(max(slope, LEAST_SLOPE * through_zero), through_zero)
        else:
            # All in one place: of the growth nothing is learned.
            self.slope = min(self.slope, through_zero)
        self.base = max(LEAST_BASE, (sum_y - self.slope * sum_x) / n)

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
