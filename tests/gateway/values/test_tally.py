"""Quantiles of times that were counted in buckets."""

import random

import pytest

from kvscout_gateway.values.tally import LONGEST_SECONDS, SHORTEST_SECONDS, Tally, quantile


def test_a_quantile_is_within_a_twentieth_of_the_true_one() -> None:
    draw, tally = random.Random(3), Tally()
    times = sorted(10 ** draw.uniform(-3.5, 2) for _ in range(4_001))
    for one in times:
        tally.observe(one)
    for share in (0.01, 0.5, 0.95, 0.99):
        true = times[round(share * 4_000)]
        assert quantile(tally.counts, share) == pytest.approx(true, rel=0.06)


def test_what_is_beyond_all_bounds_counts_as_the_bound_and_nothing_has_no_quantile() -> None:
    tally = Tally()
    assert quantile(tally.counts, 0.5) is None
    for one in (-1.0, 0.0, 1e9):
        tally.observe(one)
    assert quantile(tally.counts, 0.5) == SHORTEST_SECONDS
    assert quantile(tally.counts, 1.0) == pytest.approx(LONGEST_SECONDS, rel=0.15)
