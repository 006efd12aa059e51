"""Known names, for errors about one that is not: the nearest, and the first of all. Number and length are bounded,
because callers name what they like.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice
from typing import Final

from kvscout_common.plain_text import printable

MAX_LISTED: Final = 8
_MAX_COMPARED: Final = 64
_MAX_NAME_CHARACTERS: Final = 80


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like another; "" = none is."""
    if len(name) > _MAX_NAME_CHARACTERS:
        return ""
    compared = [one for one in islice(known, _MAX_COMPARED) if len(one) <= _MAX_NAME_CHARACTERS]
    by_folded = {one.casefold(): one for one in compared}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1)
    return by_folded[found[0]] if found else ""


def or_known(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that refuses a name: which one was meant perhaps, and which there are.

    Args:
        name: The unknown name.
        known: All names that the caller may see.
    """
    names = sorted(set(known))
    if not names:
        return "; there are none"
    meant = nearest(name, names)
    listed = ", ".join(printable(one, _MAX_NAME_CHARACTERS) for one in names[:MAX_LISTED])
    more = f" and {len(names) - MAX_LISTED:,} more" if len(names) > MAX_LISTED else ""
    return (f"; did you mean {printable(meant)!r}? Known" if meant else "; known") + f": {listed}{more}"
