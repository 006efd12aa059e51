"""The body of `/v1/completions`: what a request asks for, and the answers' JSON, pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_mocker.config import MockerConfig, PromptTokensDetails
from kvscout_mocker.sequence import CacheScope
from kvscout_mocker.tokenizer import WordTokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions, vLLM's too."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A validated request."""

    model: str
    prompt: array[int]
    max_tokens: int
    scope: CacheScope
    seed: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    report_prefix: bool


def parse_completion(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> CompletionRequest:
    """Read a request body. Fields without an effect on an engine that samples nothing are accepted unread.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = parse_object(body)
    model, lora_id = parse_model(fields, config)
    prompt = _prompt(fields, tokenizer)
    max_tokens = _integer(fields, "max_tokens", DEFAULT_MAX_TOKENS, minimum=1)
    limit = config.engine.max_model_len
    if len(prompt) + max_tokens > limit:
        raise InvalidArgument(
            f"this model's maximum context length is {limit} tokens, but the request has {len(prompt)} "
            f"prompt tokens and asks for {max_tokens} output tokens",
            field="max_tokens" if len(prompt) < limit else "prompt",
        )
    if _integer(fields, "n", 1, minimum=1) != 1:
        raise InvalidArgument("only one completion a request is supported", field="n")
    stream = _flag(fields, "stream")
    options = _mapping(fields, "stream_options")
    if options and not stream:
        raise InvalidArgument("may only be given with stream: true", field="stream_options")
    report_mode = _mapping(fields, "vllm_xargs").get("kv_cache_report_mode", "incremental")
    if report_mode not in ("incremental", "full"):
        raise InvalidArgument("must be incremental or full", field="vllm_xargs.kv_cache_report_mode")
    return CompletionRequest(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        scope=CacheScope(
            lora_name=model if lora_id else "",
            lora_id=lora_id,
            cache_salt=_string(fields, "cache_salt"),
            session_id=_string(fields, "session_id"),
        ),
        seed=_integer(fields, "seed", config.seed, minimum=0),
        stream=stream,
        include_usage=_flag(options, "include_usage", prefix="stream_options."),
        return_token_ids=_flag(fields, "return_token_ids"),
        report_prefix=report_mode == "full",
    )


def parse_tokenize(body: object, config: MockerConfig, tokenizer: WordTokenizer) -> array[int]:
    """The tokens of a `/tokenize` body: of its `prompt` or, through the chat template, its `messages`.

    Raises:
        InvalidArgument: Naming the field at fault.
        NotFound: The model is not served here.
    """
    fields = parse_object(body)
    if "model" in fields:
        parse_model(fields, config)
    if "messages" not in fields:
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise InvalidArgument("must be a string, or messages a list", field="prompt")
        return tokenizer.encode(prompt)
    messages = fields["messages"]
    if not isinstance(messages, list):
        raise InvalidArgument("must be a list", field="messages")
    generation_prompt = _flag(fields, "add_generation_prompt", default=True)
    return tokenizer.encode_chat(
        [_message(message, f"messages.{index}") for index, message in enumerate(messages)],
        add_generation_prompt=generation_prompt,
    )


def parse_object(body: object) -> Mapping[str, Any]:
    """The body as a JSON object.

    Raises:
        InvalidArgument: It is something else.
    """
    if not isinstance(body, dict):
        raise InvalidArgument("must be a JSON object", field="body")
    return body


def parse_model(fields: Mapping[str, Any], config: MockerConfig) -> tuple[str, int]:
    """The model that a request names and the number of its adapter, 0 for the base model.

    Raises:
        InvalidArgument: It is not a string.
        NotFound: It is not served here.
    """
    model = fields.get("model", config.model)
    if not isinstance(model, str):
        raise InvalidArgument("must be a string", field="model")
    if model == config.model:
        return model, 0
    if model in config.lora_names:
        return model, 1 + config.lora_names.index(model)
    raise NotFound(f"the model `{model}` does not exist", field="model")


def usage(prompt_tokens: int, cached_tokens: int, output_tokens: int, details: PromptTokensDetails) -> dict[str, Any]:
    """The usage object."""
    told = details is PromptTokensDetails.ALWAYS or (details is PromptTokensDetails.NONZERO and cached_tokens > 0)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens} if told else None,
    }


def choice(text: str, tokens: list[int] | None, *, finished: bool) -> dict[str, Any]:
    """One choice: of a whole answer, or of one chunk of a stream.

    Args:
        text: The words generated.
        tokens: Their ids if they were asked for.
        finished: Whether this is the last; only the length ever ends a completion here.
    """
    fields: dict[str, Any] = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": "length" if finished else None,
        "stop_reason": None,
    }
    if tokens is not None:
        fields["token_ids"] = tokens
    return fields


def _prompt(fields: Mapping[str, Any], tokenizer: WordTokenizer) -> array[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt)
    elif isinstance(prompt, list):
        try:
            tokens = array("I", prompt)
        except (TypeError, OverflowError):
            raise InvalidArgument(
                "must be a string or one list of token ids between 0 and 4294967295", field="prompt"
            ) from None
    else:
        raise InvalidArgument("must be a string or a list of token ids", field="prompt")
    if not tokens:
        raise InvalidArgument("must not be empty", field="prompt")
    return tokens


def _message(message: object, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise InvalidArgument("must be an object", field=where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidArgument("must be a string", field=f"{where}.role")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = " ".join(texts)
    if not isinstance(content, str):
        raise InvalidArgument("must be a string or a list of text parts", field=f"{where}.content")
    return role, content


def _integer(fields: Mapping[str, Any], name: str, default: int, *, minimum: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**63:
        raise InvalidArgument(f"must be an integer of at least {minimum}", field=name)
    return value


def _flag(fields: Mapping[str, Any], name: str, *, default: bool = False, prefix: str = "") -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidArgument("must be true or false", field=prefix + name)
    return value


def _string(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or not value:
        raise InvalidArgument("must be a string that is not empty", field=name)
    return value


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument("must be an object", field=name)
    return value
