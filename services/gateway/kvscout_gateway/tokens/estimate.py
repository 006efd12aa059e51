"""How long a prompt and its answer may be, where nobody has counted tokens: for the load that they bring. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

BYTES_A_TOKEN: Final = 4
"""Of text, about."""
MAX_BOUND: Final = (1 << 32) - 1
_DEPTH: Final = 8
"""Of lists and objects within one another that are looked into: a message's content has four."""


def estimated_tokens(request: Mapping[str, Any]) -> int:
    """About so many tokens has the prompt of a request, if it is text: images and names are not counted."""
    prompts = (request.get(name) for name in ("prompt", "messages", "input"))
    return sum(_text_bytes(prompt, _DEPTH) for prompt in prompts) // BYTES_A_TOKEN


def output_bound(request: Mapping[str, Any]) -> int:
    """Tokens that a request's output may have; 0 = it does not say."""
    for name in ("max_completion_tokens", "max_tokens"):
        bound = request.get(name)
        if isinstance(bound, int) and 0 < bound <= MAX_BOUND:
            return int(bound)
    return 0


def _text_bytes(value: Any, depth: int) -> int:
    if isinstance(value, str | bytes):  # packed, a token id has as many bytes as a token of text
        return len(value)
    if isinstance(value, list) and depth:
        return sum(_text_bytes(one, depth - 1) for one in value)
    if isinstance(value, dict) and depth:
        return sum(_text_bytes(value.get(name), depth - 1) for name in ("content", "text"))
    return BYTES_A_TOKEN if isinstance(value, int) else 0
