"""Dialects of the HTTP APIs that fronts and engines speak: one row each. Pure."""

from __future__ import annotations

from typing import Final

from kvscout_common.http.dialect import Dialect

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
