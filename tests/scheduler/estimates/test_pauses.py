"""Pauses between turns."""

from __future__ import annotations

from random import Random

import pytest
from support.seeds import test_seed

from kvscout_scheduler.estimates import pauses as module
from kvscout_scheduler.estimates.pauses import BELIEVED, ENDS, STAGES, PauseClass, Pauses


def test_nothing_is_known_at_first_and_who_is_away_for_long_does_not_come_back() -> None:
    nothing = PauseClass()
    assert nothing.soon(0.0) == nothing.soon(-1.0) == pytest.approx(BELIEVED)
    assert 0.0 < nothing.soon(20.0) < BELIEVED
    assert nothing.soon(ENDS[-1]) == nothing.soon(1e9) == 0.0


def test_hazards_are_those_of_the_pauses_that_were_seen() -> None:
    rng = Random(test_seed())
    learned = PauseClass()
    for _ in range(2_000):
        learned.add(0, came=rng.random() < 0.2)
        learned.add(2, came=rng.random() < 0.7)
    assert learned.hazard(0) == pytest.approx(0.2, abs=0.12)
    assert learned.hazard(2) == pytest.approx(0.7, abs=0.12)
    assert learned.hazard(4) == BELIEVED
    # A stage of a factor of four has 1.39 factors of e.
    assert learned.soon(5.0) == pytest.approx(1 - (1 - learned.hazard(2)) ** (1 / 1.386), rel=1e-3)


def test_a_session_begins_with_what_its_class_does_and_grows_apart() -> None:
    pauses = Pauses()
    for _ in range(300):
        pauses.of("tools").add(1, came=True)
        pauses.of("chat").add(1, came=False)
    mine = PauseClass(pauses.of("tools"))
    assert mine.hazard(1) == pauses.of("tools").hazard(1) > 0.9
    assert pauses.of("chat").hazard(1) < 0.2
    assert 0.1 < pauses.of("new").hazard(1) < 0.9, "as all together"
    for _ in range(60):
        mine.add(1, came=False)
    assert mine.hazard(1) < 0.3


def test_classes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLASSES", 2)
    pauses = Pauses()
    kept = pauses.of("a")
    pauses.of("b")
    assert pauses.of("a") is kept
    pauses.of("c")
    assert pauses.of("a") is kept
    assert len(pauses._classes) == 2


def test_stages_are_in_order_without_gaps() -> None:
    assert STAGES[0] == 0.0
    assert ENDS[:-1] == STAGES[1:]
    assert all(begin < end for begin, end in zip(STAGES, ENDS, strict=True))
