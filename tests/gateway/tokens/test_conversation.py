"""What chat templates are given."""

from __future__ import annotations

from typing import Any

import pytest

from kvscout_gateway.tokens.conversation import NotText, conversation, template_variables, tools_shown


def test_contents_are_texts_or_parts_as_the_template_wants_them() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": 1}, "c"]},
        {"role": "assistant", "content": None},
    ]
    assert conversation(messages, as_parts=False) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b\nc"},
        {"role": "assistant", "content": ""},
    ]
    assert conversation(messages, as_parts=True) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": 1}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": []},
    ]


def test_tool_calls_come_with_their_arguments_parsed_and_answers_of_tools_are_texts() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{"}}
    shown = conversation(
        [
            {"role": "assistant", "content": "", "tool_calls": [call, broken], "reasoning": "so"},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}]},
            {"role": "assistant", "tool_calls": []},
        ],
        as_parts=True,
    )
    assert [one["function"]["arguments"] for one in shown[0]["tool_calls"]] == [{"x": 1}, {}]
    assert shown[0]["reasoning_content"] == "so"
    assert shown[1] == {"role": "tool", "content": "one", "tool_call_id": "1"}
    assert "tool_calls" not in shown[2]
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}  # what the client sent goes to its engine


def test_a_line_that_changes_with_every_request_is_left_out_of_system_messages() -> None:
    line = "x-anthropic-billing-header: cc=1;"
    shown = conversation(
        [{"role": "system", "content": [line, f"{line}\nrest"]}, {"role": "user", "content": line}], as_parts=False
    )
    assert [message["content"] for message in shown] == ["rest", line]


def test_tools_have_what_the_client_left_out() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tools_shown({"tools": tools}) == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    ]
    assert tools_shown({}) is None


def test_variables_of_the_template_come_from_where_vllm_takes_them() -> None:
    request = {"chat_template_kwargs": {"enable_thinking": True, "tokenize": 1}, "reasoning_effort": "none"}
    assert template_variables(request) == {
        "enable_thinking": True,
        "reasoning_effort": "none",
        "add_generation_prompt": True,
    }
    assert template_variables({"reasoning_effort": "low", "add_generation_prompt": False}) == {
        "reasoning_effort": "low",
        "enable_thinking": True,
        "add_generation_prompt": False,
    }


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "text",
        [{}],
        ["text"],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": [{"type": ["text"]}]}],
        [{"role": "user", "content": [{"type": "text", "text": "a", "uuid": "u"}]}],
        [{"role": "user", "content": [None]}],
        [{"role": "assistant", "tool_calls": {"a": 1}}],
        [{"role": "assistant", "tool_calls": [1]}],
        [{"role": "user", "content": ""}] * 20_001,
    ],
)
def test_what_is_no_text_or_no_conversation_has_no_tokens(messages: Any) -> None:
    with pytest.raises(NotText):
        conversation(messages, as_parts=False)


@pytest.mark.parametrize("request_body", [{"chat_template": "x"}, {"chat_template_kwargs": [1]}])
def test_a_template_of_the_request_is_not_known_here(request_body: dict[str, Any]) -> None:
    with pytest.raises(NotText):
        template_variables(request_body)


@pytest.mark.parametrize("tools", ["f", [1], [{"type": "function"}]])
def test_tools_that_are_none_are_refused(tools: Any) -> None:
    with pytest.raises(NotText):
        tools_shown({"tools": tools})


def test_arguments_with_too_much_in_them_are_shown_as_none() -> None:
    def shown(arguments: str) -> Any:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        [message] = conversation([{"role": "assistant", "content": "", "tool_calls": [call]}], as_parts=False)
        return message["tool_calls"][0]["function"]["arguments"]

    assert shown('{"a":[[],1]}') == {"a": [[], 1]}
    assert shown('{"a":[' + "[]," * 20_000 + "1]}") == {}


def test_tools_say_whether_they_are_deferred_and_parts_may_name_one() -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True}, "defer_loading": True}
    [shown] = tools_shown({"tools": [tool]}) or []
    assert shown["defer_loading"] and shown["function"]["defer_loading"] and shown["function"]["strict"]
    messages = [{"role": "tool", "tool_call_id": "1", "content": [{"type": "tool_reference", "name": "f"}]}]
    assert conversation(messages, as_parts=True)[0]["content"] == [{"type": "tool_reference", "name": "f"}]
    assert conversation(messages, as_parts=False)[0]["content"] == "f"


def test_texts_of_a_tools_result_are_one_text_whatever_else_their_parts_say() -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    [shown] = conversation([{"role": "tool", "content": [part, part]}], as_parts=True)
    assert shown["content"] == "a\na"
