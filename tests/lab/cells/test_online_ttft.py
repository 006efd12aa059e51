"""The regression that learns TTFT while it routes."""

from __future__ import annotations

from random import Random

import pytest
from support.laboratory_worlds import ENGINE, mixed
from support.seeds import test_seed

from kvscout_lab.cells.cells import Contender, Experiment
from kvscout_lab.cells.lab_policies import lab_policies
from kvscout_lab.cells.online_ttft import Regression
from kvscout_lab.simulation.cluster import Cluster


def test_a_linear_ttft_is_learned_from_some_hundred_requests() -> None:
    rng, regression = Random(test_seed()), Regression()
    true = (0.05, 0.3, 0.8, 0.02, 0.01)

    def example() -> tuple[list[float], float]:
        features = [1.0, rng.random() * 8, rng.random() * 3, rng.random(), rng.random()]
        return features, sum(weight * feature for weight, feature in zip(true, features, strict=True))

    for _ in range(400):
        regression.learn(*example())
    for _ in range(20):
        features, seconds = example()
        assert regression.predict(features) == pytest.approx(seconds, rel=0.05)


def test_a_prediction_is_never_below_a_millisecond() -> None:
    assert Regression().predict([0.0, 0.0, 0.0, 0.0, 0.0]) == 1e-3


def test_it_learns_which_worker_is_slow() -> None:
    cluster = Cluster(workers=3, engine=ENGINE, speeds=(0.1,))
    experiment = Experiment(mixed(test_seed(), 300), cluster)
    online, blind = (
        experiment.run(Contender.parse(name, lab_policies()).settings, 15.0) for name in ("online-ttft", "round-robin")
    )
    assert online.ttft.mean < blind.ttft.mean
