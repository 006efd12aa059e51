"""Messages and responses as prompts: those of the chat completions that vLLM makes of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from support.conversations import Conversation, conversations, conversations_with_images

from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_gateway.tokens.as_chat import as_chat
from kvscout_gateway.tokens.conversation import NotText
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.requests.chat import parse_chat
from kvscout_mocker.requests.generation import DEFAULT_CHAT_TOKENS, ContextExceeded, Generation
from kvscout_mocker.requests.messages import count_tokens, parse_messages
from kvscout_mocker.requests.responses import PreviousResponse, parse_response
from kvscout_mocker.tokens.conversation import conversation_tokens
from kvscout_mocker.tokens.tokenizer import WordTokenizer

TOKENIZER = WordTokenizer(32_000)
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
TOOLS = [{"name": "read", "input_schema": {"properties": {"path": {"type": "string"}}}}]
FUNCTIONS = [{"type": "function", "name": "read", "parameters": {"type": "object", "properties": {"path": {}}}}]
CONVERTED = [c for c in (*conversations("mock"), *conversations_with_images("mock")) if c.dialect != "chat"]


def message(config: MockerConfig, *messages: dict[str, Any], **more: Any) -> Generation:
    body = {"model": "mock", "max_tokens": 500, "messages": list(messages), **more}
    return parse_messages(body, config, TOKENIZER)


def response(config: MockerConfig, *items: dict[str, Any], **more: Any) -> Generation:
    return parse_response({"model": "mock", "input": list(items), **more}, config, TOKENIZER).generation


def prompt_of_chat(config: MockerConfig, *messages: dict[str, Any], **more: Any) -> array[int]:
    return parse_chat({"messages": list(messages), **more}, config, TOKENIZER).prompt


@pytest.mark.parametrize("conversation", CONVERTED, ids=lambda conversation: conversation.name)
def test_a_prompt_is_that_of_the_chat_completion_that_a_gateway_makes_of_it(
    config: MockerConfig, conversation: Conversation
) -> None:
    dialect, body = conversation.dialect, conversation.request
    try:
        chat = as_chat(dialect, body)
    except NotText:
        chat = None
    if chat is None:
        with pytest.raises(InvalidArgument):
            _prompt(config, dialect, body)
        return
    assert _prompt(config, dialect, body) == conversation_tokens(chat, TOKENIZER)


def _prompt(config: MockerConfig, dialect: str, body: dict[str, Any]) -> array[int]:
    if dialect == "messages":
        return parse_messages(body, config, TOKENIZER).prompt
    return parse_response(body, config, TOKENIZER).generation.prompt


def test_calls_and_results_of_both_dialects_are_those_of_a_chat_completion(config: MockerConfig) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
    expected = prompt_of_chat(
        config,
        HELLO,
        {"role": "assistant", "reasoning": "so", "content": "look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "found"},
    )
    use = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
    said = [{"type": "thinking", "thinking": "so", "signature": "s"}, {"type": "text", "text": "look"}, use]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
    of_messages = message(config, HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": [result]})
    assert of_messages.prompt == expected
    of_responses = response(
        config,
        HELLO,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "t1", "name": "read", "arguments": '{"path": "a"}'},
        {"type": "function_call_output", "call_id": "t1", "output": "found"},
    )
    assert of_responses.prompt == expected


def test_a_result_names_deferred_tools_in_a_message_of_their_own(config: MockerConfig) -> None:
    references = [{"type": "tool_reference", "tool_name": "read"}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": references}
    assert message(config, HELLO, {"role": "user", "content": [result]}).prompt == prompt_of_chat(
        config,
        HELLO,
        {"role": "tool", "content": "", "tool_call_id": "t1"},
        {"role": "tool", "content": [{"type": "tool_reference", "name": "read"}], "tool_call_id": "t1"},
    )


def test_tools_are_those_at_the_end_of_the_conversation(config: MockerConfig) -> None:
    def change(kind: str, **tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": kind, "tool": tool}]}

    deferred = [TOOLS[0] | {"defer_loading": True}]
    write = {"name": "write", "input_schema": {}}
    plain, both = message(config, HELLO, tools=TOOLS).prompt, message(config, HELLO, tools=[*TOOLS, write]).prompt
    by_name = {"type": "tool_reference", "name": "read"}
    assert message(config, HELLO, tools=deferred).prompt != plain
    assert message(config, HELLO, change("tool_addition", **by_name), tools=deferred).prompt == plain
    defined = change("tool_addition", type="tool_definition", definition=write)
    assert message(config, HELLO, defined, tools=TOOLS).prompt == both
    removed = change("tool_removal", type="tool_reference", name="write")
    assert message(config, HELLO, defined, removed, tools=TOOLS).prompt == plain
    with pytest.raises(InvalidArgument, match="not declared"):
        message(config, HELLO, removed, tools=TOOLS)


def test_a_token_count_is_that_of_the_prompt(config: MockerConfig) -> None:
    body = {"model": "mock", "messages": [HELLO], "system": "be brief", "tools": TOOLS}
    assert count_tokens(body, config, TOKENIZER) == len(message(config, HELLO, system="be brief", tools=TOOLS).prompt)
    with pytest.raises(NotFound):
        count_tokens(body | {"model": "gpt"}, config, TOKENIZER)


def test_a_response_continues_what_was_said_but_not_its_instructions_or_calls(config: MockerConfig) -> None:
    text = {"type": "message", "content": [{"type": "output_text", "text": "hi"}]}
    history = PreviousResponse(
        [{"role": "system", "content": "old"}, HELLO], [text, {"type": "function_call", "name": "read"}]
    )
    body = {"input": "and now", "instructions": "new"}
    continued = parse_response(body, config, TOKENIZER, history)
    assert continued.generation.prompt == prompt_of_chat(
        config,
        {"role": "system", "content": "new"},
        HELLO,
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and now"},
    )


def test_an_answer_ends_by_itself_long_before_the_limit_that_agents_send(config: MockerConfig) -> None:
    for asked in (message(config, HELLO), response(config, HELLO, max_output_tokens=1024), response(config, HELLO)):
        assert (asked.max_tokens, asked.ends_early) == (DEFAULT_CHAT_TOKENS, True)
    for asked in (message(config, HELLO, max_tokens=9), response(config, HELLO, max_output_tokens=9)):
        assert (asked.max_tokens, asked.ends_early) == (9, False)
    longer = {"vllm_xargs": {"output_tokens": 200}}
    for asked in (message(config, HELLO, **longer), response(config, HELLO, **longer)):
        assert (asked.max_tokens, asked.ends_early) == (200, True)


def test_fields_that_the_dialect_does_not_have_are_dropped(config: MockerConfig) -> None:
    plain = message(config, HELLO)
    assert message(config, HELLO, priority=3, seed=4, n=2, session_id="s", ignore_eos=True) == plain
    asked = response(config, HELLO, priority=3, seed=4, n=2, session_id="s")
    assert (asked.priority, asked.seed, asked.choices, asked.scope.session_id) == (3, 4, 1, "s")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read"}])
def test_a_message_that_must_call_a_tool_calls_it(config: MockerConfig, choice: dict[str, Any]) -> None:
    call = message(config, HELLO, tools=TOOLS, tool_choice=choice).tool_call
    assert call is not None
    assert (call.name, call.argument, call.named) == ("read", "path", choice["type"] == "tool")
    assert message(config, HELLO, tools=TOOLS).tool_call is None


def test_a_response_must_call_a_tool_that_there_is(config: MockerConfig) -> None:
    called = response(config, HELLO, tools=FUNCTIONS, tool_choice={"type": "function", "name": "read"}).tool_call
    assert called is not None
    assert called.name == "read"
    for choice in ("required", {"type": "function", "name": "write"}):
        with pytest.raises(InvalidArgument) as error:
            response(config, HELLO, tools=FUNCTIONS if isinstance(choice, dict) else [], tool_choice=choice)
        assert error.value.field == "tool_choice"


def test_tools_of_a_namespace_and_free_form_tools_are_functions(config: MockerConfig) -> None:
    tools = [{"type": "namespace", "name": "files", "tools": FUNCTIONS}, {"type": "custom", "name": "patch"}]
    request = parse_response({"input": "x", "tools": tools, "tool_choice": "required"}, config, TOKENIZER)
    assert request.namespaced == {"files__read": ("files", "read")}
    assert request.generation.tool_call is not None
    assert request.generation.tool_call.name in ("files__read", "patch")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.source"),
        ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "read"}]}, "tools.0.input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "write"}}, "tool_choice"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_bad_messages_name_the_field(config: MockerConfig, body: dict[str, Any], field: str) -> None:
    whole = {"model": "mock", "messages": [HELLO]} | ({"max_tokens": 5} if field != "max_tokens" else {}) | body
    with pytest.raises(InvalidArgument) as error:
        parse_messages(whole, config, TOKENIZER)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": 3}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.arguments"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0"),
        ({"input": "x", "instructions": 3}, "instructions"),
        ({"input": "x", "store": False, "background": True}, "background"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name"),
    ],
)
def test_bad_responses_name_the_field(config: MockerConfig, body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse_response(body, config, TOKENIZER)
    assert error.value.field == field


@pytest.mark.parametrize("ask", [message, response])
def test_a_prompt_that_fills_the_context_leaves_no_room_for_an_answer(
    config: MockerConfig, ask: Callable[..., Generation]
) -> None:
    with pytest.raises(ContextExceeded, match="maximum context length is 1024 tokens"):
        ask(config, {"role": "user", "content": "w9 " * 1024})


def test_a_limit_beyond_the_context_is_refused(config: MockerConfig) -> None:
    for ask, field in ((message, "max_completion_tokens"), (response, "max_output_tokens")):
        with pytest.raises(ContextExceeded, match="cannot be greater than max_model_len=1024") as error:
            ask(config, HELLO, **{"max_tokens" if ask is message else field: 1025})
        assert error.value.field == field
