"""The arithmetic of reports, on numbers small enough to check by hand."""

from __future__ import annotations

import pytest

from kvscout_common.worker import WorkerRank
from kvscout_lab.real_time.record import Replay, RequestRecord
from kvscout_lab.real_time.summary import comparison, errors_by_text, improvements, summarise
from kvscout_lab.statistics import percentile, variation

A, B, IDLE = WorkerRank("a", 0), WorkerRank("b", 0), WorkerRank("c", 0)


def served(
    worker: WorkerRank, *, first: float, cached: int | None, gaps: tuple[float, ...] = (), output: int = 1
) -> RequestRecord:
    return RequestRecord(
        session_id="s",
        turn=0,
        scheduled=1.0,
        sent=1.5,
        finished=9.0,
        prompt_tokens=100,
        first_token=first,
        gaps_seconds=gaps,
        output_tokens=output,
        cached_tokens=cached,
        worker=worker,
    )


FAILED = RequestRecord("s", 1, 2.0, 2.0, 3.0, 100, error="Unavailable: gone")


def test_hit_rate_is_cached_over_prompt_tokens_of_served_requests() -> None:
    records = (served(A, first=2, cached=80), served(B, first=2, cached=0), FAILED)
    summary = summarise(Replay(records, 3, 10.0), [A, B])
    assert summary.token_hit_rate == pytest.approx(0.4)
    assert (summary.requests, summary.errors, summary.abandoned_turns) == (3, 1, 3)
    assert summary.requests_per_second == pytest.approx(0.2)


def test_workers_that_never_reported_cached_tokens_are_left_out_of_the_hit_rate_and_counted() -> None:
    summary = summarise(Replay((served(A, first=2, cached=50), served(B, first=2, cached=None)), 0, 1.0), [A, B])
    assert summary.token_hit_rate == pytest.approx(0.5)
    assert summary.unreported == 1


def test_a_worker_that_leaves_its_misses_out_had_them_all_the_same() -> None:
    records = (served(A, first=2, cached=None), served(A, first=2, cached=80))
    summary = summarise(Replay(records, 0, 1.0), [A])
    assert summary.token_hit_rate == pytest.approx(0.4)
    assert summary.unreported == 0


def test_ttft_counts_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    summary = summarise(Replay((served(A, first=2.0, cached=0), served(A, first=4.0, cached=0)), 0, 1.0), [A])
    assert summary.ttft_mean_seconds == pytest.approx(2.0)
    assert summary.ttft_p50_seconds == pytest.approx(2.0)
    assert summary.send_lag_p99_seconds == pytest.approx(0.5)


def test_itl_mean_counts_tokens_and_p99_counts_messages() -> None:
    # Three messages: 1, 1 and 3 tokens; four intervals between tokens in 0.6 s.
    summary = summarise(Replay((served(A, first=2, cached=0, gaps=(0.2, 0.4), output=5),), 0, 1.0), [A])
    assert summary.itl_mean_seconds == pytest.approx(0.15)
    assert summary.itl_p99_seconds == pytest.approx(0.398)


def test_balance_counts_idle_workers() -> None:
    records = (served(A, first=2, cached=0, output=10), served(B, first=2, cached=100, output=10))
    summary = summarise(Replay(records, 0, 1.0), [A, B, IDLE])
    assert summary.request_balance == pytest.approx(2**-0.5)
    assert summary.compute_balance == pytest.approx(variation([110, 10, 0]))


def test_a_run_without_answers_has_no_statistics_rather_than_zeros() -> None:
    summary = summarise(Replay((FAILED,), 0, 1.0), [A])
    assert summary.token_hit_rate is None
    assert summary.ttft_p99_seconds is None
    assert summary.request_balance is None


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0], 100) == 2.0


def test_improvement_is_above_one_when_the_candidate_is_better_whichever_direction_that_is() -> None:
    slow = summarise(Replay((served(A, first=3, cached=20),), 0, 1.0), [A])
    fast = summarise(Replay((served(A, first=2, cached=80),), 0, 1.0), [A])
    factors = improvements(slow, fast)
    assert factors["token_hit_rate"] == pytest.approx(4)
    assert factors["ttft_mean_seconds"] == pytest.approx(2)
    verdicts = {row.label: row.verdict for row in comparison(slow, fast)}
    assert verdicts["token hit rate"] == "4.00× better"
    assert verdicts["requests"] == ""
    assert {row.label: row.verdict for row in comparison(fast, slow)}["TTFT mean"] == "2.00× worse"


def test_irregularities_show_only_where_there_are_any() -> None:
    clean = summarise(Replay((served(A, first=2, cached=0),), 0, 1.0), [A])
    broken = summarise(Replay((FAILED,), 4, 1.0), [A])
    assert not any("abandoned" in row.label for row in comparison(clean, clean))
    assert ("turns abandoned after an error", "0", "4", "") in comparison(clean, broken)


def test_errors_are_counted_by_text() -> None:
    assert errors_by_text([FAILED, FAILED, served(A, first=2, cached=0)]) == [("Unavailable: gone", 2)]
