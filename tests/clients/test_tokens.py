"""The forms in which prompts are accepted."""

from __future__ import annotations

from array import array

import pytest

from kvscout_client.tokens import token_list
from kvscout_common.errors import InvalidArgument

IDS = [0, 1, 70_000, 2**32 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        array("I", IDS),
        array("q", IDS),
        memoryview(array("L", IDS)),
        b"".join(token.to_bytes(4, "little") for token in IDS),
        bytearray(b"".join(token.to_bytes(4, "little") for token in IDS)),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_form_gives_the_same_ids(tokens: object) -> None:
    assert list(token_list(tokens)) == IDS


def test_other_sequences_are_taken_as_they_are() -> None:
    assert list(token_list(range(3))) == [0, 1, 2]


@pytest.mark.parametrize(
    "tokens", ["1 2 3", b"12345", array("d", [1.0]), 7, {1, 2}, memoryview(b"1234").cast("B", (2, 2))]
)
def test_what_is_no_list_of_ids_is_refused_by_name(tokens: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        token_list(tokens)
    assert caught.value.field == "token_ids"
