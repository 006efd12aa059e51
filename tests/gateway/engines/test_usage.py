"""What engines say of the tokens of a prompt."""

from __future__ import annotations

from typing import Any

import pytest

from kvscout_common.http.http import Dialect
from kvscout_gateway.engines.usage import Usage, usage_of_answer, usage_of_stream

OPENAI, SGLANG = Dialect.OPENAI, Dialect.SGLANG


@pytest.mark.parametrize(
    ("dialect", "account", "usage"),
    [
        (OPENAI, {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(9, 4)),
        (OPENAI, {"prompt_tokens": 9, "prompt_tokens_details": None}, Usage(9, None)),
        (OPENAI, {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": "4"}}, Usage(9, None)),
        (OPENAI, {"prompt_tokens": "9"}, None),
        (OPENAI, {}, None),
        (SGLANG, {"prompt_tokens": 9, "cached_tokens": 0}, Usage(9, 0)),
        (SGLANG, {"prompt_tokens": 9}, Usage(9, None)),
        (SGLANG, {"prompt_tokens": 9, "completion_tokens": 7}, Usage(9, None, 7)),
        (OPENAI, {"prompt_tokens": 9, "completion_tokens": 7}, Usage(9, None, 7)),
        (OPENAI, {"prompt_tokens": 9, "completion_tokens": -1}, Usage(9, None)),
        (OPENAI, {"prompt_tokens": 9, "completion_tokens": 10**30}, Usage(9, None)),
    ],
)
def test_what_is_not_said_is_unknown_not_zero(dialect: Dialect, account: dict[str, Any], usage: Usage | None) -> None:
    assert usage_of_stream(dialect, account) == usage


def test_a_whole_answer_has_it_in_a_field_of_its_own() -> None:
    assert usage_of_answer(OPENAI, {"usage": {"prompt_tokens": 2}}) == Usage(2, None)
    assert usage_of_answer(SGLANG, {"meta_info": {"prompt_tokens": 2, "cached_tokens": 1}}) == Usage(2, 1)
    assert usage_of_answer(SGLANG, {"meta_info": [], "usage": {"prompt_tokens": 2}}) is None
