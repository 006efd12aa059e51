"""The bodies of `/v1/chat/completions` and `/tokenize`, pure: what one tokenized is the prompt of the other."""

from __future__ import annotations

from array import array

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import boolean, integer, json_object, optional_integer, token_ids
from kvscout_mocker.requests.generation import (
    CONSTANT_LIMIT,
    DEFAULT_CHAT_TOKENS,
    MAX_LOGPROBS,
    Generation,
    check_limit,
    ends_by_itself,
    read_generation,
    served_model,
)
from kvscout_mocker.tokens.conversation import conversation_tokens
from kvscout_mocker.tokens.tokenizer import WordTokenizer
from kvscout_mocker.tokens.tool_calls import chosen_call


def parse_chat(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> Generation:
    """Read a request body.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    prompt = conversation_tokens(fields, tokenizer)
    limit_field = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    limit = optional_integer(fields, limit_field, minimum=1)
    check_limit(limit_field, limit, config)
    room = max(1, config.engine.max_model_len - len(prompt))
    alternatives = integer(fields, "top_logprobs", 0, minimum=0, maximum=MAX_LOGPROBS)
    wanted = boolean(fields, "logprobs")
    if alternatives and not wanted:
        raise InvalidArgument("may only be given with logprobs: true", field="top_logprobs")
    ends_early = ends_by_itself(fields, limit, CONSTANT_LIMIT)
    return read_generation(
        fields,
        config,
        prompt,
        max_tokens=min(DEFAULT_CHAT_TOKENS, room) if ends_early else limit or room,
        logprobs=alternatives if wanted else None,
        ends_early=ends_early,
        tool_call=chosen_call(fields, prompt, config.tool_call_share),
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
        return conversation_tokens(fields, tokenizer)
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
