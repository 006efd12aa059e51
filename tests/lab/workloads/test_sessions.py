"""The multi-turn generator: repeatable, shaped as documented."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from kvscout_common.errors import ConfigError
from kvscout_lab.workloads.sessions import LogNormal, MultiTurn, Range, multi_turn


def test_same_seed_gives_the_same_sessions_and_another_seed_others() -> None:
    parameters = MultiTurn(sessions=5, seed=7)
    assert list(multi_turn(parameters)) == list(multi_turn(parameters))
    assert list(multi_turn(parameters)) != list(multi_turn(replace(parameters, seed=8)))


def test_more_sessions_continue_the_same_sequence() -> None:
    assert list(multi_turn(MultiTurn(sessions=8)))[:3] == list(multi_turn(MultiTurn(sessions=3)))


def test_lengths_stay_in_their_ranges() -> None:
    parameters = MultiTurn(sessions=40, system_prompt_tokens=Range(100, 120))
    for session in multi_turn(parameters):
        first, *later = session.turns
        assert 3 <= len(session.turns) <= 8
        assert 100 + 256 <= len(first.new_tokens) <= 120 + 6144
        assert first.think_seconds == 0
        assert all(48 <= len(turn.new_tokens) <= 384 for turn in later)
        assert all(16 <= turn.max_tokens <= 32 for turn in session.turns)
        assert all(0 <= turn.think_seconds <= 4 * parameters.think_seconds for turn in later)
        assert max(first.new_tokens) < parameters.vocab_size


def test_first_messages_have_their_median_and_a_long_tail() -> None:
    parameters = MultiTurn(sessions=400, system_prompt_tokens=Range(0, 0), turns=Range(1, 1))
    lengths = sorted(len(session.turns[0].new_tokens) for session in multi_turn(parameters))
    assert statistics.median(lengths) == pytest.approx(2048, rel=0.15)
    assert statistics.fmean(lengths) > 1.1 * statistics.median(lengths)


def test_sessions_of_one_app_share_its_system_prompt_and_nothing_more() -> None:
    parameters = MultiTurn(sessions=30, apps=3, system_prompt_tokens=Range(64, 64))
    prompts = [session.turns[0].new_tokens for session in multi_turn(parameters)]
    assert len({bytes(prompt[:64]) for prompt in prompts}) == 3
    assert len({bytes(prompt[64:128]) for prompt in prompts}) == 30


def test_popular_apps_get_more_sessions_unless_the_skew_is_zero() -> None:
    def shares(skew: float) -> list[int]:
        parameters = MultiTurn(
            sessions=600,
            apps=4,
            app_skew=skew,
            turns=Range(1, 1),
            first_message_tokens=LogNormal(1, 0, 1, 1),
            system_prompt_tokens=Range(16, 16),
        )
        apps = [bytes(session.turns[0].new_tokens[:16]) for session in multi_turn(parameters)]
        return sorted((apps.count(app) for app in set(apps)), reverse=True)

    skewed, even = shares(1.0), shares(0.0)
    assert skewed[0] > 2.5 * skewed[-1]
    assert even[0] < 1.6 * even[-1]


def test_arrivals_are_ordered_with_exponential_gaps_of_the_asked_rate() -> None:
    starts = [s.start_seconds for s in multi_turn(MultiTurn(sessions=500, sessions_per_second=4, turns=Range(1, 1)))]
    gaps = [after - before for before, after in pairwise(starts)]
    assert starts == sorted(starts)
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.15)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.25)


def test_no_think_time_means_none() -> None:
    (session,) = multi_turn(MultiTurn(sessions=1, think_seconds=0))
    assert all(turn.think_seconds == 0 for turn in session.turns)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sessions", 0),
        ("apps", 0),
        ("sessions_per_second", 0.0),
        ("sessions_per_second", float("nan")),
        ("think_seconds", -1.0),
        ("app_skew", float("inf")),
        ("vocab_size", 70_000),
        ("turns", Range(0, 3)),
        ("turns", Range(4, 3)),
        ("output_tokens", Range(0, 1)),
        ("first_message_tokens", LogNormal(100, 1, 200, 300)),
        ("first_message_tokens", LogNormal(100, -1, 1, 300)),
    ],
)
def test_a_parameter_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        list(multi_turn(replace(MultiTurn(), **{field: value})))  # type: ignore[arg-type]
    assert caught.value.field == field
