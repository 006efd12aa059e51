"""Conversations, good and bad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.requests.chat import parse_chat, parse_detokenize, parse_tokenize
from kvscout_mocker.requests.generation import CONSTANT_LIMIT, DEFAULT_CHAT_TOKENS
from kvscout_mocker.tokens.tokenizer import WordTokenizer

TOKENIZER = WordTokenizer(32_000)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "w9"}]


def test_a_chat_has_the_tokens_that_tokenize_tells(config: MockerConfig) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    body = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    prompt = parse_chat(body, config, TOKENIZER).prompt
    assert prompt == parse_tokenize(body, config, TOKENIZER)
    assert prompt != parse_tokenize({"messages": messages}, config, TOKENIZER)


def test_an_image_is_one_token_of_its_content(config: MockerConfig) -> None:
    def tokens(url: str) -> list[int]:
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        return parse_chat({"messages": [{"role": "user", "content": parts}]}, config, TOKENIZER).prompt.tolist()

    assert tokens("a b c") == tokens("a b c") != tokens("a b d")
    assert len(tokens("a b c")) == len([4, 9, 7, 5])


def test_a_chat_without_a_limit_ends_by_itself(config: MockerConfig) -> None:
    asked = parse_chat({"messages": HELLO}, config, TOKENIZER)
    assert (asked.prompt.tolist(), asked.max_tokens, asked.ends_early) == ([4, 9, 7, 5], DEFAULT_CHAT_TOKENS, True)
    endless = parse_chat({"messages": HELLO, "ignore_eos": True}, config, TOKENIZER)
    assert (endless.max_tokens, endless.ends_early) == (1024 - 4, False)


def test_a_chat_with_an_agents_constant_as_limit_ends_by_itself_unless_a_length_is_wanted(config: MockerConfig) -> None:
    roomy = replace(config, engine=replace(config.engine, max_model_len=100_000))
    for limit, more, tokens, early in (
        (32_000, {}, DEFAULT_CHAT_TOKENS, True),
        (CONSTANT_LIMIT, {}, CONSTANT_LIMIT, False),
        (32_000, {"ignore_eos": True}, 32_000, False),
        (32_000, {"vllm_xargs": {"output_tokens": 700}}, 700, True),
        (32_000, {"vllm_xargs": {"output_tokens": 40_000}}, 32_000, False),
        (None, {"vllm_xargs": {"output_tokens": 700}}, 700, True),
    ):
        asked = parse_chat({"messages": HELLO, "max_tokens": limit, **more}, roomy, TOKENIZER)
        assert (asked.max_tokens, asked.ends_early) == (tokens, early)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_are_known(config: MockerConfig, field: str) -> None:
    asked = parse_chat({"messages": HELLO, field: 3, "logprobs": True, "top_logprobs": 2}, config, TOKENIZER)
    assert (asked.max_tokens, asked.ends_early, asked.logprobs) == (3, False, 2)
    with pytest.raises(InvalidArgument) as error:
        parse_chat({"messages": HELLO, field: 0}, config, TOKENIZER)
    assert error.value.field == field
    assert parse_chat({"messages": HELLO, field: 1024}, config, TOKENIZER).max_tokens == 1020


def test_probabilities_of_alternatives_need_probabilities(config: MockerConfig) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_chat({"messages": HELLO, "top_logprobs": 2}, config, TOKENIZER)
    assert error.value.field == "top_logprobs"


def test_an_unknown_model_is_not_found(config: MockerConfig) -> None:
    for parse in (parse_chat, parse_tokenize):
        with pytest.raises(NotFound, match="`gpt` does not exist"):
            parse({"model": "gpt", "messages": HELLO}, config, TOKENIZER)


def test_detokenize_takes_token_ids(config: MockerConfig) -> None:
    assert parse_detokenize({"tokens": [9, 10]}, config).tolist() == [9, 10]
    for tokens in (None, "w9", [-1], [[9]]):
        with pytest.raises(InvalidArgument) as error:
            parse_detokenize({"tokens": tokens}, config)
        assert error.value.field == "tokens"


def test_tokenize_takes_a_prompt_or_messages(config: MockerConfig) -> None:
    assert parse_tokenize({"prompt": "w9 w10"}, config, TOKENIZER).tolist() == [9, 10]
    parts = [{"type": "text", "text": "w9"}, {"type": "text", "text": "w10"}]
    chat = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
    assert parse_tokenize(chat, config, TOKENIZER).tolist() == [4, 9, 10, 7]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "messages.0.content"),
    ],
)
def test_bad_tokenize_input_names_the_field(config: MockerConfig, body: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_tokenize(body, config, TOKENIZER)
    assert error.value.field == field
