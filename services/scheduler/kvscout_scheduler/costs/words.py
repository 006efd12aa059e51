"""Costs and times in words: one form for explanations, errors and tables."""

from __future__ import annotations

from math import isfinite
from typing import Final

SECONDS: Final = "s"
"""Unit of costs that are times; they are shown in milliseconds."""


def milliseconds(seconds: float) -> str:
    """Return a time in words, such as "38 ms": to the millisecond from 10 ms on, with two digits below."""
    ms = seconds * 1000
    return f"{ms:,.0f} ms" if abs(ms) >= 10 else f"{ms:.2g} ms"


def cost_in_words(cost: float, unit: str | None) -> str:
    """Return a cost in words, such as "38 ms" or "12.5 blocks"; "" for an infinite one.

    Args:
        cost: In the unit.
        unit: `Policy.unit`; None = costs of the policy say nothing, "" = a number without unit.
    """
    if unit is None or not isfinite(cost):
        return ""
    if unit == SECONDS:
        return milliseconds(cost)
    number = f"{cost:,.0f}" if abs(cost) >= 1000 else f"{cost:.3g}"
    return f"{number} {unit}".rstrip()
