"""Input of a chat template in SGLang, where it differs from vLLM, whose form `conversation` has. Pure.

By `serving_chat.py` and `protocol.py` of SGLang 0.5.10 to 0.5.23. A text content stays text, also where the template
reads lists of parts; texts of parts are joined by spaces; fields without a value are left out; a final message of the
assistant becomes the user's, or is taken off and its tokens are put behind the prompt's; tools are those that
`tool_choice` leaves. What differs between releases is in `SglangRelease`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvscout_common.http.json_scan import load_json
from kvscout_gateway.tokens.conversation import (
    MAX_ARGUMENT_VALUES,
    NotOnlyText,
    NotText,
    calls_of,
    is_media,
    messages_of,
)

TEXT_PARTS: Final = ("text", "input_text")
_FIELDS: Final = ("tool_call_id", "name", "phase", "reasoning_content")
"""Fields of a message beside role, content and tool calls, in the order in which a template finds them."""


class SglangRelease(StrEnum):
    """Releases of SGLang that render alike."""

    SINCE_0_5_23 = "0.5.23 and later"
    """A tool's function has the client's fields in the client's order."""
    UNTIL_0_5_22 = "0.5.11 to 0.5.22"
    """It has description, name, parameters and strict, in this order, whatever the client sent."""
    UNTIL_0_5_10 = "0.5.10 and before"
    """The same; beside it there is no `defer_loading`, tool results stay lists of parts, and only a `reasoning_effort`
    of "none" sets other variables."""


class SglangPrompt(NamedTuple):
    """Input of a template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    continued: str
    """Text whose tokens follow those of the rendered prompt; "" = none."""


def sglang_prompt(request: Mapping[str, Any], *, as_parts: bool, release: SglangRelease) -> SglangPrompt:
    """Return what the template of an SGLang engine is given for a chat request.

    Args:
        request: The body of the chat completion.
        as_parts: The template reads contents that are lists of parts.
        release: The engine's.

    Raises:
        NotText: The request has something in it that is not text, or that SGLang refuses.
    """
    messages = messages_of(request.get("messages"))
    shown = [_message(message, role, release, as_parts=as_parts) for message, role in messages]
    continued = ""
    if shown and shown[-1]["role"] == "assistant" and isinstance(last := shown[-1]["content"], str):
        if request.get("continue_final_message"):
            shown, continued = shown[:-1], last
        else:
            shown[-1] = {"role": "user", "content": last}
    return SglangPrompt(shown, _tools(request, release), _variables(request, release), continued)


def _message(message: Mapping[str, Any], role: str, release: SglangRelease, *, as_parts: bool) -> dict[str, Any]:
    if message.get("tools") is not None or message.get("prefix") is not None:
        raise NotText("a message has tools of its own, or is a prefix")
    role, given = role.lower(), message.get("content")
    joined = not as_parts or (role == "tool" and release is not SglangRelease.UNTIL_0_5_10)
    content = _content(given, joined=joined)
    shown: dict[str, Any] = {"role": role, "content": content}
    if role == "user":
        return shown
    shown |= {name: message[name] for name in _FIELDS if message.get(name) is not None}
    if message.get("tool_calls") is not None:
        shown["tool_calls"] = _tool_calls(message["tool_calls"], parsed=role == "assistant")
    if as_parts and isinstance(given, list):
        shown["content"] = shown.pop("content")  # SGLang puts it last
    return shown


def _content(content: Any, *, joined: bool) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotText("the content of a message is neither text nor a list")
    texts = [_text(part) for part in content]
    return " ".join(texts) if joined else [{"type": "text", "text": text} for text in texts]


def _text(part: Any) -> str:
    if is_media(part):
        raise NotOnlyText("a message has a part that is not text")
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise NotText("a message has a part that is not text")
    text: str = part["text"]
    return text


def _tool_calls(calls: Any, *, parsed: bool) -> list[dict[str, Any]]:
    shown = []
    for call, function in calls_of(calls):
        arguments = function.get("arguments")
        if parsed and isinstance(arguments, str):
            arguments = _arguments(arguments)
        shown.append(
            {
                "id": call.get("id"),
                "index": call.get("index"),
                "type": "function",
                "function": {"name": function.get("name"), "arguments": arguments},
            }
        )
    return shown


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = load_json(text.encode("utf-8", "replace"), max_values=MAX_ARGUMENT_VALUES)
    except ValueError as error:
        raise NotText("the arguments of a tool call are not JSON") from error
    if not isinstance(arguments, dict):
        raise NotText("the arguments of a tool call are not an object")
    return arguments


def _tools(request: Mapping[str, Any], release: SglangRelease) -> list[dict[str, Any]] | None:
    tools, choice = request.get("tools"), request.get("tool_choice")
    if not tools or choice == "none":
        return None
    if not isinstance(tools, list):
        raise NotText("tools is not a list")
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in tools]
    if not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions):
        raise NotText("a tool is not a function with a name")
    shown = [_tool(tool, tool["function"], release) for tool in tools]
    if isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        shown = [tool for tool in shown if tool["function"]["name"] == name]
    return shown or None


def _tool(tool: Mapping[str, Any], function: Mapping[str, Any], release: SglangRelease) -> dict[str, Any]:
    fields = {name: function.get(name) for name in ("description", "name", "parameters")}
    deferred = function.get("defer_loading", tool.get("defer_loading"))
    if release is SglangRelease.SINCE_0_5_23:
        fields |= {name: function[name] for name in ("strict",) if function.get(name) is not None}
        sent = [name for name in function if name in fields]
        fields = {name: fields[name] for name in [*sent, *(name for name in fields if name not in sent)]}
    else:
        fields["strict"] = bool(function.get("strict"))
    if release is SglangRelease.UNTIL_0_5_10:
        return {"type": tool.get("type", "function"), "function": fields}
    if deferred is not None:
        fields["defer_loading"] = deferred
    return {
        "type": tool.get("type", "function"),
        "function": fields,
        "defer_loading": tool.get("defer_loading"),
    }


def _variables(request: Mapping[str, Any], release: SglangRelease) -> dict[str, Any]:
    if request.get("reasoning") is not None:
        raise NotText("it has a field reasoning")
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise NotText("chat_template_kwargs is not an object")
    variables: dict[str, Any] = {"add_generation_prompt": True}
    effort = request.get("reasoning_effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
        if release is not SglangRelease.UNTIL_0_5_10 or effort == "none":
            variables |= {"thinking": effort != "none", "enable_thinking": effort != "none"}
    variables |= given
    return {name: value for name, value in variables.items() if name not in ("chat_template", "tokenize")}
