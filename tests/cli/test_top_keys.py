"""Keys of `kvscout top`: what a terminal sends, and the view after it."""

from __future__ import annotations

import pytest

from kvscout_cli.top_keys import MAX_FILTER_CHARACTERS, SORTS, View, keys, pressed
from kvscout_common.doctor.snapshot import RankName

A, B, C = (RankName("t", name, 0) for name in "abc")


def after(text: str, view: View | None = None) -> View:
    view = view or View()
    for key in keys(text):
        view = pressed(view, key, [A, B, C])
    return view


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q", ["q"]),
        ("\x03", ["q"]),
        ("\x1b[A\x1b[Bj", ["up", "down", "j"]),
        ("\x1bOA\r\x7f", ["up", "enter", "backspace"]),
        ("\x1b", ["escape"]),
        ("\x1b[15~\x1b[1;5Dé", ["é"]),
    ],
)
def test_a_terminals_sequences_are_keys_and_those_of_other_keys_are_left_out(text: str, expected: list[str]) -> None:
    assert list(keys(text)) == expected


def test_arrows_select_a_worker_and_stop_at_the_ends() -> None:
    assert after("\x1b[B").selected == A
    assert after("\x1b[A").selected == C
    assert after("jj").selected == B
    assert after("jjjjjjk").selected == B


def test_enter_opens_the_selected_worker_or_the_first_and_escape_goes_back() -> None:
    assert after("\r") == View(selected=A, is_opened=True)
    assert after("jj\r") == View(selected=B, is_opened=True)
    assert after("jj\r\x1b") == View(selected=B)
    assert pressed(View(), "enter", []) == View()


def test_a_slash_begins_a_filter_whose_letters_are_no_commands() -> None:
    assert after("/qs?") == View(filter="qs?", is_typing=True)
    assert after("/abd\x7fc\r") == View(filter="abc")
    assert after("/abc\x1b") == View()
    assert after("/abc\r\x1b") == View()
    assert len(after("/" + 1_000 * "x").filter) == MAX_FILTER_CHARACTERS


def test_s_goes_through_all_columns_and_begins_again() -> None:
    seen = [after("s" * times).sort for times in range(len(SORTS) + 1)]
    assert seen == [*SORTS, SORTS[0]]


def test_any_key_leaves_the_help_and_q_quits() -> None:
    assert after("?").is_help
    assert after("?x") == View()
    assert after("q").is_over
    assert after("?q").is_over
