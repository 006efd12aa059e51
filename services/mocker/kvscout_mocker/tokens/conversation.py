"""The mocker's chat template: the messages and tools of a chat completion become tokens, pure.

Each message is `<|role|> content <|end|>`; tools and tool calls are the words of their JSON, reasoning stands between
`<think>` and `</think>`, an image (or any other part that is not text) is one token made of its content. As a vLLM
template it sees of a tool, a call or a part what vLLM's reader of bodies leaves: fields that OpenAI does not know, ids
of calls and the spaces in the JSON of arguments make no difference, the order of a schema's keys does.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.fields import Fields, boolean, json_object, json_objects
from kvscout_mocker.tokens.tokenizer import WordTokenizer
from kvscout_mocker.tokens.tool_calls import described_tools

_TEXTS = ("text", "input_text", "output_text")


def conversation_tokens(chat: Fields, tokenizer: WordTokenizer) -> array[int]:
    """Return the tokens of a conversation.

    Args:
        chat: A chat completion: `messages`, `tools`, and how its prompt ends.
        tokenizer: Words to tokens.

    Raises:
        InvalidArgument: Naming the field at fault.
    """
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("must be a list that is not empty", field="messages")
    turns = [_message(message, f"messages.{index}") for index, message in enumerate(messages)]
    described = described_tools(chat.get("tools"))
    if described:
        turns.insert(0, ("tools", json.dumps(described)))
    return tokenizer.encode_chat(
        turns,
        add_generation_prompt=boolean(chat, "add_generation_prompt", default=True),
        continue_final=boolean(chat, "continue_final_message"),
    )


def _message(message: object, where: str) -> tuple[str, str]:
    fields = json_object(message, where)
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str):
        raise InvalidArgument("must be a string", field=f"{where}.role")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        content = " ".join(_part(part, f"{where}.content") for part in content)
    if not isinstance(content, str):
        raise InvalidArgument("must be a string or a list of parts", field=f"{where}.content")
    words = [content] if content else []
    reasoning = fields.get("reasoning") or fields.get("reasoning_content")
    if isinstance(reasoning, str) and role == "assistant":
        words.insert(0, f"<think> {reasoning} </think>")
    calls = json_objects(fields.get("tool_calls"), f"{where}.tool_calls")
    return role, " ".join([*words, *_calls(calls, where)])


def _calls(calls: Sequence[Fields], where: str) -> list[str]:
    texts = []
    for call in calls:
        function = json_object(call.get("function"), f"{where}.tool_calls.function")
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            arguments = {}  # of a call that a limit cut off: the conversation must be able to go on
        texts.append(json.dumps({"name": function.get("name"), "arguments": arguments}))
    return texts


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind == "tool_reference":
        return str(part.get("name"))
    key = {"input_image": "image_url"}.get(str(kind), "text" if kind in _TEXTS else kind)
    if not isinstance(part, dict) or not isinstance(key, str) or key not in part:
        raise InvalidArgument("must be a string or a list of parts with a type and a value of its name", field=where)
    value = part[key]
    if key == "text":
        if not isinstance(value, str):
            raise InvalidArgument("must be a string in a part of type text", field=where)
        return value
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    # One word, whatever is in it: vLLM gives an image as many placeholder tokens as its model wants.
    return json.dumps(value, sort_keys=True, separators=(",", ":")).replace(" ", "")
