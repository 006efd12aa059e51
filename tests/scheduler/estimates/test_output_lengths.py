"""How long outputs are expected to be: stages, bounds, classes, and what is left of one that has come so far."""

from __future__ import annotations

from random import Random

import pytest
from support.seeds import test_seed

from kvscout_scheduler.estimates import output_lengths
from kvscout_scheduler.estimates.output_lengths import (
    BELIEVED,
    LAST,
    MAX_CLASSES,
    PARENT_WEIGHT,
    STAGES,
    WIDTHS,
    OutputLengths,
    Stages,
    reaching,
)


def _learned(*lengths: int, output_class: str = "", lineage: int = 0, most: int = 0, times: int = 1) -> OutputLengths:
    outputs = OutputLengths()
    for _ in range(times):
        for tokens in lengths:
            outputs.add(output_class, lineage, most, 0, tokens)
    return outputs


def _total(outputs: OutputLengths, output_class: str = "", lineage: int = 0, most: int = 0, expected: int = 0) -> float:
    return sum(outputs.expected(output_class, lineage, most, expected))


def test_stages_cover_every_length_once() -> None:
    assert sum(WIDTHS) == LAST
    assert all(believed <= width for believed, width in zip(BELIEVED, WIDTHS, strict=True))
    assert OutputLengths().expected("any", 7, 0, 0) == BELIEVED


def test_a_session_has_outputs_of_its_own_and_begins_with_those_of_its_class() -> None:
    outputs = OutputLengths()
    for _ in range(50):
        outputs.add("tools", 7, 8_192, 0, 40, session=1)
        outputs.add("tools", 7, 8_192, 0, 2_000, session=2)
    short, long, new, none = (sum(outputs.expected("tools", 7, 8_192, 0, session)) for session in (1, 2, 3, 0))
    assert short < 200
    assert long > 1_500
    assert short < new == none < long


def test_sessions_take_no_room_of_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lengths, "MAX_CLASSES", 4)
    outputs = OutputLengths()
    outputs.add("tools", 7, 0, 0, 2_000)
    known = outputs.expected("tools", 7, 0, 0)
    for session in range(1, 100):
        outputs.expected("tools", 7, 0, 0, session)
    assert outputs.expected("tools", 7, 0, 0) == known != BELIEVED
    assert len(outputs) == 2 + 4


@pytest.mark.parametrize(
    ("bound", "stages"),
    [
        (1, (1.0, 0.0, 0.0, 0.0, 0.0)),
        (60, (52.0, 0.0, 0.0, 0.0, 0.0)),
        (64, (52.0, 0.0, 0.0, 0.0, 0.0)),
        (100, (52.0, 36.0, 0.0, 0.0, 0.0)),
        (300, (52.0, 85.0, 44.0, 0.0, 0.0)),
        (1_030, (52.0, 85.0, 75.0, 6.0, 0.0)),
        (4_100, (52.0, 85.0, 75.0, 35.0, 4.0)),
        (32_768, BELIEVED),
        (10**9, BELIEVED),
    ],
)
def test_a_bound_cuts_what_is_believed_and_adds_nothing(bound: int, stages: Stages) -> None:
    outputs = OutputLengths()
    assert outputs.expected("", 0, bound, 0) == stages
    assert outputs.expected("", 0, 0, bound) == stages
    assert outputs.expected("", 0, bound, 10**6) == stages
    assert outputs.expected("", 0, 10**6, bound) == stages


def test_it_never_expects_more_than_the_bound_and_grows_with_it() -> None:
    rng = Random(test_seed())
    for _ in range(200):
        # One class: whatever the bounds are that outputs of all kinds were learned under.
        outputs = OutputLengths()
        for _ in range(rng.randrange(60)):
            most = rng.choice((0, rng.randint(1, 40_000)))
            tokens = round(10 ** rng.uniform(0, 5))
            outputs.add(rng.choice("ab"), rng.randrange(3), most, 0, min(tokens, most or tokens))
        for doublings in range(16):
            before, lowest = 0.0, 2**doublings
            for bound in sorted(rng.randrange(lowest, 2 * lowest) for _ in range(8)):
                stages = outputs.expected("a", 1, bound, 0)
                assert all(0 <= tokens <= width for tokens, width in zip(stages, WIDTHS, strict=True))
                # Sums of hundreds of outputs are rounded.
                assert sum(stages) <= bound * (1 + 1e-9)
                assert sum(stages) >= before * (1 - 1e-9)
                before = sum(stages)


def test_it_learns_the_mean_tokens_of_each_stage() -> None:
    outputs = _learned(32, 2_000, times=400)
    share = PARENT_WEIGHT / (50 + PARENT_WEIGHT)
    for got, seen, believed in zip(outputs.expected("", 0, 0, 0), (48, 96, 384, 488, 0), BELIEVED, strict=True):
        # What is believed counts for the class above, and for that one above again.
        assert got == pytest.approx(seen + share * share * (believed - seen), rel=0.06)


def test_an_output_without_end_counts_no_more_than_the_last_stage() -> None:
    outputs = _learned(10**12, times=2_000)
    assert _total(outputs) <= LAST
    assert _total(outputs) == pytest.approx(LAST, rel=0.05)


