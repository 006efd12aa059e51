"""Times counted in the buckets of a Prometheus histogram, which is made of them when it is scraped.

`prometheus_client.Histogram` takes a lock twice and ten times as long, for each observation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily


class Latencies:
    """Counts times since its start.

    Args:
        bounds: The upper ones of the buckets, in seconds, ascending.
    """

    __slots__ = ("_bounds", "counts", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket, the last one without a bound; not cumulative."""
        self.seconds = 0.0
        """All of them together."""

    def observe(self, seconds: float) -> None:
        """Add one value."""
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.seconds += seconds

    def add(self, counts: Sequence[int], seconds: float) -> None:
        """Add values, by bucket, and their sum."""
        self.counts = [ours + theirs for ours, theirs in zip(self.counts, counts, strict=True)]
        self.seconds += seconds

    def add_to(self, histogram: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """Add the series of these labels."""
        buckets = zip((*map(str, self._bounds), "+Inf"), accumulate(self.counts), strict=True)
        histogram.add_metric(labels, list(buckets), self.seconds)
