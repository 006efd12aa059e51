"""Numbers as JSON has them."""

from __future__ import annotations

import math


def finite(value: float | None) -> float | None:
    """Return a number; None for infinity and NaN, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def rounded(value: float) -> str:
    """Return a number with about three digits, as sentences of the page have it."""
    return f"{value:,.0f}".replace(",", "\u202f") if value >= 100 else f"{value:.3g}"
