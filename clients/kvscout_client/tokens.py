"""Token ids in the forms that callers have them in."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

from kvscout_common.errors import InvalidArgument

Tokens: TypeAlias = "Sequence[int] | array[int] | bytes | bytearray | memoryview"
"""Token ids, each 0..2³²−1: a sequence of integers, any one-dimensional integer buffer (`array`, numpy), or raw bytes,
which are read as u32 little-endian."""

_INTEGER_FORMATS = frozenset("bBhHiIlLqQnN")


def token_list(tokens: object) -> Sequence[int]:
    """Return the ids as a sequence that protobuf takes, without a Python loop over them.

    Raises:
        InvalidArgument: They are text, of another type, or bytes that are no whole number of ids.
    """
    if isinstance(tokens, (list, tuple)):
        return tokens
    if isinstance(tokens, (bytes, bytearray)):
        if len(tokens) % 4:
            raise InvalidArgument(f"{len(tokens)} bytes are not a whole number of u32 ids", field="token_ids")
        words = array("I", bytes(tokens))
        if sys.byteorder == "big":
            words.byteswap()
        return words.tolist()
    view = _integer_buffer(tokens)
    if view is not None:
        ids: list[int] = view.tolist()
        return ids
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        raise InvalidArgument(f"takes token ids, not {type(tokens).__name__}", field="token_ids")
    return tokens


def _integer_buffer(tokens: Any) -> memoryview | None:
    try:
        view = memoryview(tokens)
    except TypeError:
        return None
    if view.ndim != 1 or view.format.lstrip("@=<") not in _INTEGER_FORMATS:
        raise InvalidArgument(f"takes one dimension of integers, not {view.ndim} of {view.format!r}", field="token_ids")
    return view
