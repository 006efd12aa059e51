"""Dialects of the HTTP APIs that fronts and engines speak: one row each, and all that differs between them. Pure.

In every API of clients `model` names the model, and `stream: true` asks for a stream of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Final

from kvscout_common.http.dialect import Dialect
from kvscout_common.worker import EngineKind

OPENAI: Final = Dialect(
    errors=("error",),
    error_marks=("object=error",),
    text=("choices[].text", "choices[].delta.content"),
    token_ids=("choices[].token_ids",),
    other_output=tuple(
        f"choices[].delta.{name}" for name in ("reasoning", "reasoning_content", "refusal", "tool_calls")
    ),
    finish=("choices[].finish_reason",),
    prompt_tokens=("usage.prompt_tokens",),
    cached_tokens=("usage.prompt_tokens_details.cached_tokens",),
    output_tokens=("usage.completion_tokens",),
    chunks=("choices[]",),
)
"""Completions and chat completions, as vLLM and SGLang write them."""
SGLANG: Final = Dialect(
    errors=("error",),
    error_marks=("object=error", "meta_info.finish_reason.status_code"),
    text=("text",),
    token_ids=("output_ids",),
    finish=("meta_info.finish_reason", "meta_info.finish_reason.type"),
    prompt_tokens=("meta_info.prompt_tokens",),
    cached_tokens=("meta_info.cached_tokens",),
    output_tokens=("meta_info.completion_tokens",),
    chunks=("output_ids", "meta_info"),
    cumulative=True,
)
"""SGLang's `/generate`."""
ANTHROPIC: Final = Dialect(
    errors=("error",),
    text=("delta.text",),
    # A call of a tool begins with its name, and has nothing else if it takes no arguments.
    other_output=("delta.thinking", "delta.partial_json", "content_block.name"),
    finish=("delta.stop_reason",),
    # Anthropic's `input_tokens` are those that were neither read from the cache nor written to it: the prompt is the
    # sum. vLLM (since PR 40912) and SGLang (`response_conversion.py`) subtract what was cached as well, and leave the
    # other fields out where nothing is known of the cache. Earlier releases of vLLM had `input_tokens` alone, of the
    # whole prompt; those of SGLang in between counted what was cached twice: their sum is no prompt's length, and
    # nothing is compared with it.
    prompt_tokens=tuple(
        f"{place}usage.{name}"
        for place in ("message.", "")
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    ),
    cached_tokens=("message.usage.cache_read_input_tokens", "usage.cache_read_input_tokens"),
    output_tokens=("message.usage.output_tokens", "usage.output_tokens"),
    chunks=("type",),
    ends=("type=message_stop",),
)
"""Anthropic's messages, as vLLM and SGLang write them."""
OPENAI_RESPONSES: Final = Dialect(
    errors=("response.error", "error"),
    error_marks=("type=error",),
    text=("delta",),
    other_output=("item.name",),
    finish=("response.incomplete_details.reason",),
    prompt_tokens=("response.usage.input_tokens", "usage.input_tokens"),
    cached_tokens=(
        "response.usage.input_tokens_details.cached_tokens",
        "usage.input_tokens_details.cached_tokens",
    ),
    output_tokens=("response.usage.output_tokens", "usage.output_tokens"),
    chunks=("type",),
    ends=("type=response.completed", "type=response.incomplete"),
    answer_ids=("response.id",),
)
"""OpenAI's responses, as vLLM and SGLang write them."""


class ErrorShape(Enum):
    """Shape of an API's errors, as a whole answer and as the last event of a stream."""

    OPENAI = auto()
    """`{"error": {"message", "type", "param", "code"}}`; in a stream the same."""
    ANTHROPIC = auto()
    """`{"type": "error", "error": {"type", "message"}}`; in a stream the same, as an event `error`."""
    RESPONSES = auto()
    """As OpenAI's; in a stream an event `error`, which has its fields beside the object as well."""


_HAND_OVER: Final[Mapping[str, Any]] = {
    "kv_transfer_params": {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    },
    "stream": False,
}
_COMPLETION_PREFILL: Final[Mapping[str, Any]] = {
    **_HAND_OVER,
    "stream_options": None,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": None,
    "n": None,
}


@dataclass(frozen=True, eq=False)
class ApiDialect:
    """Dialect of an API in which clients ask for output."""

    name: str
    """Its name in classes of output."""
    path: str
    answer: Dialect
    """Its answers."""
    errors: ErrorShape
    prompt: str
    """Field of the prompt, as errors name it."""
    limits: tuple[str, ...]
    """Fields that bound the output's tokens: the first that is there counts."""
    prefill: Mapping[str, Any] = field(repr=False)
    """Fields by which a vLLM engine computes the prompt only, and keeps it for another engine; None removes one."""
    asks_for_usage: bool = False
    """A stream reports its usage only if `stream_options` asks for it."""
    count_path: str = ""
    """Path that counts the tokens of the same request; "" = none."""
    no_handover: frozenset[EngineKind] = frozenset()
    """Engines that cannot be handed a computed prompt in this API."""
    stores: bool = False
    """Engines keep answers, which later requests mean by their names."""
    output_mark: bytes = b""
    """Bytes in a stream's first output, for fronts that do not read events; empty = its first bytes are output."""


COMPLETIONS: Final = ApiDialect(
    "completions",
    "/v1/completions",
    OPENAI,
    ErrorShape.OPENAI,
    prompt="prompt",
    limits=("max_tokens",),
    prefill=_COMPLETION_PREFILL,
    asks_for_usage=True,
)
CHAT: Final = ApiDialect(
    "chat",
    "/v1/chat/completions",
    OPENAI,
    ErrorShape.OPENAI,
    prompt="messages",
    limits=("max_completion_tokens", "max_tokens"),
    prefill=_COMPLETION_PREFILL,
    asks_for_usage=True,
)
MESSAGES: Final = ApiDialect(
    "messages",
    "/v1/messages",
    ANTHROPIC,
    ErrorShape.ANTHROPIC,
    prompt="messages",
    limits=("max_tokens",),
    prefill={**_HAND_OVER, "max_tokens": 1},
    count_path="/v1/messages/count_tokens",
    # It turns the request into a chat completion without the fields of its bootstrap room.
    no_handover=frozenset({EngineKind.SGLANG}),
)
RESPONSES: Final = ApiDialect(
    "responses",
    "/v1/responses",
    OPENAI_RESPONSES,
    ErrorShape.RESPONSES,
    prompt="input",
    limits=("max_output_tokens",),
    # What is stored belongs to the worker that answers.
    prefill={**_HAND_OVER, "max_output_tokens": 1, "store": False, "background": None},
    count_path="/v1/responses/input_tokens",
    no_handover=frozenset({EngineKind.SGLANG}),
    stores=True,
    # `response.created` comes before the prompt is computed. A line's end stands in no JSON.
    output_mark=b".delta\n",
)
API_DIALECTS: Final[Mapping[str, ApiDialect]] = MappingProxyType(
    {one.path: one for one in (COMPLETIONS, CHAT, MESSAGES, RESPONSES)}
)
"""By path."""
COUNT_PATHS: Final = tuple(one.count_path for one in API_DIALECTS.values() if one.count_path)


def errors_of(path: str) -> ErrorShape:
    """Return the shape of a path's errors: one below a dialect's own path has that of the dialect."""
    for own, api in API_DIALECTS.items():
        if path == own or path.startswith(f"{own}/"):
            return api.errors
    return ErrorShape.OPENAI
