"""The body of `/v1/completions`, pure."""

from __future__ import annotations

from array import array

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import Fields, integer, json_object, optional_integer, token_ids
from kvscout_mocker.requests.generation import MAX_LOGPROBS, Generation, check_limit, read_generation
from kvscout_mocker.tokens.tokenizer import WordTokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions, vLLM's too."""


def parse_completion(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> Generation:
    """Read a request body.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = json_object(body)
    max_tokens = integer(fields, "max_tokens", DEFAULT_MAX_TOKENS, minimum=1)
    check_limit("max_tokens", max_tokens, config)
    return read_generation(
        fields,
        config,
        _prompt(fields, tokenizer),
        max_tokens=max_tokens,
        logprobs=optional_integer(fields, "logprobs", minimum=0, maximum=MAX_LOGPROBS),
    )


def _prompt(fields: Fields, tokenizer: WordTokenizer) -> array[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    elif isinstance(prompt, list):
        tokens = token_ids(prompt, "prompt")
    else:
        raise InvalidArgument("must be a string or a list of token ids", field="prompt")
    if not tokens:
        raise InvalidArgument("must not be empty", field="prompt")
    return tokens
