"""Chat templates of SGLang engines are given what SGLang gives them.

`sglang_conversations.json` was made by SGLang's own code, three releases of it: `ChatCompletionRequest`,
`process_content_for_template_format` and `_handle_last_assistant_message`, in the order of `_apply_jinja_template`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from kvscout_gateway.tokens.chat_template import ChatTemplate, sglang_reads_parts
from kvscout_gateway.tokens.conversation import NotText
from kvscout_gateway.tokens.sglang_conversation import SglangRelease, sglang_prompt

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "sglang_conversations.json").read_text())
RELEASES = {
    "0.5.10": SglangRelease.UNTIL_0_5_10,
    "0.5.22": SglangRelease.UNTIL_0_5_22,
    "0.5.23": SglangRelease.SINCE_0_5_23,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"a": 1}, "description": "Tells it"}}
HELLO = {"role": "user", "content": "hello"}
SHOWS_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
SHOWS_MESSAGES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("name", RELEASES)
def test_a_template_is_given_what_sglang_gives_it(name: str) -> None:
    for row in RECORDED["rows"]:
        source, shown = RECORDED["templates"][row["template"]], row["shown"][name]
        as_parts = sglang_reads_parts(source, jinja2.Environment().parse(source))
        assert as_parts == shown["parts"]
        prompt = sglang_prompt(row["request"], as_parts=as_parts, release=RELEASES[name])
        # As text, since templates show the fields of an object in their order.
        assert json.dumps(prompt.messages) == json.dumps(shown["messages"])
        assert json.dumps(prompt.tools) == json.dumps(shown["tools"])
        assert prompt.variables == {"add_generation_prompt": True, **shown["variables"]}
        assert prompt.continued == shown["continued"]


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": None},
        {"messages": ["hello"]},
        {"messages": [{"role": "user", "content": 3}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [HELLO | {"tools": [TOOL]}]},
        {"messages": [HELLO], "tools": "none"},
        {"messages": [HELLO], "tools": [{"function": {}}]},
        {"messages": [HELLO], "chat_template_kwargs": [1]},
        {"messages": [HELLO], "reasoning": {"effort": "low"}},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [{"role": "assistant", "tool_calls": {}}]},
    ],
)
@pytest.mark.parametrize("release", SglangRelease)
def test_what_is_not_text_or_refused_by_sglang_is_not_guessed(request_: Any, release: SglangRelease) -> None:
    with pytest.raises(NotText):
        sglang_prompt(request_, as_parts=False, release=release)


def test_tools_are_rendered_as_the_client_wrote_them_since_0_5_23_and_in_one_order_before() -> None:
    template = ChatTemplate(SHOWS_TOOLS, {})
    request = {"messages": [HELLO], "tools": [TOOL]}
    current, _ = template.render_for_sglang(request, SglangRelease.SINCE_0_5_23)
    before, _ = template.render_for_sglang(request, SglangRelease.UNTIL_0_5_22)
    assert list(json.loads(current)["function"]) == ["name", "parameters", "description"]
    assert list(json.loads(before)["function"]) == ["description", "name", "parameters", "strict"]


def test_a_final_message_of_the_assistant_is_the_users_or_is_continued_behind_the_prompt() -> None:
    template = ChatTemplate(SHOWS_MESSAGES, {})
    messages = [HELLO, {"role": "assistant", "content": "one"}]
    rendered = template.render_for_sglang({"messages": messages}, SglangRelease.SINCE_0_5_23)
    assert rendered == ("[user]hello[user]one", "")
    request = {"messages": messages, "continue_final_message": True}
    assert template.render_for_sglang(request, SglangRelease.SINCE_0_5_23) == ("[user]hello", "one")


def test_a_template_that_wants_functions_alone_is_given_them() -> None:
    source = "{% for tool in tools %}{{ tool.name or raise_exception('no name') }}{% endfor %}"
    rendered = ChatTemplate(source, {}).render_for_sglang(
        {"messages": [HELLO], "tools": [TOOL]}, SglangRelease.SINCE_0_5_23
    )
    assert rendered == ("weather", "")


def test_a_template_that_refuses_a_conversation_without_tools_is_not_tried_again() -> None:
    with pytest.raises(NotText, match="no"):
        ChatTemplate("{{ raise_exception('no') }}", {}).render_for_sglang(
            {"messages": [HELLO]}, SglangRelease.SINCE_0_5_23
        )
