"""Readers of an engine's answer: a few fields of it, however long it is, and the error of a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.json_fields import INLINE_BYTES, Fields

MAX_WORDS_BYTES: Final = 64 * 1024
"""Longest error that is read in a stream, in bytes; a longer one counts as none."""
_READ: Final = ("id", "usage", "meta_info", "kv_transfer_params")
_ERROR: Final = "error"


async def answer_read(data: bytes) -> dict[str, Any]:
    """Read the fields of a whole answer that concern us: `error`, `id`, `usage`, `meta_info` and `kv_transfer_params`.

    It is empty where the answer is no JSON object, or has more in it than `json_scan` allows.
    """
    return _read(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(_read, data)


def words_read(text: bytes) -> Any:
    """Return the error in a stream's report; None = none that is read."""
    try:
        return json.loads(text) if 0 < len(text) <= MAX_WORDS_BYTES else None
    except (ValueError, RecursionError):
        return None


def _read(data: bytes) -> dict[str, Any]:
    try:
        fields = Fields.scanned(data, strict=False)
    except ValueError:
        return {}
    found: dict[str, Any] = {}
    for name in _READ:
        try:
            if name in fields:
                found[name] = fields[name]
        except InvalidArgument:
            pass  # as good as absent: nothing that we read is so long
    try:
        found[_ERROR] = fields.get(_ERROR)
    except InvalidArgument as error:
        found[_ERROR] = str(error)
    return found
