"""Request bodies, good and bad."""

from __future__ import annotations

from typing import Any

import pytest

from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.requests.completions import parse_completion
from kvscout_mocker.tokens.tokenizer import WordTokenizer

TOKENIZER = WordTokenizer(32_000)


def test_defaults_are_vllms(config: MockerConfig) -> None:
    asked = parse_completion({"prompt": [1, 2]}, config, TOKENIZER)
    assert (asked.prompt.tolist(), asked.max_tokens, asked.model) == ([1, 2], 16, "mock")
    assert (asked.stream, asked.include_usage, asked.return_token_ids) == (False, False, False)


def test_an_adapters_name_is_a_model(config: MockerConfig) -> None:
    asked = parse_completion({"model": "second", "prompt": "w9 w10", "cache_salt": "s"}, config, TOKENIZER)
    assert (asked.scope.lora_name, asked.scope.lora_id, asked.scope.cache_salt) == ("second", 2, "s")
    assert asked.prompt.tolist() == [9, 10]


def test_sampling_fields_are_accepted_without_effect(config: MockerConfig) -> None:
    body = {"prompt": [1], "temperature": 0.3, "ignore_eos": True, "stop": ["x"], "min_tokens": 4}
    assert parse_completion(body, config, TOKENIZER) == parse_completion({"prompt": [1]}, config, TOKENIZER)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([1, 2], "body"),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1] * 1024}, "input_tokens"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "max_tokens": 1025}, "max_tokens"),
        ({"prompt": [1], "priority": "high"}, "priority"),
        ({"prompt": [1], "max_tokens": "3"}, "max_tokens"),
        ({"prompt": [1], "max_tokens": True}, "max_tokens"),
        ({"prompt": [1], "n": 0}, "n"),
        ({"prompt": [1], "n": 129}, "n"),
        ({"prompt": [1], "logprobs": 21}, "logprobs"),
        ({"prompt": [1], "seed": -1}, "seed"),
        ({"prompt": [1], "stream": 1}, "stream"),
        ({"prompt": [1], "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": [1], "stream": True, "stream_options": []}, "stream_options"),
        ({"prompt": [1], "stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"prompt": [1], "cache_salt": ""}, "cache_salt"),
        ({"prompt": [1], "cache_salt": 5}, "cache_salt"),
        ({"prompt": [1], "vllm_xargs": {"kv_cache_report_mode": "all"}}, "vllm_xargs.kv_cache_report_mode"),
        ({"prompt": [1], "vllm_xargs": {"output_tokens": 0}}, "vllm_xargs.output_tokens"),
        ({"prompt": [1], "vllm_xargs": {"output_tokens": "3"}}, "vllm_xargs.output_tokens"),
        ({"prompt": [1], "vllm_xargs": {"tells_first_token": 1}}, "vllm_xargs.tells_first_token"),
        ({"prompt": [1], "model": 7}, "model"),
    ],
)
def test_bad_input_names_the_field(config: MockerConfig, body: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_completion(body, config, TOKENIZER)
    assert error.value.field == field


def test_an_unknown_model_is_not_found(config: MockerConfig) -> None:
    with pytest.raises(NotFound, match="`gpt` does not exist"):
        parse_completion({"model": "gpt", "prompt": [1]}, config, TOKENIZER)


@pytest.mark.parametrize(
    ("body", "length", "ends_early"),
    [
        ({"max_tokens": 9}, 9, False),
        ({"max_tokens": 9, "vllm_xargs": {"output_tokens": 4}}, 4, True),
        ({"max_tokens": 9, "vllm_xargs": {"output_tokens": 9}}, 9, False),
        ({"max_tokens": 9, "vllm_xargs": {"output_tokens": 12}}, 9, False),
        ({"max_tokens": 9, "ignore_eos": True, "vllm_xargs": {"output_tokens": 4}}, 9, False),
    ],
)
def test_an_output_ends_by_itself_where_its_request_says_and_not_beyond_its_bound(
    config: MockerConfig, body: dict[str, Any], length: int, ends_early: bool
) -> None:
    asked = parse_completion({"prompt": [1], **body}, config, TOKENIZER)
    assert (asked.max_tokens, asked.ends_early) == (length, ends_early)


@pytest.mark.parametrize("given", [{}, {"vllm_xargs": {"output_tokens": 4}}])
def test_a_limit_beyond_the_context_is_cut_to_what_the_prompt_leaves(
    config: MockerConfig, given: dict[str, Any]
) -> None:
    asked = parse_completion({"prompt": [1] * 1000, "max_tokens": 1024, **given}, config, TOKENIZER)
    assert (asked.max_tokens, asked.ends_early) == ((4, True) if given else (24, False))
