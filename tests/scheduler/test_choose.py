"""Draws: ties, temperatures, extreme magnitudes."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest

from kvscout_scheduler.choose import choose, probabilities

DRAWS = 20_000


def test_s2_exact_ties_are_all_drawn_equally_often() -> None:
    rng = Random(1)
    counts = Counter(choose([1.0, 5.0, 1.0, 1.0], 0.0, rng) for _ in range(DRAWS))
    assert set(counts) == {0, 2, 3}
    assert all(abs(count - DRAWS / 3) < 5 * math.sqrt(DRAWS * 2 / 9) for count in counts.values())


def test_s2_same_seed_same_sequence() -> None:
    first, second = Random(3), Random(3)
    for temperature in (0.0, 0.5):
        assert [choose([1.0, 1.0, 1.5], temperature, first) for _ in range(50)] == [
            choose([1.0, 1.0, 1.5], temperature, second) for _ in range(50)
        ]


def test_s2_equal_costs_are_uniform_at_any_temperature() -> None:
    assert probabilities([4.0] * 5, 0.3) == [0.2] * 5
    rng = Random(2)
    counts = Counter(choose([7.0] * 4, 1.0, rng) for _ in range(DRAWS))
    assert all(abs(counts[index] - DRAWS / 4) < 5 * math.sqrt(DRAWS * 3 / 16) for index in range(4))


@pytest.mark.parametrize(
    "costs",
    [[1e300, 2e300], [-1.7e308, 1.7e308], [1e300, 1e300], [5e-324, 0.0], [1e-300, 1e300, 1.0]],
)
@pytest.mark.parametrize("temperature", [1e-308, 0.5, 1e300])
def test_s2_no_magnitude_overflows(costs: list[float], temperature: float) -> None:
    drawn = probabilities(costs, temperature)
    assert all(0 <= p <= 1 for p in drawn)
    assert sum(drawn) == pytest.approx(1)
    assert choose(costs, temperature, Random(1)) in range(len(costs))


def test_probabilities_are_the_softmax_of_range_normalised_costs() -> None:
    expected = [math.exp(0), math.exp(-0.5 / 0.5), math.exp(-1 / 0.5)]
    assert probabilities([10, 15, 20], 0.5) == pytest.approx([e / sum(expected) for e in expected])
    assert probabilities([1000, 1500, 2000], 0.5) == pytest.approx(probabilities([10, 15, 20], 0.5))


def test_draws_follow_the_probabilities() -> None:
    rng, costs = Random(11), [1.0, 2.0, 4.0]
    counts = Counter(choose(costs, 0.7, rng) for _ in range(DRAWS))
    for index, p in enumerate(probabilities(costs, 0.7)):
        assert abs(counts[index] - DRAWS * p) < 5 * math.sqrt(DRAWS * p * (1 - p))


def test_a_low_temperature_is_nearly_the_minimum() -> None:
    assert probabilities([1.0, 2.0], 0.01) == pytest.approx([1.0, 0.0])


def test_infinite_costs_are_drawn_only_if_all_are() -> None:
    assert probabilities([math.inf, 3.0], 1.0) == [0.0, 1.0]
    assert probabilities([math.inf, math.inf], 1.0) == [0.5, 0.5]
    assert choose([math.inf, 3.0], 0.0, Random(1)) == 1
