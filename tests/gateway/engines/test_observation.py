"""What was seen of the workers."""

import pytest

from kvscout_common.worker import WorkerRank
from kvscout_gateway.engines.observation import Observations, Reports, computes_a_block, predicted_cached_tokens

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


def report(
    observations: Observations, cached: int | None, predicted: int | None = None, worker: WorkerRank = RANK
) -> None:
    observations.reported("default", worker, isl_tokens=100, cached=cached, predicted=predicted)


def test_predictions_are_checked_only_where_there_was_one() -> None:
    observations = Observations(lambda tenant, worker_id: "m")
    report(observations, 32, 32)
    report(observations, 32, 48)
    report(observations, 86, None)
    seen = observations.of("default", RANK).reports
    assert (seen.checked, seen.mispredicted, seen.prediction_error_tokens) == (2, 1, 16)
    assert seen.hit_rate == 0.5
    assert observations.total == seen


def test_a_total_miss_that_is_left_out_counts_once_the_engine_reports_at_all_also_before() -> None:
    observations = Observations(lambda tenant, worker_id: "m")
    for _ in range(4):
        report(observations, None, 16)
    assert observations.total == Reports()
    for cached in (80, None, 80, None, 80, 80):
        report(observations, cached, cached)
    assert observations.total.hit_rate == 0.32
    assert observations.total == Reports(1000, 320, 8, 4, predicted_tokens=384, prediction_error_tokens=64)
    assert observations.of("default", RANK).reports == observations.total


def test_what_an_engine_never_says_is_unknown() -> None:
    observations = Observations(lambda tenant, worker_id: "m")
    for _ in range(9):
        report(observations, None, 0)
    report(observations, 50, None, WorkerRank("other", 0))
    assert observations.total.hit_rate == 0.5
    assert observations.of("default", RANK).reports == Reports()


def test_what_is_unknown_counts_in_no_hit_rate_and_a_sum_over_workers_counts_nothing_twice() -> None:
    observations = Observations(lambda tenant, worker_id: "m")
    report(observations, None)
    report(observations, 0, worker=WorkerRank("misses", 0))
    report(observations, 50, worker=WorkerRank("hits", 0))
    families = {family.name: family.samples for family in observations.collect()}
    silent = RANK.worker_id
    expected = {"prompt": {"hits": 100, silent: 0, "misses": 100}, "cached": {"hits": 50, silent: 0, "misses": 0}}
    for what, values in expected.items():
        samples = families[f"kvscout_reported_{what}_tokens"]
        assert {sample.labels["worker"]: sample.value for sample in samples} == values
        assert {sample.labels["model"] for sample in samples} == {"m"}


def test_an_engine_that_reports_a_zero_reports() -> None:
    observations = Observations(lambda tenant, worker_id: "m")
    report(observations, None)
    report(observations, 0)
    report(observations, None)
    assert observations.total.prompt_tokens == 300


def test_what_one_rank_reports_its_engine_does() -> None:
    observations = Observations(lambda tenant, worker_id: "m")
    report(observations, None, worker=WorkerRank("a", 1))
    report(observations, 90)
    assert observations.total.hit_rate == 0.45
    report(observations, None, worker=WorkerRank("a", 1))
    assert observations.of("default", WorkerRank("a", 1)).reports.prompt_tokens == 200


def test_another_engine_of_the_same_name_has_to_show_anew_what_it_reports() -> None:
    observations = Observations(lambda tenant, worker_id: "m")
    report(observations, 50)
    observations.forget("default", "a")
    report(observations, None)
    assert observations.of("default", RANK).reports == Reports()


def test_reports_of_workers_that_are_gone_count_in_the_total_alone() -> None:
    observations = Observations(lambda tenant, worker_id: "")
    report(observations, None)
    report(observations, 50)
    assert observations.total == Reports(100, 50)
    assert not observations.by_rank


def test_workers_that_are_gone_are_forgotten_and_stay_so() -> None:
    registered = {"a"}
    observations = Observations(lambda tenant, worker_id: "m" if worker_id in registered else "")
    seen = observations.of("default", RANK)
    assert observations.of("default", RANK) is seen
    registered.clear()
    observations.forget("default", "a")
    observations.of("default", RANK).failures += 1  # of a request that was still running
    assert not observations.by_rank
