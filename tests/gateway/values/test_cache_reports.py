"""When cached tokens make a rank suspect of having emptied its cache."""

import random

from kvscout_common.worker import WorkerRank
from kvscout_gateway.values.cache_reports import HASH_BYTES, LATEST, PROVEN, SUSPECT, CacheReports, Miss, RankReports

KEY = ("default", WorkerRank("w", 0))


class Rank:
    """Reports of one rank."""

    def __init__(self, *, proven: bool = True) -> None:
        self.caches = CacheReports()
        for _ in range(PROVEN * proven):
            self.report(8, 8)

    def report(self, predicted: int, cached: int, *, confirmed: bool = True, sent_at: float = 0.0) -> None:
        miss = Miss(bytes(predicted * HASH_BYTES), 0, 16, eagle=False)
        self.caches.add(KEY, predicted=miss, confirmed=confirmed, reported_blocks=cached, sent_at=sent_at)

    @property
    def reports(self) -> RankReports:
        reports = self.caches.get(KEY)
        assert reports is not None
        return reports


def test_misses_in_excess_of_hits_make_a_rank_suspect_and_the_last_hit_says_since_when() -> None:
    rank = Rank()
    rank.report(8, 8, sent_at=99.0)
    for number in range(SUSPECT + 2):
        assert not rank.reports.is_suspect
        rank.report(8, 0 if number not in (2,) else 8, sent_at=100.0 + number)
    assert rank.reports.is_suspect
    assert rank.reports.intact_at == 99.0
    assert len(rank.reports.misses) == SUSPECT
    assert rank.reports.misses[0].cached_blocks == 0


def test_hits_end_a_suspicion_that_has_only_begun() -> None:
    rank = Rank()
    for _ in range(100):
        rank.report(8, 0)
        rank.report(8, 8)
    assert not rank.reports.is_suspect
    assert not rank.reports.misses


def test_what_was_never_right_is_not_judged() -> None:
    rank = Rank(proven=False)
    for _ in range(50):
        rank.report(8, 0)
    assert not rank.reports.is_suspect


def test_few_blocks_unconfirmed_ones_and_small_parts_are_no_misses() -> None:
    rank = Rank()
    for _ in range(50):
        rank.report(1, 0)
        rank.report(8, 7)
        rank.report(100, 80)
        rank.report(8, 0, confirmed=False)
        rank.report(0, 0)
    assert not rank.reports.is_suspect


def test_a_shared_system_prompt_that_is_cached_again_does_not_hide_what_is_missing() -> None:
    rank = Rank()
    for _ in range(SUSPECT):
        rank.report(100, 70)
    assert rank.reports.is_suspect


def test_one_request_in_ten_that_misses_by_itself_makes_no_false_alarm_in_ten_thousand() -> None:
    seed = 20_261_126
    print("seed", seed)
    rng = random.Random(seed)
    rank = Rank()
    for _ in range(10_000):
        rank.report(8, 0 if rng.random() < 0.1 else 8)
        assert not rank.reports.is_suspect


def test_after_a_suspicion_in_vain_a_rank_must_be_right_again_before_it_is_judged() -> None:
    rank = Rank()
    for _ in range(SUSPECT):
        rank.report(8, 0)
    rank.reports.forgive()
    for _ in range(SUSPECT):
        rank.report(8, 0)
    assert not rank.reports.is_suspect


def test_surprises_are_counted_among_the_latest_since_a_time() -> None:
    rank = Rank()
    rank.report(4, 9, sent_at=50.0)
    for number in range(LATEST - 1):
        rank.report(4, 5 if number == 0 else 4, sent_at=100.0 + number, confirmed=False)
    assert rank.reports.since(100.0) == (LATEST - 1, 1)
    assert rank.reports.since(0.0) == (LATEST, 2)
    rank.caches.forget(KEY)
    assert rank.caches.get(KEY) is None
