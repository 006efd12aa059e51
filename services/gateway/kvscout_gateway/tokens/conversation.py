"""Input of a chat template: a request's messages and tools in the form that vLLM gives them. Pure.

vLLM fills in what a client may leave out, parses the arguments of tool calls, and shows a template the content of
messages as text or as a list of parts, whichever it is written for. A template that is given anything else renders
another text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvscout_common.http.json_scan import load_json

MAX_MESSAGES: Final = 20_000
MAX_ARGUMENT_VALUES: Final = 10_000
"""In the arguments of one tool call."""
TEXT_PARTS: Final = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Kinds of parts that are text, and the field that has it."""
_KNOWN_IN_A_PART: Final = frozenset(
    ("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file", "prompt_cache_breakpoint")
)
"""Fields of a part that a template does not see."""
MEDIA_PARTS: Final = frozenset(
    ("image_url", "input_image", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url",
     "video_embeds")
)  # fmt: skip
"""Kinds of parts that are images, sounds or films."""
MEDIA_MARK: Final = "\ue000media\ue001"
"""Text in place of the first of them, where the template puts it; characters that no language uses."""
HEADER: Final = "x-anthropic-billing-header"
"""Begins a line that differs with every request of one client; vLLM leaves it out of system messages."""


class NotText(ValueError):
    """The prompt is more than text, or none that can be known here."""


class NotOnlyText(NotText):
    """There is an image or the like in it."""


class TemplateTraits(NamedTuple):
    """Traits of a model's chat template, as vLLM detects them by trying it."""

    merges_system: bool = False
    """It refuses a system message that is not the first: vLLM puts the text of all of them into the first."""
    disabled_effort: str = "none"
    """The reasoning effort with which vLLM turns thinking off."""


def conversation(messages: Any, *, as_parts: bool) -> list[dict[str, Any]]:
    """Return the messages of a request as a template sees them.

    Args:
        messages: As the client sent them.
        as_parts: The template is written for contents that are lists of parts.

    Raises:
        NotText: They are no messages, or have something in them that is not text.
    """
    return [_message(message, role, as_parts=as_parts) for message, role in messages_of(messages)]


def messages_of(messages: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each message of a request with its role.

    Raises:
        NotText: They are no messages.
    """
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        raise NotText(f"messages is not a list of at most {MAX_MESSAGES:,}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
            raise NotText("a message is not an object with a role")
        yield message, role


def is_media(part: Any) -> bool:
    """Tell whether a part of a message is an image, a sound or a film."""
    kind = part.get("type") if isinstance(part, dict) else None
    return (isinstance(kind, str) and kind in MEDIA_PARTS) or (kind is not None and part.get("uuid") is not None)


def without_media(messages: Any, *, in_place: bool) -> tuple[list[dict[str, Any]], int]:
    """Return messages with a mark instead of their first image or the like, and how many there are.

    Args:
        messages: Of a chat completion.
        in_place: The engine shows it where it is; else before the texts of its message.

    Raises:
        NotText: They are no messages.
    """
    shown, items = [], 0
    mark = {"type": "text", "text": MEDIA_MARK}
    for message, _ in messages_of(messages):
        content = message.get("content")
        if isinstance(content, list) and any(map(is_media, content)):
            first = next(at for at, part in enumerate(content) if is_media(part)) if in_place else 0
            texts = [part for part in content if not is_media(part)]
            kept = texts if items else [*texts[:first], mark, *texts[first:]]
            items += len(content) - len(texts)
            message = message | {"content": kept}
        shown.append(message)
    return shown, items


def calls_of(calls: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each tool call of a message with its function.

    Raises:
        NotText: They are no tool calls.
    """
    if not isinstance(calls, list):
        raise NotText("tool_calls is not a list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise NotText("a tool call has no function")
        yield call, function


def text_or_none(value: Any) -> str | None:
    """Return a text; None = there is none.

    Raises:
        NotText: It is something else.
    """
    if value is not None and not isinstance(value, str):
        raise NotText("a text is none")
    return value


def tools_shown(request: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a request as a template sees them: with what the client left out.

    Raises:
        NotText: They are no tools.
    """
    tools = request.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise NotText("tools is not a list")
    return [_tool(tool) for tool in tools]


def template_variables(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else of a request its template sees, by name.

    Raises:
        NotText: The request brings a template of its own, or variables that are none.
    """
    if request.get("chat_template") is not None:
        raise NotText("it has a chat template of its own")
    given = request.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise NotText("chat_template_kwargs is not an object")
    effort = request.get("reasoning_effort")
    more = {
        "add_generation_prompt": request.get("add_generation_prompt", True),
        "documents": request.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in given:
        more["enable_thinking"] = effort != "none"
    variables = given | {name: value for name, value in more.items() if value is not None}
    return {name: value for name, value in variables.items() if name not in ("chat_template", "tokenize")}


def _message(message: Mapping[str, Any], role: str, *, as_parts: bool) -> dict[str, Any]:
    parts = list(_parts(message.get("content"), role))
    as_list = as_parts and not (role == "tool" and all(part["type"] == "text" for part in parts))
    shown: dict[str, Any] = {
        "role": role,
        "content": parts if as_list else "\n".join(part["text" if "text" in part else "name"] for part in parts),
    }
    if role == "assistant":
        if message.get("tool_calls"):
            shown["tool_calls"] = _tool_calls(message["tool_calls"])
        if message.get("reasoning") is not None:
            shown["reasoning"] = shown["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        shown["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        shown["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            shown[name] = message[name]
    return shown


def _parts(content: Any, role: str) -> Iterable[dict[str, Any]]:
    if content is None:
        return
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list):
        raise NotText("the content of a message is neither text nor a list")
    for part in content:
        shown = {"type": "text", "text": part} if isinstance(part, str) else _part(part, role)
        if shown is None:
            continue
        if role == "system" and shown["text"].startswith(HEADER):
            shown["text"] = shown["text"].partition("\n")[2]
            if not shown["text"]:
                continue
        yield shown


def _part(part: Any, role: str) -> dict[str, Any] | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if role == "tool" and kind == "tool_reference" and isinstance(name := part.get("name"), str):
        return {"type": kind, "name": name}
    if is_media(part):
        raise NotOnlyText(f"a message has a part of the kind {str(kind)[:40]!r}")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise NotText(f"a message has a part of the kind {str(kind)[:40]!r}")
    text = part.get(TEXT_PARTS[kind])
    if text is None:
        return None
    if not isinstance(text, str):
        raise NotText("the text of a part is none")
    return {"type": "text", "text": text} | {k: v for k, v in part.items() if k not in _KNOWN_IN_A_PART}


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    return [
        call | {"function": function | {"arguments": _arguments(function.get("arguments"))}}
        for call, function in calls_of(calls)
    ]


def _arguments(given: Any) -> dict[str, Any]:
    if isinstance(given, str) and given:
        try:
            given = load_json(given.encode("utf-8", "replace"), max_values=MAX_ARGUMENT_VALUES)
        except ValueError:
            return {}
    return given if isinstance(given, dict) else {}


def _tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise NotText("a tool is not a function")
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    shown |= {
        name: value
        for name, value in (
            ("strict", function.get("strict")),
            ("defer_loading", function.get("defer_loading", deferred)),
        )
        if value is not None
    }
    of_tool = {} if deferred is None else {"defer_loading": deferred}
    return {"type": "function", "function": shown, **of_tool}
