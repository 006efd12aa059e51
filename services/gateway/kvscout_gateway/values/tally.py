"""Times counted in buckets that are each a tenth longer than the one before, so that any quantile of any span of time
is known to within a twentieth of itself, for as little as one addition a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

SHORTEST_SECONDS: Final = 1e-4
LONGEST_SECONDS: Final = 600.0
_STEP: Final = math.log(1.1)
BUCKETS: Final = math.ceil(math.log(LONGEST_SECONDS / SHORTEST_SECONDS) / _STEP) + 1


class Tally:
    """Counts times since its start."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS

    def observe(self, seconds: float) -> None:
        """Count one time; beyond the shortest or longest it counts as that."""
        place = math.ceil(math.log(max(seconds, SHORTEST_SECONDS) / SHORTEST_SECONDS) / _STEP)
        self.counts[min(place, BUCKETS - 1)] += 1


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the quantile in seconds; None = none was counted.

    Args:
        counts: Of a tally, or the difference of two.
        share: Between 0 and 1.
    """
    rank = share * sum(counts)
    if not rank:
        return None
    seen = 0
    for place, count in enumerate(counts):
        seen += count
        if seen >= rank:
            # The middle of the bucket, as its borders are apart: by a factor.
            return SHORTEST_SECONDS * math.exp(_STEP * max(0.0, place - 0.5))
    return LONGEST_SECONDS
