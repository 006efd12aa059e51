"""What is read of answers: few fields, whatever else is in them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvscout_common.http.json_fields import INLINE_BYTES
from kvscout_common.http.json_scan import MAX_VALUES
from kvscout_gateway.engines.answer import MAX_WORDS_BYTES, answer_read, words_read

USAGE = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}


@pytest.mark.parametrize("besides", [{}, {"choices": [{"text": "x" * INLINE_BYTES}]}, {"choices": [[]] * 200_000}])
async def test_accounts_errors_and_handovers_are_read_and_nothing_else(besides: dict[str, Any]) -> None:
    concerns_us = {"usage": USAGE, "meta_info": {"id": 1}, "kv_transfer_params": {"a": [1, 2]}, "error": None}
    assert await answer_read(json.dumps(besides | concerns_us).encode()) == concerns_us
    assert (await answer_read(json.dumps(besides | {"error": {"code": 400}}).encode()))["error"] == {"code": 400}


async def test_what_engines_write_beyond_json_hides_no_account() -> None:
    assert (await answer_read(b'{"logprobs":[NaN,-Infinity,"\\ud800"],"usage":{"prompt_tokens":1}}'))["usage"]


@pytest.mark.parametrize(
    "answer",
    [b"", b"no", b"[]", b'{"usage":', b'{"usage":[' + b"[]," * MAX_VALUES + b"0]}"],
    ids=lambda a: repr(a[:12]),
)
async def test_what_is_no_object_or_has_too_much_in_it_says_nothing(answer: bytes) -> None:
    assert await answer_read(answer) == {}


async def test_a_field_with_too_much_in_it_is_absent_but_an_error_remains_one() -> None:
    much = b"[" + b"[]," * 100_000 + b"0]"
    found = await answer_read(b'{"usage":' + much + b',"kv_transfer_params":' + much + b',"error":' + much + b"}")
    assert found.keys() == {"error"}
    assert "error: " in found["error"]


def test_words_of_a_stream_are_read_up_to_a_length() -> None:
    assert words_read(b'"oh"') == "oh"
    for text in (b"", b"[" * 10_000, b'{"a":"' + b"x" * MAX_WORDS_BYTES + b'"}'):
        assert words_read(text) is None
