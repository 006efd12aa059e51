"""Numbers as JSON has them."""

from __future__ import annotations

import math


def finite(value: float | None) -> float | None:
    """Return a number; None for infinity and NaN, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
