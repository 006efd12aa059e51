"""A request in Anthropic's form → the chat completion that an engine makes of it. Pure.

vLLM's by its `entrypoints/anthropic/serving.py` of 0.32: results of tools come before the text of the message that
brings them, whatever their order in it; images in them follow as a message of the user.

SGLang's by its `entrypoints/anthropic` of 0.5.10 to 0.5.23: texts of system blocks are joined by line breaks, the order
of a message's blocks is kept, a tool without a description has an empty one. What an engine's reasoning parser decides,
such as how thinking is written into a prompt, is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvscout_gateway.tokens.conversation import HEADER, NotText, messages_of, text_or_none

_ROLES: Final = frozenset(("user", "assistant", "system"))
_KINDS: Final = frozenset(
    ("text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking")
)
_EFFORTS: Final = frozenset(("low", "medium", "high", "xhigh", "max"))
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def vllm_chat_of_messages(request: Mapping[str, Any], merge_system: bool, disabled_effort: str) -> dict[str, Any]:
    """Return the chat completion, as far as its prompt depends on it; see `as_chat`.

    Args:
        request: The client's body.
        merge_system: All system messages become one, at the beginning.
        disabled_effort: The reasoning effort that stands for no thinking.

    Raises:
        NotText: vLLM refuses the request, or its prompt depends on what is not known here.
        InvalidArgument: A field is too long to be read.
    """
    messages = list(messages_of(request.get("messages")))
    shown: list[dict[str, Any]] = []
    system = _system_text(request.get("system"))
    if merge_system:
        system += "".join(_system_text(m.get("content")) for m, role in messages if role == "system")
    if system:
        shown.append({"role": "system", "content": system})
    for message, role in messages:
        if role not in _ROLES:
            raise NotText(f"a message has the role {role[:40]!r}")
        if role != "system":
            _add(shown, role, message.get("content"))
        elif not merge_system and (text := _system_text(message.get("content"))):
            shown.append({"role": "system", "content": text})
    chat: dict[str, Any] = {"messages": shown}
    _add_effort(chat, request, disabled_effort)
    if request.get("tools") is not None:
        chat["tools"] = [_tool(tool) for tool in _tools_of(request["tools"])]
    if (choice := _tool_choice(request.get("tool_choice"))) is not None:
        chat["tool_choice"] = choice
    return chat


def sglang_chat_of_messages(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion, as far as its prompt depends on it; see `as_chat`.

    Raises:
        NotText: SGLang refuses the request, or its prompt depends on what is not known here.
        InvalidArgument: A field is too long to be read.
    """
    if request.get("thinking") is not None:
        raise NotText("how SGLang turns thinking on or off depends on its reasoning parser")
    shown: list[dict[str, Any]] = []
    if system := request.get("system"):
        if not isinstance(system, str):
            texts = [text_or_none(block.get("text")) for block in _blocks_of(system) if block["type"] == "text"]
            system = "\n".join(text for text in texts if text)
        if system:
            shown.append({"role": "system", "content": system})
    for message, role in messages_of(request.get("messages")):
        if role not in ("user", "assistant"):
            raise NotText("where SGLang puts a system message within a conversation depends on its release")
        _sglang_add(shown, role, message.get("content"))
    chat: dict[str, Any] = {"messages": shown}
    output = request.get("output_config")
    if isinstance(output, dict) and (effort := output.get("effort")) is not None:
        chat["reasoning_effort"] = "max" if effort == "xhigh" else effort
    if tools := request.get("tools"):
        chat["tools"] = [_sglang_tool(tool) for tool in _tools_of(tools) if "input_schema" in tool]
        choice = _tool_choice(request.get("tool_choice"))
        chat["tool_choice"] = "auto" if choice is None else choice
    return chat


def _system_text(content: Any) -> str:
    """Return the text of a system prompt or message, without blocks that differ with every request.

    Raises:
        NotText: It is neither text nor blocks, or adds or removes a tool.
    """
    if isinstance(content, str):
        return content
    texts = []
    for block in _blocks_of(content) if content is not None else ():
        if block["type"] in ("tool_addition", "tool_removal"):
            raise NotText("tools are added or removed within the conversation")
        text = text_or_none(block.get("text")) if block["type"] == "text" else None
        if text and not text.startswith(HEADER):
            texts.append(text)
    return "".join(texts)


