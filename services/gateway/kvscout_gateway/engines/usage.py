"""What engines say of the tokens of a prompt, in each dialect. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvscout_common.transport.http import Dialect


class Usage(NamedTuple):
    """What an engine says of a prompt."""

    prompt_tokens: int
    cached_tokens: int | None
    """None = it does not say."""


def usage_of_stream(dialect: Dialect, account: Mapping[str, Any]) -> Usage | None:
    """Reads what `StreamReport.usage` holds; None = it says nothing of the prompt."""
    prompt, cached = account.get("prompt_tokens"), account.get("cached_tokens")
    if dialect is Dialect.OPENAI:
        details = account.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
    if not isinstance(prompt, int):
        return None
    return Usage(prompt, cached if isinstance(cached, int) else None)


def usage_of_answer(dialect: Dialect, document: Mapping[str, Any]) -> Usage | None:
    """Reads an answer that came as a whole; None = it says nothing of the prompt."""
    account = document.get("usage" if dialect is Dialect.OPENAI else "meta_info")
    return usage_of_stream(dialect, account) if isinstance(account, dict) else None
