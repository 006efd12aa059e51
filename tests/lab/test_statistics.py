"""Means over seeds and their intervals."""

from __future__ import annotations

from random import Random

import pytest
from support.seeds import test_seed

from kvscout_lab.statistics import estimate, percent_apart, quantile_95


def test_one_value_has_no_interval() -> None:
    found = estimate([3.0])
    assert (found.mean, found.half, found.low, found.high) == (3.0, None, 3.0, 3.0)


def test_intervals_are_those_of_student() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / 3**0.5, 1e-3)
    assert estimate([2.0] * 50).half == 0.0


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (20, 2.086), (21, 2.080), (25, 2.060), (29, 2.045), (60, 2.000), (120, 1.980)],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, quantile: float) -> None:
    assert quantile_95(degrees) == pytest.approx(quantile, abs=0.001)


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_of_a_hundred_intervals_about_95_have_the_true_mean(count: int) -> None:
    random = Random(test_seed())
    found = [estimate([random.gauss(5.0, 2.0) for _ in range(count)]) for _ in range(4_000)]
    # Six standard deviations of a share of 4,000: chance misses it once in a hundred million runs.
    assert 0.93 < sum(each.low <= 5.0 <= each.high for each in found) / len(found) < 0.97


def test_pairs_cancel_what_seeds_have_in_common() -> None:
    found = percent_apart([1.1, 11.0, 110.0], [1.0, 10.0, 100.0])
    assert found.mean == pytest.approx(10.0)
    assert found.half == pytest.approx(0.0, abs=1e-9)
    assert percent_apart([0.0, 1.0], [0.0, 0.0]).mean == 50.0
