"""Pieces of a text, tokenized alone, give the tokens of the whole: with real tokenizers of every build."""

from __future__ import annotations

from array import array
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trained_tokenizers import BUILDS, MARKS
from tokenizers import Tokenizer

from kvscout_gateway.tokens import token_boundaries
from kvscout_gateway.tokens.token_boundaries import AddedToken, TokenBoundaries
from kvscout_gateway.tokens.tokenizer import LocalTokenizer


@cache
def tokenizer_of(build: str) -> LocalTokenizer:
    return LocalTokenizer(BUILDS[build]())


WORDS = ["The quick brown fox", " ", "  ", "\n", "\n\n", "a", "stop", "xstop", "über", "1234", "▁", "é", "é", "日本"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*MARKS, "<mask>", "<tool>", "<|im_", "<|", "|>", "[INST"]),
        st.sampled_from(WORDS),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("build", BUILDS)
@settings(max_examples=150)
@given(text=TEXTS)
def test_pieces_tokenized_alone_are_the_tokens_of_the_whole(build: str, text: str) -> None:
    tokenizer = tokenizer_of(build)
    at_every_boundary = TokenBoundaries(tokenizer.added)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_boundaries, "MIN_CHUNK_CHARACTERS", 1)
        chunks = at_every_boundary.cut(text)
    assert "".join(chunks) == text
    [whole] = tokenizer.encode([text])
    assert b"".join(tokenizer.encode(chunks)) == whole


@pytest.mark.parametrize("build", BUILDS)
@settings(max_examples=60)
@given(text=TEXTS)
def test_the_frame_around_the_pieces_is_what_the_tokenizer_adds(build: str, text: str) -> None:
    tokenizer = tokenizer_of(build)
    [bare] = tokenizer.encode([text])
    [framed] = tokenizer.encode([text], add_special_tokens=True)
    assert tokenizer.frame is not None
    assert tokenizer.frame.head + bare + tokenizer.frame.tail == framed


@pytest.mark.parametrize("build", ["byte level", "metaspace, first", "unigram"])
def test_a_conversation_is_cut_and_its_next_turn_shares_all_pieces_but_the_last(build: str) -> None:
    tokenizer = tokenizer_of(build)
    turn = "<|im_start|>user\n" + "The quick brown fox. " * 10 + "<|im_end|>\n"
    first, second = turn * 5 + "<|im_start|>assistant\n", turn * 5 + "<|im_start|>assistant\nyes<|im_end|>\n" + turn
    one, two = tokenizer.token_boundaries.cut(first), tokenizer.token_boundaries.cut(second)
    assert len(one) > 5
    assert two[: len(one) - 1] == one[:-1]


def test_pieces_have_a_length_that_is_worth_keeping() -> None:
    cut = TokenBoundaries([AddedToken("<x>")]).cut("<x>" * 1000)
    assert {len(chunk) >= token_boundaries.MIN_CHUNK_CHARACTERS for chunk in cut[:-1]} == {True}


def test_a_text_without_a_seam_is_one_piece_and_an_empty_one_none() -> None:
    assert TokenBoundaries([AddedToken("<x>")]).cut("y" * 500) == ["y" * 500]
    assert TokenBoundaries([]).cut("y") == ["y"]
    assert TokenBoundaries([]).cut("") == TokenBoundaries([AddedToken("<x>")]).cut("") == []


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<x>", lstrip=True),
        AddedToken("<x>", normalized=True),
        AddedToken("<x>", single_word=True),
        AddedToken("\n<x>"),
        AddedToken(""),
    ],
)
def test_a_token_whose_left_side_matters_is_no_seam(token: AddedToken) -> None:
    text = "y" * 100 + token.content + "y" * 100
    assert TokenBoundaries([token]).cut(text) == [text]


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(ValueError, match="no text"):
        tokenizer_of("byte level").encode(["a\ud800b"])


def test_a_tokenizer_that_truncates_and_pads_does_neither_here() -> None:
    tokenizer = Tokenizer.from_str(BUILDS["byte level"]().to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    [tokens] = LocalTokenizer(tokenizer).encode(["The quick brown fox"])
    expected = BUILDS["byte level"]().encode("The quick brown fox").ids
    assert array("I", tokens).tolist() == expected
