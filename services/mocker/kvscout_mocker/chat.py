"""The bodies of `/v1/chat/completions` and `/tokenize`: conversations become tokens through one chat template, pure.

The template is the mocker's own: each message is `<|role|> content <|end|>`, tools and tool calls are the words of
their JSON, an image (or any other part that is not text) is one token made of its content. A prompt that `/tokenize`
tokenized and one that a chat completion used are the same.
"""

from __future__ import annotations

import json
from array import array

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.completions import token_ids
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import Fields, boolean, integer, json_object, optional_integer
from kvscout_mocker.generation import MAX_LOGPROBS, Generation, read_generation, served_model
from kvscout_mocker.tokenizer import WordTokenizer

DEFAULT_CHAT_TOKENS = 64
"""Tokens after which a chat completion without a limit ends by itself."""


def parse_chat(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> Generation:
    """Read a request body.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    prompt = _conversation(fields, tokenizer)
    limit_field = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    limit = optional_integer(fields, limit_field, minimum=1)
    room = max(1, config.engine.max_model_len - len(prompt))
    alternatives = integer(fields, "top_logprobs", 0, minimum=0, maximum=MAX_LOGPROBS)
    wanted = boolean(fields, "logprobs")
    if alternatives and not wanted:
        raise InvalidArgument("may only be given with logprobs: true", field="top_logprobs")
    ends_early = limit is None and not boolean(fields, "ignore_eos")
    return read_generation(
        fields,
        config,
        prompt,
        max_tokens=limit or (min(DEFAULT_CHAT_TOKENS, room) if ends_early else room),
        limit_field=limit_field,
        logprobs=alternatives if wanted else None,
        ends_early=ends_early,
    )


def parse_tokenize(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> array[int]:
    """Return the tokens of a `/tokenize` body: of its `prompt` or, through the chat template, its `messages`.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    served_model(fields, config)
    if "messages" in fields:
        return _conversation(fields, tokenizer)
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise InvalidArgument("must be a string, or messages a list", field="prompt")
    return tokenizer.encode(prompt)


def parse_detokenize(body: object, config: MockerConfig) -> array[int]:
    """Return the tokens of a `/detokenize` body.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    served_model(fields, config)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise InvalidArgument("must be a list of token ids", field="tokens")
    return token_ids(tokens, "tokens")


def _conversation(fields: Fields, tokenizer: WordTokenizer) -> array[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("must be a list that is not empty", field="messages")
    opens_turn = boolean(fields, "add_generation_prompt", default=True)
    turns = [_message(message, f"messages.{index}") for index, message in enumerate(messages)]
    tools = fields.get("tools")
    if tools:
        turns.insert(0, ("tools", json.dumps(tools, sort_keys=True)))
    return tokenizer.encode_chat(turns, add_generation_prompt=opens_turn)


def _message(message: object, where: str) -> tuple[str, str]:
    fields = json_object(message, where)
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str):
        raise InvalidArgument("must be a string", field=f"{where}.role")
    calls = fields.get("tool_calls")
    if content is None and (calls or role == "assistant"):
        content = ""
    if isinstance(content, list):
        content = " ".join(_part(part, f"{where}.content") for part in content)
    if not isinstance(content, str):
        raise InvalidArgument("must be a string or a list of parts", field=f"{where}.content")
    return role, f"{content} {json.dumps(calls, sort_keys=True)}" if calls else content


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in part:
        raise InvalidArgument("must be a string or a list of parts with a type and a value of its name", field=where)
    value = part[kind]
    if kind == "text":
        if not isinstance(value, str):
            raise InvalidArgument("must be a string in a part of type text", field=where)
        return value
    # One word, whatever is in it: vLLM gives an image as many placeholder tokens as its model wants.
    return json.dumps(value, sort_keys=True, separators=(",", ":")).replace(" ", "")
