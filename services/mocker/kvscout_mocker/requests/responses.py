"""The body of OpenAI's `/v1/responses`: converted to a chat completion, pure.

The conversion is that of vLLM 0.32 (`vllm/entrypoints/openai/responses/utils.py`): consecutive items of the assistant
become one message, `instructions` are not inherited, and of the answer before only its text is.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import Fields, boolean, json_object, json_objects, optional_integer, string
from kvscout_mocker.requests.agent_chat import generation_of, text_of
from kvscout_mocker.requests.generation import Generation, check_limit
from kvscout_mocker.tokens.tokenizer import WordTokenizer

_PASSED = (
    "model",
    "stream",
    "cache_salt",
    "session_id",
    "seed",
    "priority",
    "ignore_eos",
    "vllm_xargs",
    "kv_transfer_params",
)
_FREE_FORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of the function as which vLLM shows a `custom` tool."""
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PreviousResponse:
    """A stored response as the next one sees it."""

    messages: Messages
    """Its prompt."""
    output: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A validated request."""

    response_id: str
    generation: Generation
    messages: Messages
    body: Fields
    stores: bool
    """The client wants it stored, which is the default; whether the engine does is its own decision."""
    background: bool
    namespaced: dict[str, tuple[str, str]]
    """Namespace and name of each tool that has a namespace, by the name that the prompt gives it."""


def previous_id(body: object) -> str:
    """Return the id of the response that a body continues; "" if it continues none.

    Raises:
        InvalidArgument: It is not a string.
    """
    return string(json_object(body), "previous_response_id")


def parse_response(
    body: object, config: MockerConfig, tokenizer: WordTokenizer, previous: PreviousResponse | None = None
) -> ResponseRequest:
    """Read a body.

    Args:
        body: Its JSON.
        config: Configuration of the engine.
        tokenizer: Words to tokens.
        previous: The response that it continues.

    Raises:
        InvalidArgument: Naming the field at fault.
        ContextExceeded: There is no room for an answer.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    stores, background = boolean(fields, "store", default=True), boolean(fields, "background")
    if background and not stores:
        raise InvalidArgument("can only be used when `store` is true", field="background")
    if fields.get("prompt") is not None:
        raise InvalidArgument("prompt template is not supported", field="prompt")
    limit = optional_integer(fields, "max_output_tokens", minimum=1)
    check_limit("max_output_tokens", limit, config)
    messages = _messages(fields, previous)
    chat = {"messages": messages, **_tools(fields), **_continuation(fields.get("input"))} | {
        name: fields[name] for name in _PASSED if name in fields
    }
    response_id = string(fields, "request_id") or f"resp_{uuid.uuid4().hex}"
    generation = generation_of(chat, limit, config, tokenizer)
    return ResponseRequest(response_id, generation, messages, fields, stores, background, _namespaced(fields))


def _messages(fields: Fields, previous: PreviousResponse | None) -> Messages:
    messages: Messages = []
    instructions = fields.get("instructions")
    if instructions:
        messages.append({"role": "system", "content": text_of(instructions, "instructions")})
    if previous is not None:
        messages += [message for message in previous.messages if message["role"] != "system"]
        texts = [item["content"] for item in previous.output if item["type"] == "message"]
        messages += [{"role": "assistant", "content": part["text"]} for parts in texts for part in parts]
    given = fields.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return messages
    if given is None:
        raise InvalidArgument("must be a string or a list of items", field="input")
    conversation: Messages = []  # of its own: its first item joins no earlier message
    for index, item in enumerate(json_objects(given, "input")):
        _add_item(conversation, item, f"input.{index}")
    return messages + conversation


def _continuation(given: object) -> dict[str, bool]:
    last = given[-1] if isinstance(given, list) and given else {}
    unfinished = last.get("status") in ("in_progress", "incomplete")
    goes_on = unfinished and last.get("type", "message") in ("message", "reasoning")
    return {"add_generation_prompt": False, "continue_final_message": True} if goes_on else {}


def _add_item(messages: Messages, item: Fields, where: str) -> None:
    kind, role = item.get("type"), item.get("role")
    if kind in ("function_call", "custom_tool_call"):
        last = _last_of_assistant(messages)
        if last is None:
            last = {"role": "assistant"}
            messages.append(last)
        last.setdefault("tool_calls", []).append(_call(item, where))
    elif kind == "reasoning":
        _add_to_assistant(messages, "reasoning", _reasoning(item, where))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif role == "assistant":
        content = item.get("content")
        if isinstance(content, list) and content:
            content = json_object(content[0], f"{where}.content.0").get("text")
        _add_to_assistant(messages, "content", text_of(content, f"{where}.content"))
    elif isinstance(role, str):
        messages.append({"role": role, "content": item.get("content")})
    else:
        raise InvalidArgument(f"Unsupported input item type: {kind}", field=where)


def _add_to_assistant(messages: Messages, field: str, text: str) -> None:
    last = _last_of_assistant(messages)
    if last is not None and last.get(field) is None:
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _last_of_assistant(messages: Messages) -> dict[str, Any] | None:
    return messages[-1] if messages and messages[-1]["role"] == "assistant" else None


def _call(item: Fields, where: str) -> dict[str, Any]:
    name = text_of(item.get("name"), f"{where}.name")
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = text_of(item.get("arguments"), f"{where}.arguments")
        name = _flat(item.get("namespace"), name)
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(item: Fields, where: str) -> str:
    if item.get("encrypted_content"):
        raise InvalidArgument("Encrypted content is not supported.", field=where)
    texts = json_objects(item.get("content"), f"{where}.content") or json_objects(
        item.get("summary"), f"{where}.summary"
    )
    return text_of(texts[0].get("text"), where) if texts else ""


def _tools(fields: Fields) -> dict[str, Any]:
    tools = [
        {"type": "function", "function": function}
        for index, tool in enumerate(json_objects(fields.get("tools"), "tools"))
        for function in _functions(tool, f"tools.{index}")
    ]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if not tools:
        return {"tool_choice": choice} if choice not in (None, "auto", "none") else {}
    return {"tools": tools, "tool_choice": choice}


def _functions(tool: Fields, where: str) -> Sequence[dict[str, Any]]:
    kind = tool.get("type")
    if kind == "namespace":
        inner = json_objects(tool.get("tools"), f"{where}.tools")
        return [
            function | {"name": _flat(tool.get("name"), function["name"])}
            for index, entry in enumerate(inner)
            for function in _functions(entry, f"{where}.tools.{index}")
        ]
    if kind not in ("function", "custom"):
        return []  # run by servers that vLLM is started with
    function = {key: value for key, value in tool.items() if key != "type"}
    function["name"] = text_of(tool.get("name"), f"{where}.name")
    return [function if kind == "function" else function | {"parameters": _FREE_FORM}]


def _namespaced(fields: Fields) -> dict[str, tuple[str, str]]:
    return {
        _flat(tool["name"], inner["name"]): (tool["name"], inner["name"])
        for tool in json_objects(fields.get("tools"), "tools")
        if tool.get("type") == "namespace"
        for inner in json_objects(tool.get("tools"), "tools")
    }


def _flat(namespace: object, name: str) -> str:
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name
