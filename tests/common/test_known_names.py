"""Known names in errors about one that is not: helpful, and bounded whatever it is compared with."""

from __future__ import annotations

import pytest

from kvscout_common.known_names import MAX_LISTED, nearest, or_known


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("mok-model", ["mock-model", "llama"], "; did you mean 'mock-model'? Known: llama, mock-model"),
        ("LLAMA", ["llama"], "; did you mean 'llama'? Known: llama"),
        ("x", ["llama"], "; known: llama"),
        ("x", [], "; there are none"),
        (
            "w1x",
            (f"w{number}" for number in range(12)),
            "; did you mean 'w1'? Known: w0, w1, w10, w11, w2, w3, w4, w5 and 4 more",
        ),
    ],
)
def test_the_nearest_is_proposed_and_the_first_are_listed(name: str, known: list[str], expected: str) -> None:
    assert or_known(name, known) == expected


def test_names_of_any_number_and_length_make_a_short_text() -> None:
    text = or_known("m" * 100_000, ("m" * 1_000 + str(number) for number in range(5_000)))
    assert len(text) < 100 * (MAX_LISTED + 1)
    assert nearest("m" * 100_000, ["m" * 99_999]) == ""


def test_a_name_cannot_move_the_cursor() -> None:
    assert "\x1b" not in or_known("a\x1b", ["a\x1b[2J"])
