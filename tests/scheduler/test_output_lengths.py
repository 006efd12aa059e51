"""Lengths of outputs: an answer that is given again is that of what is known now."""

from __future__ import annotations

from kvscout_scheduler.output_lengths import LAST, STAGES, WIDTHS, OutputLengths


def test_an_output_changes_what_is_expected_of_the_next_one() -> None:
    lengths = OutputLengths()
    before = lengths.expected("chat", 7, 0, 0)
    assert lengths.expected("chat", 7, 0, 0) == before
    lengths.add("chat", 7, 0, 0, 5_000)
    after = lengths.expected("chat", 7, 0, 0)
    assert sum(after) > 2 * sum(before)
    assert lengths.expected("chat", 7, 100, 0) != after
    assert lengths.expected("chat", 7, 0, 0) == after


def test_widths_are_those_between_the_beginnings_of_stages() -> None:
    assert tuple(end - begin for begin, end in zip(STAGES, (*STAGES[1:], LAST), strict=True)) == WIDTHS
