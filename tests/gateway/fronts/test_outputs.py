"""What requests tell of their outputs: bounds, not lengths; and classes, few of them whatever clients write."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from support.seeds import test_seed

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.json_fields import Fields
from kvscout_gateway.fronts.outputs import output_of
from kvscout_gateway.values.output import MAX_CLASS, Output, check_class

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
NO_BOUNDS: tuple[Any, ...] = (None, 0, -1, True, "10", 1.5, 2**32, [10], {})
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def told(path: str, **fields: Any) -> Output:
    return output_of(path, Fields.scanned(json.dumps({"model": "m", **fields}).encode()))


@pytest.mark.parametrize(
    ("path", "fields", "bound"),
    [
        (CHAT, {"max_tokens": 10}, 10),
        (CHAT, {"max_tokens": 10, "max_completion_tokens": 7}, 7),
        (RESPONSES, {"max_output_tokens": 12}, 12),
        (MESSAGES, {"max_tokens": 4096}, 4096),
        ("/generate", {"sampling_params": {"max_new_tokens": 9}}, 9),
        ("", {"messages": [], "max_tokens": 3}, 3),
        (CHAT, {"max_tokens": 10, "n": 3}, 30),
        (COMPLETIONS, {"prompt": [[1], [2]], "max_tokens": 10, "best_of": 2}, 40),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2**31, "n": 2**31}, 2**32 - 1),
        *[(CHAT, {"max_tokens": value}, 0) for value in NO_BOUNDS],
        ("/generate", {"sampling_params": [{"max_new_tokens": 9}]}, 0),
        ("/v1/embeddings", {"input": "a", "max_tokens": 10}, 1),
    ],
)
def test_what_a_client_allows_is_a_bound_and_nothing_that_is_expected(
    path: str, fields: dict[str, Any], bound: int
) -> None:
    output = told(path, **fields)
    assert output.max_tokens == bound
    assert output.expected_tokens == (1 if path == "/v1/embeddings" else 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 10, "ignore_eos": True}, 10),
        ({"max_tokens": 10, "ignore_eos": True, "n": 2}, 20),
        ({"max_tokens": 10, "min_tokens": 10}, 10),
        ({"max_tokens": 10, "min_tokens": 9}, 0),
        ({"max_tokens": 10, "ignore_eos": "yes"}, 0),
        ({"max_tokens": 10, "ignore_eos": True, "stop": ["a"]}, 0),
        ({"max_tokens": 10, "ignore_eos": True, "stop_token_ids": [1]}, 0),
        ({"max_tokens": 10, "ignore_eos": True, "stop": [], "stop_token_ids": None}, 10),
        ({"ignore_eos": True}, 0),
    ],
)
def test_only_an_output_that_nothing_else_ends_is_expected_to_reach_its_bound(
    fields: dict[str, Any], expected: int
) -> None:
    assert told(CHAT, **fields).expected_tokens == expected


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {}, "chat"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 100}, "completions"),
        (COMPLETIONS, {"prompt": "a"}, "completions/short"),
        (RESPONSES, {}, "responses"),
        (MESSAGES, {"max_tokens": 1}, "messages"),
        ("/v2/embed", {}, "embeddings"),
        ("/v2/rerank", {}, "score"),
        ("/v1/videos", {"prompt": "a"}, "completions"),
        ("/v1/videos", {}, "other"),
        ("", {"messages": []}, "chat"),
        (CHAT, {"tools": TOOLS}, "chat/tools"),
        (CHAT, {"tools": TOOLS, "tool_choice": "auto"}, "chat/tools"),
        (CHAT, {"tools": TOOLS, "tool_choice": "none"}, "chat"),
        (CHAT, {"tools": TOOLS, "tool_choice": "required"}, "chat/call"),
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}, "chat/call"),
        (CHAT, {"tools": []}, "chat"),
        (CHAT, {"tools": None}, "chat"),
        (CHAT, {"response_format": {"type": "text"}}, "chat"),
        (CHAT, {"response_format": {"type": "json_object"}}, "chat/structured"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "x" * 10_000}}},
            "chat/structured",
        ),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "responses/structured"),
        (RESPONSES, {"text": {"format": {"type": "text"}}}, "responses"),
        (CHAT, {"guided_choice": ["a", "b"]}, "chat/structured"),
        (CHAT, {"guided_json": None, "regex": ""}, "chat"),
        (CHAT, {"reasoning_effort": "high"}, "chat/effort-high"),
        (CHAT, {"reasoning_effort": "whatever I like"}, "chat"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "responses/effort-low"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "messages/thinking"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "messages/no-thinking"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat/no-thinking"),
        (CHAT, {"chat_template_kwargs": {"thinking": True}}, "chat/thinking"),
        (CHAT, {"n": 4}, "chat/many"),
    ],
)
def test_a_class_tells_what_a_request_asks_for(path: str, fields: dict[str, Any], name: str) -> None:
    assert told(path, **fields).output_class == name


def test_nothing_that_a_client_writes_is_in_a_class() -> None:
    rng, classes = Random(test_seed()), set()
    names = (
        *(
            "tools",
            "tool_choice",
            "response_format",
            "text",
            "guided_json",
            "reasoning_effort",
            "reasoning",
            "thinking",
        ),
        *("output_config", "chat_template_kwargs", "n", "best_of", "max_tokens", "stream", "stop", "min_tokens"),
        *("sampling_params", "messages", "prompt", "ignore_eos"),
    )

    def some(depth: int = 0) -> Any:
        word = f"{rng.getrandbits(64):x}"
        return rng.choice(
            (
                *(None, True, False, rng.randrange(-5, 5), word, word * 1000, "high", "none", "auto", "enabled"),
                *((many(depth), {rng.choice((*names, "type", "effort", word)): some(depth + 1)}) if depth < 3 else ()),
            )
        )

    def many(depth: int) -> list[Any]:
        return [some(depth + 1) for _ in range(rng.randrange(3))]

    for _ in range(3_000):
        path = rng.choice((COMPLETIONS, CHAT, RESPONSES, MESSAGES, f"/v1/{rng.getrandbits(64):x}", ""))
        classes.add(told(path, **{name: some() for name in rng.sample(names, 6)}).output_class)
    assert len(classes) < 600
    assert all(len(one) <= MAX_CLASS - 9 for one in classes), "there is room for an adapter"
    parts = {part for one in classes for part in one.split("/")}
    assert all(part.replace("-", "").isalpha() for part in parts)


def test_what_does_not_stream_tells_no_first_token() -> None:
    assert told(CHAT).unseen
    assert told(CHAT, stream=False).unseen
    assert told(CHAT, stream="yes").unseen
    assert not told(CHAT, stream=True).unseen
    assert told("/v1/embeddings").unseen
    assert not output_of(CHAT, Fields()).unseen, "nobody has seen the body"


def test_an_adapter_s_outputs_are_a_class_of_their_own_whose_name_stays_short() -> None:
    one = Output(output_class="chat/tools")
    assert one.of_adapter("").output_class == "chat/tools"
    assert one.of_adapter("sql").output_class == "chat/tools@sql"
    long = [one.of_adapter("a" * 100 + last).output_class for last in "xy"]
    assert len({*long}) == 2
    assert all(len(name) <= MAX_CLASS and name.startswith("chat/tools@") for name in long)
    full = Output(output_class="c" * MAX_CLASS)
    assert full.of_adapter("sql") == full
    check_class("c" * MAX_CLASS)
    with pytest.raises(InvalidArgument, match="output_class: must not be longer than 64"):
        check_class("c" * (MAX_CLASS + 1))
