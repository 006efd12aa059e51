"""Token ids as JSON in plain Python: what `kvscout_common.http.token_json` uses where the extension is not built."""

from __future__ import annotations

import re
from array import array

_NUMBER = r"(?:0|[1-9][0-9]*+)[ \t\n\r]*+"
# Never goes back on what it has matched: it costs one pass whatever the text.
_LIST = re.compile(rf"\[[ \t\n\r]*+(?:{_NUMBER}(?:,[ \t\n\r]*+{_NUMBER})*+)?+\]")
_LONGEST = re.compile(r"[0-9]{11}")
_SLICE_CHARACTERS = 256 * 1024
"""Of a list that are read at a time: a number in it is an object meanwhile."""


def write_tokens(token_ids: bytes) -> bytes:
    """See `kvscout_common.http.token_json.write_tokens`."""
    # A list of integers prints as JSON, and several times as fast as json.dumps writes it.
    return str(memoryview(token_ids).cast("I").tolist())[1:-1].replace(" ", "").encode()


def read_tokens(text: str, at: int) -> tuple[bytes, int] | None:
    """See `kvscout_common.http.token_json.read_tokens`."""
    found = _LIST.match(text, at)
    if found is None or _LONGEST.search(found[0]):
        return None
    packed = array("I")
    begin, last = at + 1, found.end() - 1
    try:
        while begin < last:
            comma = text.find(",", begin + _SLICE_CHARACTERS, last)
            end = last if comma < 0 else comma
            if numbers := text[begin:end].strip(" \t\n\r"):
                packed.extend(map(int, numbers.split(",")))
            begin = end + 1
    except OverflowError:
        return None
    return packed.tobytes(), found.end()
