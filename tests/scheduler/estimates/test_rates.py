"""What is learned: lines and means that follow what happens and survive nonsense."""

from __future__ import annotations

from random import Random

import pytest
from support.seeds import test_seed

from kvscout_scheduler.estimates.rates import FEW, LEAST_SLOPE, DecayingMean, FittedLine


def test_a_line_begins_as_what_is_believed() -> None:
    line = FittedLine(0.01, 50e-6, 4_096)
    assert line.at(0) == 0.01
    assert line.at(1_000) == pytest.approx(0.06)


def test_of_a_belief_only_the_shape_counts_once_there_are_observations() -> None:
    line = FittedLine(0.01, 50e-6, 4_096)
    for _ in range(2):
        line.add(500, 0.00035)  # a hundredth of what is believed
    assert line.at(500) == pytest.approx(0.00035)
    assert line.at(4_096) == pytest.approx((0.01 + 50e-6 * 4_096) / 100)
    line.add(500, 0.00105)
    assert line.at(500) == pytest.approx(0.00035, rel=0.5)


@pytest.mark.parametrize("absurd", [0.0, 1e-9, 0.1, 10.0, 3_600.0])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_one_absurd_observation_of_the_first_leaves_a_line_within_a_factor_of_two(absurd: float, when: int) -> None:
    rng, line = Random(test_seed()), FittedLine(0.01, 50e-6, 4_096)
    for number in range(6):
        tokens = rng.randint(100, 8_000)
        believed = 0.01 + 50e-6 * tokens
        line.add(tokens, believed * (absurd if number == when else rng.uniform(0.9, 1.1)))
        for x in (0, 100, 1_000, 8_000):
            assert 0.5 <= line.at(x) / (0.01 + 50e-6 * x) <= 2.0, (number, x)


@pytest.mark.parametrize("absurd", [0.0, 0.1, 10.0])
@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("speed", [8.0, 0.2])
def test_nor_does_it_where_the_belief_is_wrong(speed: float, when: int, absurd: float) -> None:
    line = FittedLine(0.01, 50e-6, 4_096)
    for number in range(3):
        line.add(2_000, 0.11 * (absurd if number == when else 1 / speed))
    assert 0.5 <= line.at(2_000) * speed / 0.11 <= 2.0


@pytest.mark.parametrize("nonsense", [0.0, 0.02])
@pytest.mark.parametrize(("base", "slope"), [(0.01, 50e-6 / 8), (0.01 / 8, 50e-6 / 8), (0.05, 250e-6), (0.01, 250e-6)])
def test_fifty_observations_are_enough_however_wrong_the_belief_was(base: float, slope: float, nonsense: float) -> None:
    rng, line = Random(test_seed()), FittedLine(0.01, 50e-6, 4_096)
    for number in range(50):
        tokens = rng.randint(16, 8_000)
        seconds = (base + slope * tokens) * rng.uniform(0.8, 1.2)
        line.add(tokens, 0.0 if number < 50 * nonsense else seconds)
    for tokens in (2_000, 4_000, 8_000):
        assert line.at(tokens) == pytest.approx(base + slope * tokens, rel=0.25), tokens


def test_a_line_takes_another_belief_until_it_has_an_observation() -> None:
    line = FittedLine(0.01, 50e-6, 4_096)
    states = [(line.is_belief, line.is_settled)]
    line.believe(0.02, 1e-6)
    assert (line.at(0), line.slope) == (0.02, 1e-6)
    line.add(1_000, 0.021)
    states.append((line.is_belief, line.is_settled))
    before = line.at(1_000)
    line.believe(5.0, 5.0)
    assert line.at(1_000) == before
    for _ in range(FEW - 1):
        line.add(1_000, 0.021)
    states.append((line.is_belief, line.is_settled))
    assert states == [(True, False), (False, False), (False, True)]


@pytest.mark.parametrize(("base", "slope"), [(0.008, 5e-6), (0.05, 400e-6), (0.001, 50e-6)])
def test_a_line_follows_what_it_sees_however_wrong_the_belief_was(base: float, slope: float) -> None:
    rng, line = Random(test_seed()), FittedLine(0.01, 50e-6, 4_096)
    for _ in range(1_500):
        tokens = rng.randint(16, 8_000)
        line.add(tokens, (base + slope * tokens) * rng.uniform(0.8, 1.2))
    assert line.at(4_000) == pytest.approx(base + slope * 4_000, rel=0.1)
    assert line.slope == pytest.approx(slope, rel=0.1)


def test_a_line_grows_at_least_a_little_and_never_starts_below_zero() -> None:
    rng, line = Random(test_seed()), FittedLine(1.0, 1.0, 1.0)
    for _ in range(500):
        x = rng.uniform(1, 10)
        line.add(x, 20 - x)
        assert line.base > 0
        assert line.slope >= LEAST_SLOPE * 0.2
    for _ in range(2_000):
        x = rng.uniform(1, 10)
        line.add(x, x * x)
        assert line.base > 0


def test_observations_in_one_place_say_nothing_of_the_slope() -> None:
    line = FittedLine(0.0, 2.0, 10.0)
    for _ in range(5_000):
        line.add(10.0, 30.0)
    assert line.at(10.0) == pytest.approx(30.0)
    assert 0 <= line.slope <= 3.0


def test_a_line_of_zeros_stays_a_number() -> None:
    line = FittedLine(0.0, 0.0, 0.0)
    line.add(0.0, 0.5)
    line.add(0.0, 0.0)
    assert 0 < line.base <= 0.5
    assert line.slope == 0


def test_a_mean_forgets_its_belief() -> None:
    mean = DecayingMean(250.0)
    assert mean.value == 250.0
    for _ in range(2_000):
        mean.add(40.0)
    assert mean.value == pytest.approx(40.0, rel=0.01)
