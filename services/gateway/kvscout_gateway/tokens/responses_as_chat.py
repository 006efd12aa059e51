"""A request in the form of OpenAI's responses → the chat completion that an engine makes of it. Pure.

By `entrypoints/openai/responses/utils.py` of vLLM 0.32. One message of the assistant is made of several items in a row:
what it thought, what it said, and which tools it called; whatever of these comes a second time begins another message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvscout_gateway.tokens.conversation import MAX_MESSAGES, NotText, text_or_none

_UNFINISHED: Final = ("in_progress", "incomplete")
_CUSTOM_INPUT: Final = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a tool that takes any text."""


def vllm_chat_of_responses(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion, as far as its prompt depends on it; see `as_chat`.

    Raises:
        NotText: vLLM refuses the request, or its prompt depends on what is not known here.
        InvalidArgument: A field is too long to be read.
    """
    instructions, items = _begin(request)
    shown: list[dict[str, Any]] = []
    for item in items:
        _add(shown, item)
    chat: dict[str, Any] = {"messages": instructions + shown}
    if items and items[-1].get("type", "message") in ("message", "reasoning"):
        unfinished = items[-1].get("status") in _UNFINISHED
        chat |= {"continue_final_message": unfinished, "add_generation_prompt": not unfinished}
    reasoning = request.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if tools := request.get("tools"):
        if not isinstance(tools, list):
            raise NotText("tools is not a list")
        chat["tools"] = [shown for tool in tools for shown in _tools(tool)]
        chat["tool_choice"] = request.get("tool_choice") or "auto"
    return chat


def sglang_chat_of_responses(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat completion that SGLang makes of instructions and texts; see `as_chat`.

    Raises:
        NotText: There is more in it, which its releases show in different ways.
        InvalidArgument: A field is too long to be read.
    """
    instructions, items = _begin(request)
    if request.get("tools") or request.get("reasoning") is not None:
        raise NotText("how SGLang shows tools and reasoning of a response depends on its release")
    shown = []
    for item in items:
        role, content = item.get("role"), item.get("content")
        if role not in ("user", "system", "assistant") or not isinstance(content, str):
            raise NotText("how SGLang shows an item that is not a text depends on its release")
        shown.append({"role": role, "content": content})
    return {"messages": instructions + shown}


def _begin(request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the message of the instructions, if there are any, and the items of the input."""
    for name in ("previous_response_id", "previous_input_messages", "prompt"):
        if request.get(name) is not None:
            raise NotText(f"{name} stands for what is not in the request")
    given, text = request.get("input"), text_or_none(request.get("instructions"))
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or len(given) > MAX_MESSAGES:
        raise NotText(f"input is neither text nor a list of at most {MAX_MESSAGES:,} items")
    if not all(isinstance(item, dict) for item in given):
        raise NotText("an item of the input is not an object")
    return [{"role": "system", "content": text}] if text else [], given


def _add(shown: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append the message of an item, or add the item to that of the assistant before it."""
    kind = item.get("type")
    last = shown[-1] if shown and shown[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call(item, kind)
        if last is None:
            shown.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = item.get("output")
        shown.append({"role": "tool", "content": _content(content), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _said(shown, last, "reasoning", _thought(item))
    elif kind not in (None, "message") or not isinstance(item.get("role"), str):
        raise NotText(f"the input has an item of the kind {str(kind)[:40]!r}")
    elif item["role"] == "assistant":
        _said(shown, last, "content", _first_text(item.get("content")))
    else:
        shown.append({"role": item["role"], "content": _content(item.get("content"))})


def _said(shown: list[dict[str, Any]], last: dict[str, Any] | None, name: str, text: str) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        shown.append({"role": "assistant", name: text})


def _call(item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    name = item.get("name")
    if not isinstance(name, str):
        raise NotText("a call of a tool has no name")
    if kind == "custom_tool_call":
        arguments: Any = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = item.get("arguments")
        if namespace := item.get("namespace"):
            name = f"{namespace}__{name}"
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _thought(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise NotText("reasoning is encrypted")
    return _first_text(item.get("content") or item.get("summary") or "")


def _first_text(content: Any) -> str:
    """Return the text of a content, or of the first of its parts: vLLM shows no other."""
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    if not isinstance(content, str):
        raise NotText("an item of the assistant has no text")
    return content


def _content(content: Any) -> Any:
    """Return the content of a message: texts as chat completions name them, without fields that vLLM does not know."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, dict) and _is_text(part) else part
        for part in content
    ]


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("input_text", "output_text", "text")


def _tools(tool: Any) -> Iterator[dict[str, Any]]:
    """Yield a tool as chat completions show it, or those of a namespace; none where the model is not shown it."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "function":
        yield _tool(tool, tool.get("name"))
    elif kind == "custom":
        yield _tool({"description": tool.get("description"), "parameters": _CUSTOM_INPUT}, tool.get("name"))
    elif kind == "namespace":
        inner = tool.get("tools")
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict) and one.get("type") == "function":
                yield _tool(one, f"{tool.get('name')}__{one.get('name')}")


def _tool(tool: Mapping[str, Any], name: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise NotText("a tool has no name")
    more = {field: tool.get(field) for field in ("description", "parameters", "strict", "defer_loading")}
    return {"type": "function", "function": {"name": name, **more}}
