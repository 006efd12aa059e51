"""Answers that are calls of tools, pure: which tool an answer calls, and its generated tokens as the call's arguments.

The arguments are the words of the generated tokens as one string, under the name of the first property that the tool
requires, or has.
"""

from __future__ import annotations

import json
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.fields import Fields, json_object, json_objects

TOOL_CALL_TOKENS = 16
"""Tokens of a call, unless its request says how many it has."""
_ALWAYS = ("name", "description", "parameters")
_IF_GIVEN = ("strict", "defer_loading")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call of an answer."""

    name: str
    argument: str
    """Name of the property that gets the generated text."""
    named: bool
    """The request names the tool: vLLM then reports `stop` in a chat completion, not `tool_calls`."""

    def head(self) -> str:
        """Return the arguments up to the generated text."""
        return "{" + json.dumps(self.argument) + ': "'

    def tail(self) -> str:
        """Return the arguments after the generated text."""
        return '"}'


def call_id() -> str:
    """Return an id for a call, as vLLM makes them."""
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def described_tools(tools: object) -> list[dict[str, Any]]:
    """Return a chat completion's tools, their fields in the order in which vLLM writes them.

    Raises:
        InvalidArgument: Naming the field at fault.
    """
    return [_described(tool, f"tools.{index}.function") for index, tool in enumerate(json_objects(tools, "tools"))]


def _described(tool: Fields, where: str) -> dict[str, Any]:
    function = json_object(tool.get("function"), where)
    if not isinstance(function.get("name"), str):
        raise InvalidArgument("must be a string", field=f"{where}.name")
    deferred = {} if tool.get("defer_loading") is None else {"defer_loading": tool["defer_loading"]}
    given = {key: value for key, value in (deferred | dict(function)).items() if key in _IF_GIVEN and value is not None}
    written = {key: function.get(key) for key in _ALWAYS} | {key: given[key] for key in _IF_GIVEN if key in given}
    return {"type": "function", "function": written} | deferred


def chosen_call(fields: Fields, prompt: array[int], share: float) -> ToolCall | None:
    """Return the tool that the answer to a request calls; None if it is text.

    Args:
        fields: `tools` and `tool_choice` of a chat completion.
        prompt: Its tokens: they decide, where the request leaves it open.
        share: Share of the answers that are calls, of requests with tools that may choose.

    Raises:
        InvalidArgument: The choice is none, or there is no such tool.
    """
    given, choice = fields.get("tools"), fields.get("tool_choice")
    if given == []:
        raise InvalidArgument("must not be an empty array", field="tools")
    tools = [tool["function"] for tool in described_tools(given)]
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none":
        return None
    if not tools:
        raise InvalidArgument("needs tools", field="tool_choice")
    draw = xxhash.xxh3_64_intdigest(prompt.tobytes())
    if isinstance(choice, dict):
        name = json_object(choice.get("function"), "tool_choice.function").get("name")
        tools = [tool for tool in tools if tool["name"] == name]
        if not tools:
            raise InvalidArgument("is not one of the tools", field="tool_choice")
    elif choice not in ("auto", "required"):
        raise InvalidArgument("must be none, auto, required or a tool", field="tool_choice")
    elif choice == "auto" and (draw % 10_000) / 10_000 >= share:
        return None
    tool = tools[draw // 10_000 % len(tools)]
    return ToolCall(tool["name"], _argument(tool["parameters"]), isinstance(choice, dict))


def _argument(parameters: Any) -> str:
    schema = parameters if isinstance(parameters, dict) else {}
    candidates: Sequence[object] = [*_keys(schema.get("required")), *_keys(schema.get("properties")), "input"]
    return next(name for name in candidates if isinstance(name, str))


def _keys(names: object) -> list[object]:
    return list(names) if isinstance(names, (list, dict)) else []
