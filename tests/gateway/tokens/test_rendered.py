"""Answers of servers that tokenize are read as far as they make sense."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from kvscout_common.errors import Unavailable
from kvscout_common.hashing import MmItem
from kvscout_gateway.tokens.rendered import MAX_FEATURE_VALUES, Rendered, read_rendered, read_tokenized

TOKENS = [5, 6, 7, 8]


def page(**features: Any) -> bytes:
    return json.dumps({"request_id": "r", "token_ids": TOKENS, "features": features or None}).encode()


def one(name: Any = "ab", offset: Any = 1, length: Any = 2) -> dict[str, Any]:
    return {"mm_hashes": {"image": [name]}, "mm_placeholders": {"image": [{"offset": offset, "length": length}]}}


def test_tokens_and_items_are_read_from_one_answer_or_a_list_of_one() -> None:
    assert read_tokenized(b'{"count": 2, "tokens": [5, 6]}') == Rendered(array("I", [5, 6]).tobytes())
    ids = array("I", TOKENS).tobytes()
    assert read_rendered(page()) == Rendered(ids)
    assert read_rendered(page(**one())) == Rendered(ids, (MmItem("ab", 1, 2),))
    assert read_rendered(b" [" + page() + b"] ") == Rendered(ids)


def test_what_was_packed_for_a_cache_is_the_same_again() -> None:
    for items in ((), (MmItem("ä", 0, 1), MmItem("b", 2, 2))):
        rendered = Rendered(array("I", TOKENS).tobytes(), items)
        assert Rendered.unpacked(rendered.packed()) == rendered


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 9999,
        b'{"token_ids": []}',
        b'{"token_ids": 5}',
        b'{"token_ids": [-1]}',
        b'{"token_ids": ["a"]}',
        b'{"token_ids": [[1]]}',
        b"[" + page() + b"," + page() + b"]",
        page(mm_hashes={}),
        page(mm_hashes=3, mm_placeholders=4),
        page(mm_hashes={"image": ["a"]}, mm_placeholders={}),
        page(mm_hashes={"image": ["a", "b"]}, mm_placeholders={"image": [{"offset": 0, "length": 1}]}),
        page(**one(name=3)),
        page(**one(name="")),
        page(**one(name="x" * 2000)),
        page(**one(offset=-1)),
        page(**one(offset=True)),
        page(**one(offset=3)),
        page(**one(length=0)),
        page(**one(length=2**70)),
        page(mm_hashes={"image": ["a"] * (MAX_FEATURE_VALUES + 1)}, mm_placeholders={}),
    ],
)
def test_an_answer_without_tokens_or_with_items_that_are_not_in_them_is_none(answer: bytes) -> None:
    with pytest.raises(Unavailable):
        read_rendered(answer)
