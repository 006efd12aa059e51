"""Output length in the account of tokens of a response whose API is not known. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvscout_common.http.dialect import is_count


def output_tokens_of(account: Mapping[str, Any]) -> int:
    """Return the output's length, as completions or newer APIs of OpenAI and Anthropic name it; 0 = unknown."""
    counts = (account.get("completion_tokens"), account.get("output_tokens"))
    return next((count for count in counts if is_count(count) and count), 0)
