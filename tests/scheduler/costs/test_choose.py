"""Draws: ties, temperatures, extreme magnitudes."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from support.seeds import test_seed

from kvscout_common.hashing import native_available
from kvscout_scheduler.costs.choose import choose, probabilities
from kvscout_scheduler.costs.cost import BlockFormat, ScoreInputs

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


NEAR = [0.1, 0.2, 0.25, 0.4]


@pytest.mark.parametrize("hung", [5.1, 60.0, 1e300])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_a_worker_that_hangs_leaves_the_others_as_different_as_they_are(hung: float, temperature: float) -> None:
    without = probabilities(NEAR, temperature)
    drawn = probabilities([*NEAR, hung], temperature)
    assert drawn[-1] < min(drawn[:-1])
    share = 1 - drawn[-1]
    assert [p / share for p in drawn[:-1]] == pytest.approx(without)


def test_units_and_signs_make_no_difference_to_who_is_an_outlier() -> None:
    costs = [*NEAR, 5.1]
    expected = probabilities(costs, 0.3)
    assert probabilities([1000 * cost for cost in costs], 0.3) == pytest.approx(expected)
    # As `kv-logit`, whose costs are below 0.
    assert probabilities([cost - 7 for cost in costs], 0.3) == pytest.approx(expected)


def test_what_many_have_is_no_outlier() -> None:
    # One has the prefix, two are near, all others have nothing.
    costs = [0.0, 1.0, 1.0, *[300.0] * 5]
    total = 1 + 2 * math.exp(-1 / 300) + 5 * math.exp(-1)
    assert probabilities(costs, 1.0) == pytest.approx([math.exp(-cost / 300) / total for cost in costs])
    assert probabilities([0.0, 9.0], 0.5)[1] == pytest.approx(1 / (1 + math.exp(2)))


@pytest.mark.skipif(not native_available(), reason="the extension is not built: there is nothing to compare")
def test_the_twin_draws_by_the_same_probabilities() -> None:
    from kvscout_native import ActiveLoad

    rng = Random(test_seed())
    for _ in range(300):
        load = ActiveLoad(True)
        size = rng.randrange(1, 12)
        load.arrange([(f"w{slot}", 0, slot) for slot in range(size)])
        for slot in range(size):
            blocks = int(rng.expovariate(0.1)) if rng.random() < 0.8 else rng.randrange(10_000)
            load.add(slot, (16, False), b"", private_blocks=blocks)
        costs = load.score(ScoreInputs(BlockFormat(16, False), b"", 16), None, None).costs()
        temperature = rng.choice((0.05, 0.3, 1.0, 5.0))
        reached, drawn = 0.0, probabilities(costs.values, temperature)
        for index, p in enumerate(drawn):
            if p > 1e-6:
                assert costs.draw(temperature, reached + p / 2) == index, (costs.values, temperature)
            reached += p
