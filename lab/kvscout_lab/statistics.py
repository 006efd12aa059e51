"""Percentiles, variation, and means over seeds with their 95 % confidence intervals (Student's t)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, sqrt
from statistics import fmean, pstdev, stdev
from typing import Final, NamedTuple

T_95: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Two-sided 95 % quantiles of Student's distribution with 1, 2, … degrees of freedom."""
NORMAL_95: Final = 1.959964
"""The quantile of the normal distribution, which Student's approaches with many degrees of freedom."""


class Estimate(NamedTuple):
    """A mean and half the width of its interval."""

    mean: float
    half: float | None
    """None = there is one value only, and nothing is known."""

    @property
    def low(self) -> float:
        """Lower end of the interval; the mean where there is none."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """Upper end of the interval; the mean where there is none."""
        return self.mean + (self.half or 0.0)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value."""
    if len(values) < 2:
        return Estimate(values[0], None)
    degrees = len(values) - 1
    return Estimate(fmean(values), quantile_95(degrees) * stdev(values) / sqrt(len(values)))


def quantile_95(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution, with an error below 0.001.

    Above the table by the first terms of its expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    normal = NORMAL_95
    first = (normal**3 + normal) / 4
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / 96
    return normal + first / degrees + second / degrees**2


def percent_apart(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """By how many percent ours is above theirs: the mean over pairs of the same seed, which had the same requests.

    Pairs in which theirs is 0 count as equal where ours is 0 too, and as 100 % apart else.
    """
    return estimate([_percent(mine, other) for mine, other in zip(ours, theirs, strict=True)])


def _percent(mine: float, other: float) -> float:
    if not other:
        return 100.0 if mine else 0.0
    return 100.0 * (mine / other - 1.0)


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Return the percentile of ascending values, interpolated linearly between ranks; None without values."""
    if not ordered:
        return None
    position = (len(ordered) - 1) * percent / 100
    below, above = floor(position), ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def variation(values: Sequence[float]) -> float | None:
    """Return the coefficient of variation, population std / mean; None without values or with a mean of 0."""
    mean = fmean(values) if values else 0.0
    return pstdev(values, mean) / mean if mean else None
