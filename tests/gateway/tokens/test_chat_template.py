"""Chat templates render what vLLM renders, in a sandbox, in bounded time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscout_common.errors import ConfigError
from kvscout_gateway.tokens import chat_template
from kvscout_gateway.tokens.chat_template import ChatTemplate, TooLong
from kvscout_gateway.tokens.conversation import NotText, TemplateTraits

LOOP = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MACRO = "{% macro show(x) %}{% for c in x %}{% endfor %}{% endmacro %}"
HELLO = [{"role": "user", "content": "hello"}]


def rendered(source: str, messages: Any = HELLO, **request: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render({"messages": messages, **request})


def test_messages_special_tokens_and_the_generation_prompt_are_there() -> None:
    assert rendered("{{ bos_token }}" + LOOP) == "<s>[user]hello[assistant]"
    assert rendered(LOOP, add_generation_prompt=False) == "[user]hello"


def test_blocks_are_trimmed_and_loops_controlled_as_transformers_does() -> None:
    source = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\n"
    )
    assert rendered(source, HELLO * 2) == "hello\n"


def test_json_is_not_escaped_for_html() -> None:
    source = "{{ tools | tojson }}"
    tool = {"type": "function", "function": {"name": "<é>", "parameters": {}}}
    assert json.loads(rendered(source, tools=[tool]))[0]["function"]["name"] == "<é>"
    assert "<é>" in rendered(source, tools=[tool])


def test_what_is_marked_as_generated_is_put_out_as_it_is() -> None:
    assert rendered("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "hello"


def test_a_template_of_its_own_is_taken_for_tools() -> None:
    template = ChatTemplate("plain", {}, tool_source="tools")
    assert template.render({"messages": HELLO}) == "plain"
    assert template.render({"messages": HELLO, "tools": []}) == "tools"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (LOOP, False),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% set rest = messages %}{% for m in rest %}{% for c in m.content | list %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ show(m.content) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ show(x=m.content) }}{% endfor %}", True),
        (MACRO + "{% for m in messages %}{{ show(m.role) }}{% endfor %}", False),
        ("{% macro show(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ messages[0].content }}", False),
    ],
)  # fmt: skip
def test_a_template_that_loops_over_contents_gets_parts(source: str, parts: bool) -> None:
    shown = ChatTemplate("{{ messages | tojson }}{% if false %}" + source + "{% endif %}", {})
    [message] = json.loads(shown.render({"messages": HELLO}))
    assert isinstance(message["content"], list) is parts


def test_messages_of_developers_are_the_systems_where_the_template_knows_none() -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
    ]
    assert rendered(LOOP, messages) == "[system]s\n\nd[user]u[assistant]"
    knows = "{% if messages[0].role == 'developer' %}{% endif %}" + LOOP
    assert rendered(knows, messages) == "[user]u[system]s[developer]d[assistant]"


def test_a_final_message_is_continued_where_it_ends() -> None:
    source = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "well "}]
    assert rendered(source, messages, continue_final_message=True, add_generation_prompt=False) == "hello</s>well "
    trimmed = "{% for m in messages %}{{ m.content | trim }}</s>{% endfor %}"
    assert rendered(trimmed, messages, continue_final_message=True) == "hello</s>well"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[5].content }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_request_that_the_template_refuses_has_no_tokens(source: str) -> None:
    with pytest.raises(NotText, match="chat template"):
        rendered(source)


def test_no_final_message_to_continue_is_said() -> None:
    with pytest.raises(NotText):
        rendered(LOOP, [], continue_final_message=True)
    with pytest.raises(NotText):
        rendered("nothing", continue_final_message=True)


def test_a_template_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    with pytest.raises(TooLong, match=r"0\.05 s"):
        rendered(
            "{% for a in range(99999) %}{% for b in range(99999) %}{{ messages[0] and '' }}{% endfor %}{% endfor %}"
        )


def test_a_template_that_puts_out_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(TooLong, match="characters"):
        rendered("{% for a in range(99999) %}some text{% endfor %}")


def test_a_folder_is_read_as_models_come(tmp_path: Path) -> None:
    def load() -> str:
        template = ChatTemplate.load(tmp_path, flag="tokenizer")
        return template.render({"messages": HELLO}) if template is not None else "none"

    assert load() == "none"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json {{ bos_token }}"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<b>"}}))
    assert load() == "json <b>"
    config = {"chat_template": [{"name": "default", "template": "list {{ bos_token }}"}], "bos_token": "<c>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load() == "list <c>"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load() == "jinja"


@pytest.mark.parametrize(
    "text", ["{", "[]", json.dumps({"chat_template": "{% if %}"}), json.dumps({"chat_template": [1]})]
)
def test_a_folder_that_cannot_be_read_is_a_configuration_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError, match="tokenizer"):
        ChatTemplate.load(tmp_path, flag="tokenizer")


GUARD = "{% for m in messages if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endfor %}"
EFFORT = "{{ reasoning_effort if reasoning_effort in ('low', 'high') else 'max' }}"


@pytest.mark.parametrize(
    ("source", "traits"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }}", TemplateTraits()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TemplateTraits(disabled_effort="low")),
        (GUARD + "{{ enable_thinking }}", TemplateTraits(merges_system=True)),
        ("{{ nothing() }}{{ enable_thinking }}", TemplateTraits(merges_system=True, disabled_effort="low")),
        (EFFORT, TemplateTraits(disabled_effort="low")),
        ("{{ reasoning_effort }}", TemplateTraits()),
    ],
)
def test_a_templates_traits_are_those_that_vllm_finds_by_trying_it(source: str, traits: TemplateTraits) -> None:
    assert ChatTemplate(source, {}).traits == traits


def test_one_of_two_templates_that_wants_one_system_message_is_enough() -> None:
    assert ChatTemplate("{{ enable_thinking }}", {}, tool_source=GUARD).traits.merges_system
