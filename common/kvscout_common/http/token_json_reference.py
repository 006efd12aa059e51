"""Token ids as JSON has them, a list of numbers, without an object for each: packed they are little-endian u32.

Plain Python, for `json_scan` where the extension is not built.
"""

from __future__ import annotations

import re
from array import array

_NUMBER = r"(?:0|[1-9][0-9]*+)[ \t\n\r]*+"
# Never goes back on what it has matched: it costs one pass whatever the text.
_LIST = re.compile(rf"\[[ \t\n\r]*+(?:{_NUMBER}(?:,[ \t\n\r]*+{_NUMBER})*+)?+\]")
_LONGEST = re.compile(r"[0-9]{11}")


def write_tokens(token_ids: bytes) -> bytes:
    """Write the inside of a list; see `json_scan.write_tokens`."""
    return ",".join(map(str, memoryview(token_ids).cast("I"))).encode()


def read_tokens(text: str, at: int) -> tuple[bytes, int] | None:
    """Read a list of token ids from a text.

    Args:
        text: ASCII.
        at: The place of the list's bracket.

    Returns:
        The token ids, packed, and the place behind the list; None = there is none, or something else is in it than
        numbers of 32 bits that have neither sign nor fraction nor exponent.
    """
    found = _LIST.match(text, at)
    if found is None or _LONGEST.search(found[0]):
        return None
    numbers = found[0][1:-1].strip(" \t\n\r")
    try:
        packed = array("I", map(int, numbers.split(",") if numbers else ()))
    except OverflowError:
        return None
    return packed.tobytes(), found.end()
