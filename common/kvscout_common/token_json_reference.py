"""Token ids as JSON in plain Python: what `kvscout_common.token_json` uses where the extension is not built."""

from __future__ import annotations

import json
import re
from array import array

_LIST = re.compile(r"\[[ \t\n\r]*(?:(?:0|[1-9][0-9]*)[ \t\n\r]*(?:,[ \t\n\r]*(?:0|[1-9][0-9]*)[ \t\n\r]*)*)?\]")
_LONGEST = re.compile(r"[0-9]{11}")


def write_tokens(token_ids: bytes) -> bytes:
    """See `kvscout_common.token_json.write_tokens`."""
    # A list of integers prints as JSON, and several times as fast as json.dumps writes it.
    return str(memoryview(token_ids).cast("I").tolist())[1:-1].replace(" ", "").encode()


def read_tokens(text: str, at: int) -> tuple[bytes, int] | None:
    """See `kvscout_common.token_json.read_tokens`."""
    found = _LIST.match(text, at)
    if found is None or _LONGEST.search(found[0]):
        return None
    try:
        return array("I", json.loads(found[0])).tobytes(), found.end()
    except OverflowError:
        return None
