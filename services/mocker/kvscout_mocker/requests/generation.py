"""A validated request to generate tokens, whichever endpoint it came through, pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from kvscout_common.errors import InvalidArgument, NotFound
from kvscout_mocker.config import MockerConfig
from kvscout_mocker.fields import Fields, boolean, integer, mapping, optional_integer, string
from kvscout_mocker.tokens.sequence import CacheScope
from kvscout_mocker.tokens.tool_calls import TOOL_CALL_TOKENS, ToolCall

MAX_CHOICES = 128
"""Largest `n`."""
MAX_LOGPROBS = 20
"""vLLM's `--max-logprobs`."""
DEFAULT_CHAT_TOKENS = 64
"""Tokens after which the answer to a conversation ends by itself, if its request does not say where."""
CONSTANT_LIMIT = 8_192
"""A larger limit of a chat completion is a constant of an agent (OpenCode: 32,000), and no length that is wanted."""


DEFAULT_BOOTSTRAP_PORT = 8998


class ContextExceeded(InvalidArgument):
    """A prompt or a limit does not fit the context: found by the engine, not by the reader of the body."""


class Bootstrap(NamedTuple):
    """The room in which a prefill and a decode engine meet, as the bodies of both name it."""

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A validated request."""

    model: str
    prompt: array[int]
    max_tokens: int
    ends_early: bool
    """It ends by itself after `max_tokens`, as with an end of sequence, not because of a limit."""
    scope: CacheScope
    seed: int
    choices: int
    """Completions of the same prompt."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Every chunk has a usage of its own, without cached tokens."""
    return_token_ids: bool
    logprobs: int | None
    """Alternatives listed for each token; None: no probabilities at all."""
    tokens_as_ids: bool
    """vLLM's `return_tokens_as_token_ids`: log-probabilities name tokens by their numbers."""
    report_prefix: bool
    tells_first_token: bool
    """A whole answer reports when its first token was out."""
    kv_transfer: Fields | None
    """vLLM's `kv_transfer_params`."""
    bootstrap: Bootstrap | None
    """SGLang's room; None: one engine serves the request."""
    priority: int = 0
    """Lower values go first."""
    tool_call: ToolCall | None = None
    """Tool call of the answer; None: it is text."""


def served_model(fields: Fields, config: MockerConfig) -> tuple[str, int]:
    """Return the model that a request names and the number of its adapter, 0 for the base model.

    Raises:
        InvalidArgument: It is not a string.
        NotFound: It is not served here.
    """
    model = fields.get("model")
    if model is None:
        model = config.model
    if not isinstance(model, str):
        raise InvalidArgument("must be a string", field="model")
    if model == config.model:
        return model, 0
    if model in config.lora_names:
        return model, 1 + config.lora_names.index(model)
    raise NotFound(f"The model `{model}` does not exist. Valid aliases: {config.model}.", field="model")


def check_limit(name: str, tokens: int | None, config: MockerConfig) -> None:
    """Refuse a limit that no prompt could leave room for; a lower one is cut to what the prompt leaves.

    Args:
        name: Field of the body.
        tokens: Its value; None = there is none.
        config: Configuration of the engine.

    Raises:
        ContextExceeded: It is beyond the context.
    """
    longest = config.engine.max_model_len
    if tokens is not None and tokens > longest:
        raise ContextExceeded(
            f"{name}={tokens} cannot be greater than max_model_len={longest}. Please request fewer output tokens.",
            field=name,
        )


def ends_by_itself(fields: Fields, limit: int | None, longest_wanted: int) -> bool:
    """Return whether an answer ends before its limit, and not where its request says.

    Args:
        fields: The body.
        limit: Tokens to generate at most; None = no limit.
        longest_wanted: A limit above it is not meant to be reached.
    """
    if boolean(fields, "ignore_eos") or "output_tokens" in mapping(fields, "vllm_xargs"):
        return False
    return limit is None or limit > longest_wanted


def read_generation(
    fields: Fields,
    config: MockerConfig,
    prompt: array[int],
    *,
    max_tokens: int,
    logprobs: int | None,
    ends_early: bool = False,
    tool_call: ToolCall | None = None,
) -> Generation:
    """Return the request of a body, with the fields that its endpoint has read already.

    Fields without an effect on an engine that samples nothing are accepted unread. Outputs end where a limit ends them,
    or by themselves where `vllm_xargs.output_tokens` says: no router reads that, as none knows how long an output will
    be. `ignore_eos` has the engine go on. A limit is cut to what the prompt leaves of the context, as vLLM does: agents
    send a constant.

    Args:
        fields: The body.
        config: Configuration of the engine.
        prompt: Its tokens.
        max_tokens: Tokens to generate.
        logprobs: Alternatives requested.
        ends_early: The request ends before a limit that its body sets.
        tool_call: What the answer calls.

    Raises:
        InvalidArgument: Naming the field at fault.
        ContextExceeded: There is no room for an answer.
        NotFound: The model is not served here.
    """
    model, lora_id = served_model(fields, config)
    limit = config.engine.max_model_len
    if len(prompt) >= limit:
        raise ContextExceeded(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(prompt)} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            "prompt.",
            field="input_tokens",
        )
    max_tokens = min(max_tokens, limit - len(prompt))
    stream = boolean(fields, "stream")
    options = mapping(fields, "stream_options")
    if options and not stream:
        raise InvalidArgument("may only be given with stream: true", field="stream_options")
    extra = mapping(fields, "vllm_xargs")
    report_mode = extra.get("kv_cache_report_mode", "incremental")
    if report_mode not in ("incremental", "full"):
        raise InvalidArgument("must be incremental or full", field="vllm_xargs.kv_cache_report_mode")
    length = optional_integer(extra, "output_tokens", minimum=1, prefix="vllm_xargs.")
    if length is None and tool_call is not None:
        length = TOOL_CALL_TOKENS
    if length is not None and length < max_tokens and not boolean(fields, "ignore_eos"):
        max_tokens, ends_early = length, True
    include_usage = boolean(options, "include_usage", prefix="stream_options.")
    return Generation(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        ends_early=ends_early,
        scope=CacheScope(
            lora_name=model if lora_id else "",
            lora_id=lora_id,
            cache_salt=string(fields, "cache_salt"),
            session_id=string(fields, "session_id"),
        ),
        seed=integer(fields, "seed", config.seed, minimum=0),
        choices=integer(fields, "n", 1, minimum=1, maximum=MAX_CHOICES),
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and boolean(options, "continuous_usage_stats", prefix="stream_options."),
        return_token_ids=boolean(fields, "return_token_ids"),
        logprobs=logprobs,
        tokens_as_ids=boolean(fields, "return_tokens_as_token_ids"),
        report_prefix=report_mode == "full",
        tells_first_token=boolean(extra, "tells_first_token", prefix="vllm_xargs."),
        kv_transfer=mapping(fields, "kv_transfer_params") or None,
        bootstrap=read_bootstrap(fields),
        priority=integer(fields, "priority", 0, minimum=-(2**63)),
        tool_call=tool_call,
    )


def read_bootstrap(fields: Fields) -> Bootstrap | None:
    """Return the room that a body names; None if it has none.

    Raises:
        InvalidArgument: Naming the field at fault.
    """
    room = optional_integer(fields, "bootstrap_room", minimum=0)
    if room is None:
        return None
    port = integer(fields, "bootstrap_port", DEFAULT_BOOTSTRAP_PORT, minimum=1, maximum=65_535)
    return Bootstrap(string(fields, "bootstrap_host") or "127.0.0.1", port, room)
