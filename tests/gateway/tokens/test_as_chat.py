"""Requests in other dialects become the chat completions that their engines make of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.seeds import test_seed

from kvscout_common.worker import EngineKind
from kvscout_gateway.tokens.as_chat import CHAT, MESSAGES, RESPONSES, as_chat
from kvscout_gateway.tokens.conversation import NotText, TemplateTraits, conversation, without_media
from kvscout_gateway.tokens.sglang_conversation import SglangRelease, sglang_prompt

HEADER = {"type": "text", "text": "x-anthropic-billing-header: cch=1;"}
HELLO = {"role": "user", "content": "hello"}
THOUGHT = {"type": "thinking", "thinking": "so", "signature": "s"}
USE = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "ä"}}
SAYS = {"type": "text", "text": "look"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAA"}}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAA"}}
SCHEMA = {"properties": {"path": {"type": "string"}}}
TOOL = {"name": "read", "input_schema": SCHEMA}


def messages(
    *given: dict[str, Any],
    engine: EngineKind = EngineKind.VLLM,
    merge: bool = False,
    disabled: str = "none",
    **more: Any,
) -> Any:
    return as_chat(MESSAGES, {"messages": list(given), **more}, engine=engine, traits=TemplateTraits(merge, disabled))


def responses(*items: dict[str, Any], engine: EngineKind = EngineKind.VLLM, **more: Any) -> Any:
    return as_chat(RESPONSES, {"input": list(items), **more}, engine=engine)


def result(*content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content[0] if len(content) == 1 else list(content)}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_system_blocks_are_one_text_without_the_line_that_changes_with_every_request() -> None:
    chat = messages(HELLO, system=[HEADER, {"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
    assert chat["messages"] == [{"role": "system", "content": "onetwo"}, HELLO]
    assert messages(HELLO, system=[HEADER])["messages"] == [HELLO]


def test_inline_system_messages_stay_in_place_unless_the_template_wants_one_at_the_beginning() -> None:
    inline = {"role": "system", "content": [HEADER, {"type": "text", "text": "be brief"}]}
    assert messages(HELLO, inline, system="s")["messages"] == [
        {"role": "system", "content": "s"},
        HELLO,
        {"role": "system", "content": "be brief"},
    ]
    assert messages(HELLO, inline, system="s", merge=True)["messages"] == [
        {"role": "system", "content": "sbe brief"},
        HELLO,
    ]


def test_an_assistants_blocks_are_its_reasoning_its_content_and_its_tool_calls() -> None:
    [message] = messages(assistant(THOUGHT, {"type": "redacted_thinking", "data": "x"}, SAYS, USE))["messages"]
    call = {"id": "t1", "type": "function", "function": {"arguments": '{"path": "\\u00e4"}', "name": "read"}}
    assert message == {"role": "assistant", "reasoning": "so", "content": "look", "tool_calls": [call]}
    assert messages(assistant())["messages"] == [{"role": "assistant"}]


def test_results_of_tools_come_first_and_their_images_follow_as_the_users() -> None:
    many = user(SAYS, result({"type": "text", "text": "a"}, {"type": "text", "text": "b"}, IMAGE), result("c"))
    assert messages(many)["messages"] == [
        {"role": "tool", "tool_call_id": "t1", "content": "a\nb"},
        {"role": "user", "content": [URL]},
        {"role": "tool", "tool_call_id": "t1", "content": "c"},
        {"role": "user", "content": "look"},
    ]
    assert messages(user(result("c")))["messages"] == [{"role": "tool", "tool_call_id": "t1", "content": "c"}]


def test_tools_and_their_choice_are_written_as_chat_completions_write_them() -> None:
    chat = messages(HELLO, tools=[TOOL], tool_choice={"type": "tool", "name": "read"})
    assert chat["tools"][0]["function"]["parameters"] == {**SCHEMA, "type": "object"}
    assert "type" not in SCHEMA  # what the client sent goes to its engine
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "read"}}
    assert messages(HELLO, tools=[TOOL], tool_choice={"type": "any"})["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("more", "effort"),
    [
        ({"output_config": {"effort": "high"}}, "high"),
        ({"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}}, "none"),
        ({"thinking": {"type": "adaptive"}}, None),
    ],
)
def test_effort_and_thinking_become_the_reasoning_effort(more: dict[str, Any], effort: str | None) -> None:
    assert messages(HELLO, **more).get("reasoning_effort") == effort


def test_thinking_is_turned_off_by_the_effort_that_the_template_understands() -> None:
    assert messages(HELLO, thinking={"type": "disabled"}, disabled="low")["reasoning_effort"] == "low"


def test_a_chat_completions_calls_are_in_the_order_in_which_vllm_has_them_once_it_has_checked_them() -> None:
    call = {"type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}, "id": "c"}
    told = {"role": "assistant", "reasoning_content": "so", "tool_calls": [call]}
    chat = as_chat(CHAT, {"messages": [HELLO, told], "max_tokens": 3, "model": "m"})
    assert list(chat) == ["messages", "model"]
    [shown] = chat["messages"][1]["tool_calls"]
    assert (list(shown), list(shown["function"])) == (["id", "function", "type"], ["arguments", "name"])
    assert chat["messages"][1]["reasoning"] == "so"
    assert as_chat(CHAT, {"messages": [told]}, engine=EngineKind.SGLANG)["messages"] == [told]


@pytest.mark.parametrize("engine", [EngineKind.VLLM, EngineKind.SGLANG])
@pytest.mark.parametrize(
    "bad",
    [
        {"messages": None},
        {"messages": [3]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [user({"text": "no type"})]},
        {"messages": [user({"type": "text", "text": 3})]},
        {"messages": [user({"type": "document", "source": {}})]},
        {"messages": [user({"type": "image", "source": 3})]},
        {"messages": [HELLO], "system": 3},
        {"messages": [HELLO], "tools": "all"},
        {"messages": [HELLO], "tools": [{"input_schema": {}}]},
        {"messages": [HELLO], "tools": [TOOL], "tool_choice": {"type": "some"}},
    ],
)
def test_messages_that_no_engine_takes_have_no_chat_completion(bad: dict[str, Any], engine: EngineKind) -> None:
    with pytest.raises(NotText):
        as_chat(MESSAGES, bad, engine=engine)


def test_sglang_keeps_the_order_of_a_messages_blocks_and_shows_a_tool_without_description() -> None:
    system = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = messages(user(SAYS, result("a"), SAYS), engine=EngineKind.SGLANG, system=system, tools=[TOOL])
    assert chat["messages"] == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": "look"},
        {"role": "tool", "tool_call_id": "t1", "content": "a"},
        {"role": "user", "content": "look"},
    ]
    prompt = sglang_prompt(chat, as_parts=False, release=SglangRelease.SINCE_0_5_23)
    assert prompt.tools is not None
    assert prompt.tools[0]["function"] == {"name": "read", "description": "", "parameters": SCHEMA}


def test_sglang_has_tools_chosen_out_of_a_request_in_anthropics_form_too() -> None:
    other = TOOL | {"name": "write"}
    chat = messages(HELLO, engine=EngineKind.SGLANG, tools=[TOOL, other], tool_choice={"type": "tool", "name": "write"})
    prompt = sglang_prompt(chat, as_parts=False, release=SglangRelease.SINCE_0_5_23)
    assert prompt.tools is not None
    assert [tool["function"]["name"] for tool in prompt.tools] == ["write"]


@pytest.mark.parametrize("more", [{"thinking": {"type": "disabled"}}, {"messages": [assistant(THOUGHT)]}])
def test_what_sglangs_reasoning_parser_decides_is_not_known(more: dict[str, Any]) -> None:
    with pytest.raises(NotText, match="SGLang"):
        as_chat(MESSAGES, {"messages": [HELLO], **more}, engine=EngineKind.SGLANG)


def test_items_in_a_row_are_one_message_of_the_assistant_until_one_comes_twice() -> None:
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
    call = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"}
    again = call | {"call_id": "c2", "namespace": "files"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "done"}
    chat = responses(HELLO, thought, said, call, again, output, said, said, instructions="be good")
    names = [one["function"]["name"] for one in chat["messages"][2].pop("tool_calls")]
    assert names == ["read", "files__read"]
    assert chat["messages"] == [
        {"role": "system", "content": "be good"},
        HELLO,
        {"role": "assistant", "reasoning": "so", "content": "yes"},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "yes"},
    ]


def test_texts_of_items_are_named_as_in_chat_completions() -> None:
    parts = [{"type": "input_text", "text": "a", "more": 1}, {"type": "input_image", "image_url": "data:"}]
    [message] = responses({"type": "message", "role": "user", "content": parts})["messages"]
    assert message["content"] == [{"type": "text", "text": "a"}, parts[1]]


def test_an_unfinished_item_is_continued() -> None:
    said = {"type": "message", "role": "assistant", "content": "Once", "status": "in_progress"}
    chat = responses(HELLO, said)
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert not responses(HELLO)["continue_final_message"]


def test_tools_of_responses_are_functions_and_those_of_the_server_are_not_shown() -> None:
    function = {"type": "function", "name": "read", "parameters": SCHEMA}
    tools = [
        function,
        {"type": "custom", "name": "patch"},
        {"type": "web_search"},
        {"type": "namespace", "name": "files", "tools": [function]},
    ]
    chat = responses(HELLO, tools=tools)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["read", "patch", "files__read"]
    assert responses(HELLO, tools=[{"type": "web_search"}])["tools"] == []
    assert "tools" not in responses(HELLO, tools=[])


@pytest.mark.parametrize(
    "bad",
    [
        {"input": None},
        {"input": ["text"]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "message", "role": "assistant", "content": []}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": [{"type": "function_call", "call_id": "c"}]},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "instructions": 3},
        {"input": "x", "tools": "all"},
        {"input": "x", "tools": [{"type": "function"}]},
    ],
)
def test_responses_whose_prompt_is_not_in_them_have_no_chat_completion(bad: dict[str, Any]) -> None:
    with pytest.raises(NotText):
        as_chat(RESPONSES, bad)


def test_sglangs_responses_are_known_where_they_are_texts() -> None:
    chat = responses(HELLO, {"role": "assistant", "content": "hi"}, engine=EngineKind.SGLANG, instructions="be good")
    assert [message["role"] for message in chat["messages"]] == ["system", "user", "assistant"]
    for more in ({"tools": [{"type": "function", "name": "f"}]}, {"input": [{"role": "developer", "content": "x"}]}):
        with pytest.raises(NotText, match="SGLang"):
            as_chat(RESPONSES, {"input": "x", **more}, engine=EngineKind.SGLANG)


_WORDS = (
    "text",
    "image",
    "tool_use",
    "tool_result",
    "thinking",
    "function_call",
    "message",
    "reasoning",
    "assistant",
    "user",
)
_KEYS = [
    *("type", "role", "content", "text", "messages", "input", "tools", "system", "name", "tool_choice", "thinking"),
    *("output_config", "effort", "source", "tool_calls", "function", "reasoning", "instructions", "item"),
]


def _anything(draw: random.Random, depth: int) -> Any:
    if depth and draw.random() < 0.4:
        return {draw.choice(_KEYS): _anything(draw, depth - 1) for _ in range(draw.randrange(5))}
    if depth and draw.random() < 0.5:
        return [_anything(draw, depth - 1) for _ in range(draw.randrange(4))]
    return draw.choice([None, True, 3, 1.5, "", *_WORDS])


def test_whatever_a_client_sends_there_is_a_chat_completion_or_a_reason() -> None:
    seed = test_seed()
    draw, chats = random.Random(seed), 0
    for _ in range(3000):
        request = {key: _anything(draw, 4) for key in _KEYS if draw.random() < 0.5}
        request["messages"] = [{"role": draw.choice(_WORDS), "content": _anything(draw, 4)} for _ in range(2)]
        for dialect in (CHAT, MESSAGES, RESPONSES):
            for engine in (EngineKind.VLLM, EngineKind.SGLANG):
                try:
                    chat = as_chat(dialect, request, engine=engine)
                    chats += 1
                    for as_parts in (False, True):
                        conversation(chat["messages"], as_parts=as_parts)
                        conversation(without_media(chat["messages"], in_place=as_parts)[0], as_parts=as_parts)
                except NotText:
                    continue
    assert chats > 100


def test_the_model_and_the_templates_variables_stay() -> None:
    chat = messages(HELLO, model="m", chat_template_kwargs={"enable_thinking": False})
    assert (chat["model"], chat["chat_template_kwargs"]) == ("m", {"enable_thinking": False})
    with pytest.raises(NotText):
        as_chat("cohere", {"messages": [HELLO]})
