"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: converted to a chat completion, pure.

The conversion is that of vLLM 0.32 (`vllm/entrypoints/anthropic/serving.py`), for a chat template that takes system
messages anywhere. Fields that its reader drops have no effect: there is no seed, no priority and no `n`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import Fields, boolean, json_object, json_objects, mapping, optional_integer, string
from kvscout_mocker.requests.agent_chat import generation_of, text_of
from kvscout_mocker.requests.generation import Generation, check_limit, served_model
from kvscout_mocker.tokens.conversation import conversation_tokens
from kvscout_mocker.tokens.tokenizer import WordTokenizer

_BILLING = "x-anthropic-billing-header"
"""Claude Code begins a system block with it that is different in every request: vLLM leaves that block out."""
_PASSED = ("model", "stream", "cache_salt", "kv_transfer_params", "vllm_xargs")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_IGNORED = ("redacted_thinking", "tool_reference")
_Messages = list[dict[str, Any]]


def parse_messages(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> Generation:
    """Read a body of `/v1/messages`.

    Raises:
        InvalidArgument: Naming the field at fault.
        ContextExceeded: There is no room for an answer.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    if not string(fields, "model"):
        raise InvalidArgument("is required", field="model")
    limit = optional_integer(fields, "max_tokens", minimum=1)
    if limit is None:
        raise InvalidArgument("is required", field="max_tokens")
    check_limit("max_completion_tokens", limit, config)
    chat = _chat(fields) | {name: fields[name] for name in _PASSED if name in fields}
    if boolean(fields, "stream"):
        chat["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return generation_of(chat, limit, config, tokenizer)


def count_tokens(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> int:
    """Return the prompt tokens of a body of `/v1/messages/count_tokens`.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    chat = _chat(fields)
    served_model(fields, config)
    return len(conversation_tokens(chat, tokenizer))


def _chat(fields: Fields) -> dict[str, Any]:
    given = fields.get("messages")
    if not isinstance(given, list):
        raise InvalidArgument("must be a list", field="messages")
    messages: _Messages = []
    system = _system_text(fields.get("system"), "system")
    if system:
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(given):
        _add_message(messages, json_object(message, f"messages.{index}"), f"messages.{index}")
    return {"messages": messages, **_tools(fields)}


def _system_text(content: object, where: str) -> str:
    if content is None:
        return ""
    texts = [content] if isinstance(content, str) else [block.get("text") for block in json_objects(content, where)]
    return "".join(text for text in texts if isinstance(text, str) and not text.startswith(_BILLING))


def _add_message(messages: _Messages, message: Fields, where: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidArgument("must be user, assistant or system", field=f"{where}.role")
    if role == "system":
        text = _system_text(content, f"{where}.content")
        if text:
            messages.append({"role": "system", "content": text})
        return
    converted: dict[str, Any] = {"role": role}
    if isinstance(content, str):
        converted["content"] = content
    elif isinstance(content, list):
        converted |= _blocks(messages, str(role), json_objects(content, f"{where}.content"), f"{where}.content")
    else:
        raise InvalidArgument("must be a string or a list of blocks", field=f"{where}.content")
    if role == "assistant" or "content" in converted:
        messages.append(converted)


def _blocks(messages: _Messages, role: str, blocks: list[Fields], where: str) -> dict[str, Any]:
    parts: _Messages = []
    calls: _Messages = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            if text_of(block.get("text"), f"{where}.text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append(_image(block.get("source"), where))
        elif kind == "thinking":
            reasoning.append(text_of(block.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": json.dumps(mapping(block, "input"))}
            calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        elif kind == "tool_result":
            parts += _result(messages, role, block, where)
        elif kind not in _IGNORED:
            raise InvalidArgument("must be a known block", field=f"{where}.type")
    converted: dict[str, Any] = {}
    if reasoning:
        converted["reasoning"] = "".join(reasoning)
    if calls:
        converted["tool_calls"] = calls
    if parts:
        converted["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return converted


def _result(messages: _Messages, role: str, block: Fields, where: str) -> _Messages:
    """A user's result is a message before the text beside it, its images another one; else it is text."""
    content = block.get("content")
    if role != "user":
        return [{"type": "text", "text": f"Tool result: {content or ''}"}]
    items = [{"type": "text", "text": content}] if isinstance(content, str) else json_objects(content, where)
    text = "\n".join(text_of(item.get("text"), where) for item in items if item.get("type") == "text")
    messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text})
    images = [_image(item.get("source"), where) for item in items if item.get("type") == "image"]
    if images:
        messages.append({"role": "user", "content": images})
    named = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    references = [{"type": "tool_reference", "name": name} for name in named if name]
    if references:
        messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": references})
    return []


def _image(source: object, where: str) -> dict[str, Any]:
    fields = json_object(source, f"{where}.source")
    if fields.get("type") == "url":
        url = text_of(fields.get("url"), f"{where}.source.url")
    else:
        url = f"data:{fields.get('media_type', 'image/jpeg')};base64,{fields.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _changed_tools(fields: Fields) -> list[Fields] | None:
    """Apply the changes of the conversation to its tools: a template sees one list, as it is at the end."""
    given = fields.get("tools")
    messages = json_objects(fields["messages"], "messages")
    blocks = [block for message in messages if isinstance(message.get("content"), list) for block in message["content"]]
    changes = [block for block in blocks if block.get("type") in ("tool_addition", "tool_removal")]
    if not changes:
        return None if given is None else json_objects(given, "tools")
    tools = {tool.get("name"): tool for tool in json_objects(given, "tools")}
    removed = set()
    for block in changes:
        change = json_object(block.get("tool"), "messages.content.tool")
        name = change.get("name")
        if change.get("type") == "tool_definition":
            defined = json_object(change.get("definition"), "messages.content.tool.definition")
            name = defined.get("name")
            tools[name] = defined
        elif name not in tools:
            raise InvalidArgument(f"{block['type']} references a tool that is not declared", field="messages")
        elif block["type"] == "tool_addition":
            tools[name] = {key: value for key, value in tools[name].items() if key != "defer_loading"}
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _tools(fields: Fields) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    tools = _changed_tools(fields)
    if tools is not None:
        converted["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": text_of(tool.get("name"), f"tools.{index}.name"),
                    "description": tool.get("description"),
                    "parameters": _schema(tool.get("input_schema"), f"tools.{index}.input_schema"),
                    "strict": tool.get("strict"),
                    "defer_loading": tool.get("defer_loading"),
                },
            }
            for index, tool in enumerate(tools)
        ]
    choice = mapping(fields, "tool_choice")
    kind = choice.get("type")
    if kind == "tool":
        converted["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in _CHOICES:
        converted["tool_choice"] = _CHOICES[kind]
    elif choice:
        raise InvalidArgument("must be auto, any, tool or none", field="tool_choice.type")
    return converted


def _schema(schema: object, where: str) -> Mapping[str, Any]:
    given = json_object(schema, where)
    return given if "type" in given else {**given, "type": "object"}
