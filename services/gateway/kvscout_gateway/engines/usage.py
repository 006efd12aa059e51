"""Usage of a request as engines report it, in each dialect. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvscout_common.http.http import Dialect

MAX_OUTPUT_TOKENS = 2**31
"""More is no number of tokens."""


class Usage(NamedTuple):
    """Token usage of a request, as its engine reports it."""

    prompt_tokens: int
    cached_tokens: int | None
    """None = it does not say."""
    output_tokens: int = 0
    """0 = it does not say."""


def usage_of_stream(dialect: Dialect, account: Mapping[str, Any]) -> Usage | None:
    """Read what `StreamReport.usage` holds; None = it says nothing of the prompt."""
    prompt, cached, output = (account.get(f"{what}_tokens") for what in ("prompt", "cached", "completion"))
    if dialect is Dialect.OPENAI:
        details = account.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if not isinstance(prompt, int):
        return None
    return Usage(prompt, cached if isinstance(cached, int) else None, _number(output))


def output_tokens_of(account: Mapping[str, Any]) -> int:
    """Return the output's length, as completions or newer APIs of OpenAI and Anthropic name it; 0 = unknown."""
    return _number(account.get("completion_tokens")) or _number(account.get("output_tokens"))


def _number(tokens: object) -> int:
    return tokens if isinstance(tokens, int) and 0 < tokens <= MAX_OUTPUT_TOKENS else 0


def usage_of_answer(dialect: Dialect, document: Mapping[str, Any]) -> Usage | None:
    """Read an answer that came as a whole; None = it says nothing of the prompt."""
    account = document.get("usage" if dialect is Dialect.OPENAI else "meta_info")
    return usage_of_stream(dialect, account) if isinstance(account, dict) else None
