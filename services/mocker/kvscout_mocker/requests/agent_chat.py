"""Requests of agents' APIs as chat completions: where they end, pure.

`/v1/messages` and `/v1/responses` are converted to a chat completion, as vLLM does, and share its prompt. Their clients
set a limit that they never mean to reach, so that an answer ends by itself after some tokens.
"""

from __future__ import annotations

from kvscout_common.errors import InvalidArgument
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import Fields
from kvscout_mocker.requests.generation import DEFAULT_CHAT_TOKENS, Generation, ends_by_itself, read_generation
from kvscout_mocker.tokens.conversation import conversation_tokens
from kvscout_mocker.tokens.tokenizer import WordTokenizer
from kvscout_mocker.tokens.tool_calls import chosen_call


def generation_of(chat: Fields, limit: int | None, config: MockerConfig, tokenizer: WordTokenizer) -> Generation:
    """Return the request of a converted body.

    Args:
        chat: `messages`, `tools`, `tool_choice` and the other fields of a chat completion.
        limit: Tokens to generate at most; None = no limit.
        config: Configuration of the engine.
        tokenizer: Words to tokens.

    Raises:
        InvalidArgument: Naming the field at fault.
        ContextExceeded: There is no room for an answer.
        NotFound: The model is not served here.
    """
    prompt = conversation_tokens(chat, tokenizer)
    longest = config.engine.max_model_len if limit is None else limit
    ends_early = ends_by_itself(chat, limit, DEFAULT_CHAT_TOKENS)
    return read_generation(
        chat,
        config,
        prompt,
        max_tokens=DEFAULT_CHAT_TOKENS if ends_early else longest,
        logprobs=None,
        ends_early=ends_early,
        tool_call=chosen_call(chat, prompt, config.tool_call_share),
    )


def text_of(value: object, where: str) -> str:
    """Return a text.

    Raises:
        InvalidArgument: It is something else.
    """
    if not isinstance(value, str):
        raise InvalidArgument("must be a string", field=where)
    return value
