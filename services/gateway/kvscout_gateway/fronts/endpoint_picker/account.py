"""Usage at the end of an engine's response. Pure."""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any

_USAGE = re.compile(r'(?<!\\)"usage"\s*:\s*(?={)')
"""Not within a string, where quotes are escaped; and not null, as it is before a stream's last event."""
MAX_BYTES = 256 * 1024
"""Bytes at a response's end that are searched."""
_DECODER = json.JSONDecoder()


def last_account(tail: bytes) -> dict[str, Any]:
    """Return the last `usage` in the last bytes of a response, whole or in events; empty if there is none.

    Args:
        tail: May begin anywhere.
    """
    text = tail[-MAX_BYTES:].decode("utf-8", "replace")
    last = deque(_USAGE.finditer(text), maxlen=1)
    if not last:
        return {}
    try:
        usage, _ = _DECODER.raw_decode(text, last[0].end())
    except (ValueError, RecursionError):
        return {}
    assert isinstance(usage, dict)
    return usage