def test_classes_bounds_and_lineages_are_kept_apart() -> None:
    outputs = OutputLengths()
    for _ in range(200):
        outputs.add("tools", 0, 0, 0, 20)
        outputs.add("chat", 0, 0, 0, 2_000)
        outputs.add("chat", 0, 1_000, 0, 900)
        outputs.add("chat", 5, 0, 0, 8)
    assert _total(outputs, "tools") < 100
    assert _total(outputs, "chat", most=1_023) == pytest.approx(900, rel=0.15)
    assert _total(outputs, "chat", lineage=5) < 200
    assert _total(outputs, "chat", lineage=6) == _total(outputs, "chat"), "one that is not known is as its class"
    assert 200 < _total(outputs, "chat") < 2_000


def test_bounds_within_a_factor_of_two_are_one_class() -> None:
    outputs = _learned(500, output_class="c", most=600, times=100)
    for _ in range(100):
        outputs.add("c", 0, 1_024, 0, 50)
    assert _total(outputs, "c", most=1_023) == _total(outputs, "c", most=600)
    # A bound that nobody comes to, of the same class: what is believed beyond 1,024 tokens is not cut.
    assert _total(outputs, "c", most=1_024) == pytest.approx(_total(outputs, "c", most=2_047), rel=0.01)
    assert _total(outputs, "c", most=2_047) < 100
    assert _total(outputs, "c", most=1_023) > 400
    # Of what a caller expects, too.
    for _ in range(100):
        outputs.add("d", 0, 0, 600, 10)
        outputs.add("d", 0, 0, 1_500, 800)
    assert _total(outputs, "d", expected=1_000) < 100
    assert _total(outputs, "d", expected=2_000) > 500


def test_the_less_is_known_of_a_class_the_more_the_one_above_it_counts() -> None:
    outputs = _learned(200, output_class="c", times=500)
    above, before = _total(outputs, "c"), 0.0
    assert _total(outputs, "c", lineage=9) == above
    for number in range(1, 40):
        outputs.add("c", 9, 0, 0, 60)
        here = _total(outputs, "c", lineage=9)
        if number == 4:
            # As many as the class above counts for: the middle of both.
            assert here == pytest.approx((_total(outputs, "c") + 60) / 2, rel=0.05)
        assert 60 < here < above
        assert not before or here < before
        before = here
    assert before == pytest.approx(60, rel=0.25)


def test_old_outputs_count_less_and_less() -> None:
    outputs = _learned(3_000, times=300)
    assert _total(outputs) > 2_000
    for _ in range(300):
        outputs.add("", 0, 0, 0, 30)
    assert 30 < _total(outputs) < 40


def test_those_that_were_not_used_for_longest_are_forgotten() -> None:
    outputs = _learned(2_000, output_class="old", times=200)
    for _ in range(200):
        outputs.add("kept", 0, 0, 0, 2_000)
    for number in range(MAX_CLASSES + 5):
        outputs.add(f"c{number}", 0, 0, 0, 10)
        outputs.expected("kept", 0, 0, 0)
        assert len(outputs) <= MAX_CLASSES
    assert len(outputs) == MAX_CLASSES
    assert _total(outputs, "kept") > 1_500
    assert _total(outputs, "old") < 100
    for number in range(10):
        outputs.expected("x" * number, number, number, number)
    assert len(outputs) == MAX_CLASSES


def test_what_was_asked_a_moment_ago_is_no_older_than_the_last_output() -> None:
    outputs = _learned(100)
    before = outputs.expected("c", 3, 500, 0)
    assert outputs.expected("c", 3, 500, 0) == before
    outputs.add("c", 3, 500, 0, 7)
    assert sum(outputs.expected("c", 3, 500, 0)) < sum(before)
    # Neither a class nor a bound is another's.
    assert sum(outputs.expected("c", 3, 5, 0)) <= 5


def test_each_stage_is_gone_through_by_as_many_as_come_so_far() -> None:
    # Half end after 32 tokens, half after 256: 32 of 64 and all of it, then all or none of the second stage.
    stages = (48.0, 96.0, 0.0, 0.0, 0.0)
    assert reaching(stages) == pytest.approx((0.75, 0.5, 0.0, 0.0, 0.0))
    # Of those that came into the second, all go through it.
    assert reaching(stages, 1) == pytest.approx((1.0, 1.0, 0.0, 0.0, 0.0))
    assert reaching(BELIEVED) == pytest.approx(tuple(a / b for a, b in zip(BELIEVED, WIDTHS, strict=True)))


def test_an_output_that_is_longer_than_any_was_may_end_at_any_time() -> None:
    stages = (64.0, 100.0, 0.0, 0.0, 0.0)
    for stage in (2, 3, 4):
        after = reaching(stages, stage)
        assert all(share == (1.0 if number < stage else 0.0) for number, share in enumerate(after)), stage


def test_shares_are_shares_whatever_is_expected() -> None:
    rng = Random(test_seed())
    for _ in range(1_000):
        stages = OutputLengths().expected("", 0, rng.choice((0, rng.randint(1, 50_000))), 0)
        if rng.random() < 0.5:
            first, second, third, fourth, last = (rng.choice((0.0, rng.random())) * width for width in WIDTHS)
            stages = (first, second, third, fourth, last)
        for stage in range(len(STAGES)):
            assert all(0.0 <= share <= 1.0 for share in reaching(stages, stage))