def _blocks_of(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the blocks of a content, each with a type.

    Raises:
        NotText: They are no blocks.
    """
    if not isinstance(content, list):
        raise NotText("the content of a message is neither text nor blocks")
    for block in content:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise NotText("a block of a message has no type")
        yield block


def _image_part(source: Any, *, media_type: str) -> dict[str, Any]:
    """Return an image as a part of a chat message.

    Args:
        source: Where it is: a URL, or its bytes.
        media_type: Of bytes whose type is not said.

    Raises:
        NotText: It is no source of an image.
    """
    if not isinstance(source, dict):
        raise NotText("an image has no source")
    url = source.get("url")
    if source.get("type") != "url":
        url = f"data:{source.get('media_type', media_type)};base64,{source.get('data', '')}"
    if not isinstance(url, str):
        raise NotText("the URL of an image is not text")
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `tool_use` block as a tool call of a chat message."""
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _tools_of(tools: Any) -> Iterator[dict[str, Any]]:
    """Yield the tools of a request.

    Raises:
        NotText: They are no tools.
    """
    if not isinstance(tools, list):
        raise NotText("tools is not a list")
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise NotText("a tool has no name")
        yield tool


def _tool_choice(choice: Any) -> Any:
    """Return the choice of a tool as chat completions write it; None = none is made.

    Raises:
        NotText: It is none.
    """
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise NotText("tool_choice is none")
    return _CHOICES[kind]


def _add(shown: list[dict[str, Any]], role: str, content: Any) -> None:
    """Append a message of the user or the assistant, and those of the tools whose results it brings."""
    if isinstance(content, str):
        shown.append({"role": role, "content": content})
        return
    blocks = list(_blocks_of(content))
    if unknown := next((block["type"] for block in blocks if block["type"] not in _KINDS), None):
        raise NotText(f"a message has a block of the kind {unknown[:40]!r}")
    if role == "user":
        shown += [message for block in blocks if block["type"] == "tool_result" for message in _result(block)]
    parts = [part for block in blocks if (part := _part(block, role)) is not None]
    calls = [_tool_call(block) for block in blocks if block["type"] == "tool_use"]
    thinking = [text_or_none(block.get("thinking")) for block in blocks if block["type"] == "thinking"]
    thoughts = [thought for thought in thinking if thought is not None]
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = _content_of(parts)
    if role != "user" or parts:
        shown.append(message)


def _content_of(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: its parts, or the text of its only one."""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _part(block: Mapping[str, Any], role: str) -> dict[str, Any] | None:
    """Return a block as a part of its message; None = it is none, or empty."""
    if block["type"] == "text" and (text := text_or_none(block.get("text"))):
        return {"type": "text", "text": text}
    if block["type"] == "image" and block.get("source"):
        return _image_part(block["source"], media_type="image/jpeg")
    if block["type"] == "tool_result" and role != "user":
        return {"type": "text", "text": f"Tool result: {block.get('content') or ''}"}
    return None


def _result(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of one result of a tool."""
    content = block.get("content")
    texts, images, references = [content] if isinstance(content, str) else [], [], []
    for item in content if isinstance(content, list) else ():
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            texts.append(text_or_none(item.get("text", "")) or "")
        elif kind == "image":
            images.append(_image_part(item.get("source", {}), media_type="image/jpeg"))
        elif kind == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
            references.append({"type": "tool_reference", "name": name})
    tool = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    yield tool | {"content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if references:
        yield tool | {"content": references}


def _add_effort(chat: dict[str, Any], request: Mapping[str, Any], disabled: str) -> None:
    output, thinking = request.get("output_config"), request.get("thinking")
    effort = output.get("effort") if isinstance(output, dict) else None
    if isinstance(effort, str) and effort in _EFFORTS:
        chat["reasoning_effort"] = effort
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        chat["reasoning_effort"] = disabled


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise NotText("a tool has no input_schema")
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else schema | {"type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


def _sglang_add(shown: list[dict[str, Any]], role: str, content: Any) -> None:
    if isinstance(content, str):
        shown.append({"role": role, "content": content})
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in _blocks_of(content):
        kind = block["type"]
        if kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind == "tool_result" and role == "user":
            parts = _flush(shown, parts)
            tool = {"role": "tool", "tool_call_id": block.get("tool_use_id") or block.get("id") or ""}
            shown.append(tool | {"content": _sglang_result(block.get("content"))})
        elif (part := _sglang_part(block)) is not None:
            parts.append(part)
    if role == "user":
        _flush(shown, parts)
        return
    message: dict[str, Any] = {"role": role}
    if calls:
        message["tool_calls"] = calls
    if parts or not calls:
        message["content"] = _content_of(parts) if parts else ""
    shown.append(message)


def _sglang_part(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a block as a part of its message; None = there is nothing in it."""
    if block["type"] == "text":
        text = text_or_none(block.get("text"))
        return None if text is None else {"type": "text", "text": text}
    if block["type"] == "image":
        return _image_part(block["source"], media_type="image/png") if block.get("source") else None
    raise NotText(f"how SGLang shows a block of the kind {block['type'][:40]!r} is not known here")


def _flush(shown: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append what the user has said so far; return an empty list for what follows."""
    if parts:
        shown.append({"role": "user", "content": _content_of(parts)})
    return []


def _sglang_result(content: Any) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        return str(content) if content else ""
    parts = []
    for item in content:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            if text := text_or_none(item.get("text")):
                parts.append({"type": "text", "text": text})
        elif kind == "image":
            parts.append(_image_part(item.get("source"), media_type="image/png"))
        else:
            raise NotText("a result of a tool is neither text nor image")
    return _content_of(parts) if parts else ""


def _sglang_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    shown: dict[str, Any] = {"type": "function", "function": function}
    if tool.get("defer_loading") is not None:
        shown["defer_loading"] = tool["defer_loading"]
    return shown
