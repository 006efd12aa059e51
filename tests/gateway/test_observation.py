"""What was seen of the workers."""

import pytest

from kvscout_common.worker import WorkerRank
from kvscout_gateway.observation import Observations, computes_a_block, predicted_cached_tokens

RANK = WorkerRank("a", 0)


@pytest.mark.parametrize(
    ("overlap", "isl", "block_size", "cached"),
    [(0, 100, 16, 0), (6, 100, 16, 96), (6, 96, 16, 80), (6, 97, 16, 96), (2, 96, 16, 32), (1, 0, 16, 0), (1, 5, 0, 0)],
)
def test_an_engine_recomputes_the_last_token(overlap: int, isl: int, block_size: int, cached: int) -> None:
    assert predicted_cached_tokens(overlap, isl, block_size) == cached


@pytest.mark.parametrize(
    ("isl", "cached", "block_size", "computes"),
    [(100, 0, 16, True), (100, 80, 16, True), (100, 96, 16, False), (96, 80, 16, False), (96, 64, 16, True),
     (15, 0, 16, False), (16, 0, 16, False), (17, 0, 16, True), (100, 0, 0, False)],
)  # fmt: skip
def test_what_is_only_recomputed_is_not_new(isl: int, cached: int, block_size: int, computes: bool) -> None:
    assert computes_a_block(isl, cached, block_size) is computes


def test_predictions_are_checked_only_where_there_was_one() -> None:
    observations = Observations(lambda tenant, worker_id: True)
    seen = observations.of("default", RANK)
    observations.reported(seen, isl_tokens=100, cached=32, predicted=32)
    observations.reported(seen, isl_tokens=100, cached=32, predicted=48)
    observations.reported(seen, isl_tokens=100, cached=86, predicted=None)
    assert (seen.checked, seen.mispredicted, seen.prediction_error_tokens) == (2, 1, 16)
    assert seen.hit_rate == 0.5
    assert observations.total == seen


def test_workers_that_are_gone_are_forgotten_and_stay_so() -> None:
    registered = {"a"}
    observations = Observations(lambda tenant, worker_id: worker_id in registered)
    seen = observations.of("default", RANK)
    assert observations.of("default", RANK) is seen
    registered.clear()
    observations.forget("default", "a")
    observations.of("default", RANK).failures += 1  # of a request that was still running
    assert not observations.by_rank
