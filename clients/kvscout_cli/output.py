"""Output of commands: results on stdout as text or JSON, everything else on stderr.

What services say is theirs: none of it moves a cursor, changes a colour, hides text or is a link, and none of it is
longer than a person would read. All that commands print goes through here, tables and styled text through `tables`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import click

from kvscout_common.plain_text import printable

MAX_CHARACTERS: Final = 20_000
"""Characters of one printed text."""
_JOINERS: Final = "\n\t\u200c\u200d"
"""Not printable by themselves, but parts of texts and of scripts."""
_UNSEEN_IN_JSON: Final = re.compile(r"[^\n -~]")


def shown(text: str, *, limit: int | None = MAX_CHARACTERS) -> str:
    """Return a text of a service as a terminal may have it: in lines, with what it would obey escaped.

    Args:
        text: Any.
        limit: Characters of it, about; None = all.
    """
    if limit is not None and len(text) > limit:
        text = f"{text[: limit * 3 // 4]} …({len(text):,} characters)… {text[-limit // 4 :]}"
    return "".join(one if _is_seen(one) else printable(one) for one in text) if not text.isprintable() else text


def _is_seen(character: str) -> bool:
    return character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs"


def echo(text: str = "", *, err: bool = False, nl: bool = True, limit: int | None = MAX_CHARACTERS) -> None:
    """Print a text.

    Args:
        text: Any.
        err: On stderr.
        nl: With the end of a line.
        limit: See `shown`.
    """
    click.echo(shown(text, limit=limit), err=err, nl=nl)


def age(seconds: float | None) -> str:
    """Return a time span as people say it; None = "–"."""
    if seconds is None:
        return "–"
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def print_json(value: Any) -> None:
    """Print results as one JSON document."""
    text = json.dumps(plain(value), indent=2, ensure_ascii=False)
    click.echo(_UNSEEN_IN_JSON.sub(lambda found: found[0] if _is_seen(found[0]) else json.dumps(found[0])[1:-1], text))


def plain(value: Any) -> Any:
    """Return dataclasses, named tuples and enums as JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
