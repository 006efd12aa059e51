"""A request in Anthropic's form → the chat completion that SGLang makes of it. Pure.

By `entrypoints/anthropic` of SGLang 0.5.10 to 0.5.23. It differs from vLLM's: texts of system blocks are joined by line
breaks, the order of a message's blocks is kept, tools have an empty description where the client sent none. What the
reasoning parser of an engine decides, such as how thinking is written into a prompt, is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvscout_gateway.tokens.conversation import NotText, messages_of, text_or_none
from kvscout_gateway.tokens.messages_as_chat import (
    blocks_of,
    content_of,
    image_part,
    tool_call,
    tool_choice,
    tools_of,
)


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
            texts = [text_or_none(block.get("text")) for block in blocks_of(system) if block["type"] == "text"]
            system = "\n".join(text for text in texts if text)
        if system:
            shown.append({"role": "system", "content": system})
    for message, role in messages_of(request.get("messages")):
        if role not in ("user", "assistant"):
            raise NotText("where SGLang puts a system message within a conversation depends on its release")
        _add(shown, role, message.get("content"))
    chat: dict[str, Any] = {"messages": shown}
    output = request.get("output_config")
    if isinstance(output, dict) and (effort := output.get("effort")) is not None:
        chat["reasoning_effort"] = "max" if effort == "xhigh" else effort
    if tools := request.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools_of(tools) if "input_schema" in tool]
        choice = tool_choice(request.get("tool_choice"))
        chat["tool_choice"] = "auto" if choice is None else choice
    return chat


def _add(shown: list[dict[str, Any]], role: str, content: Any) -> None:
    if isinstance(content, str):
        shown.append({"role": role, "content": content})
        return
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks_of(content):
        kind = block["type"]
        if kind == "tool_use":
            calls.append(tool_call(block))
        elif kind == "tool_result" and role == "user":
            parts = _flush(shown, parts)
            tool = {"role": "tool", "tool_call_id": block.get("tool_use_id") or block.get("id") or ""}
            shown.append(tool | {"content": _result(block.get("content"))})
        elif (part := _part(block)) is not None:
            parts.append(part)
    if role == "user":
        _flush(shown, parts)
        return
    message: dict[str, Any] = {"role": role}
    if calls:
        message["tool_calls"] = calls
    if parts or not calls:
        message["content"] = content_of(parts) if parts else ""
    shown.append(message)


def _part(block: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a block as a part of its message; None = there is nothing in it."""
    if block["type"] == "text":
        text = text_or_none(block.get("text"))
        return None if text is None else {"type": "text", "text": text}
    if block["type"] == "image":
        return image_part(block["source"], media_type="image/png") if block.get("source") else None
    raise NotText(f"how SGLang shows a block of the kind {block['type'][:40]!r} is not known here")


def _flush(shown: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append what the user has said so far; return an empty list for what follows."""
    if parts:
        shown.append({"role": "user", "content": content_of(parts)})
    return []


def _result(content: Any) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        return str(content) if content else ""
    parts = []
    for item in content:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            if text := text_or_none(item.get("text")):
                parts.append({"type": "text", "text": text})
        elif kind == "image":
            parts.append(image_part(item.get("source"), media_type="image/png"))
        else:
            raise NotText("a result of a tool is neither text nor image")
    return content_of(parts) if parts else ""


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    shown: dict[str, Any] = {"type": "function", "function": function}
    if tool.get("defer_loading") is not None:
        shown["defer_loading"] = tool["defer_loading"]
    return shown
