"""What an engine says at the end of a response about the tokens it took. Pure."""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any, NamedTuple

_USAGE = re.compile(r'(?<!\\)"usage"\s*:\s*(?={)')
"""Not within a string, where quotes are escaped; and not null, as it is before a stream's last event."""
MAX_BYTES = 256 * 1024
"""Of a response's end that are looked at."""
_DECODER = json.JSONDecoder()


class Usage(NamedTuple):
    """As engines that speak OpenAI's API report it."""

    prompt_tokens: int
    cached_tokens: int | None
    """None = not told; vLLM leaves it out where it is 0, or was not asked to."""


def usage_of(tail: bytes) -> Usage | None:
    """The last usage in the last bytes of a response, whole or in events; None if there is none.

    Args:
        tail: May begin anywhere.
    """
    text = tail[-MAX_BYTES:].decode("utf-8", "replace")
    last = deque(_USAGE.finditer(text), maxlen=1)
    if not last:
        return None
    try:
        usage, _ = _DECODER.raw_decode(text, last[0].end())
    except (ValueError, RecursionError):
        return None
    prompt_tokens = _count(usage.get("prompt_tokens"))
    if prompt_tokens is None:
        return None
    details = usage.get("prompt_tokens_details")
    return Usage(prompt_tokens, _count(details.get("cached_tokens")) if isinstance(details, dict) else None)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
