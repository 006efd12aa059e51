"""The fields of a JSON object in plain Python: the definition of `json_scan`, used where the extension is not built.

Python's own decoder reads the text as Latin-1, in which a place in the text is a place in the bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from kvscout_common.http.token_json_reference import read_tokens, write_tokens

__all__ = ["load_value", "scan_object", "write_tokens"]

MAX_DEPTH: Final = 128
"""Arrays and objects within one another."""
MAX_NUMBER_BYTES: Final = 4300
"""Length of one number: Python makes no integer of more."""
_TEXT_DEPTH: Final = 8
"""Arrays and objects within one another that are searched for text: a message's content has four."""
_CHARACTERS_A_NUMBER: Final = 4
"""A number stands for a token, which has about this many characters."""
_MAX_NAME: Final = 100
"""Characters of a name, in an error."""

# Neither goes back on what it has matched: both cost one pass whatever the text.
_SPACE: Final = re.compile(r"[ \t\n\r]*+")
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)

Field: TypeAlias = tuple[str, int, int, int, int, int]
"""The name, and the fields of `json_scan.Place`."""
Packed: TypeAlias = tuple[bytes | None, tuple[int, int] | None, int]
"""The fields of `json_scan.Packed`."""


class _Members(tuple[tuple[str, Any], ...]):
    """The members of an object, in order: a name may stand there twice."""


class _Text(NamedTuple):
    """Fields whose text is counted, and the keys of the text in their objects."""

    fields: Sequence[str]
    keys: Sequence[str]

    def characters(self, value: Any, depth: int) -> int:
        """Return the characters of the text in a value, as far as that many lists and objects within one another."""
        if depth <= 0:
            return 0
        if isinstance(value, str):
            return len(value)
        if isinstance(value, list):
            return sum(self.characters(one, depth - 1) for one in value)
        if isinstance(value, _Members):
            return sum(self.characters(one, depth - 1) for name, one in value if name in self.keys)
        # Python's truth values are integers.
        return _CHARACTERS_A_NUMBER if isinstance(value, int) else 0


class _OutOfRange(Exception):
    """A number that is out of range, as it stands in the text."""


def _integer(text: str) -> int:
    return int(_bounded(text))


def _bounded(text: str) -> str:
    if len(text) > MAX_NUMBER_BYTES:
        raise _OutOfRange(text)
    return text


def _finite(text: str) -> float:
    value = float(_bounded(text))
    if not math.isfinite(value):
        raise _OutOfRange(text)
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"is not a JSON object: {text} is not a JSON number")


_STRICT: Final = json.JSONDecoder(
    object_pairs_hook=_Members, parse_int=_integer, parse_float=_finite, parse_constant=_no_constant
)
_LENIENT: Final = json.JSONDecoder(
    object_pairs_hook=_Members, parse_int=_integer, parse_float=lambda text: float(_bounded(text))
)


def load_value(data: bytes, begin: int, end: int) -> Any:
    """See `kvscout_common.http.json_scan.load_value`."""
    return json.loads(data[begin:end])


def scan_object(
    data: bytes,
    *,
    max_fields: int,
    max_values: int,
    strict: bool,
    packed: str,
    text_fields: Sequence[str],
    text_keys: Sequence[str],
) -> tuple[Sequence[Field], Packed]:
    """See `kvscout_common.http.json_scan.scan_object`."""
    try:
        data.decode()
    except UnicodeDecodeError:
        raise ValueError("is not a JSON object: it is not UTF-8") from None
    _require_bounds(_without_strings(data), max_values)
    try:
        decoder, text = _STRICT if strict else _LENIENT, _Text(text_fields, text_keys)
        return _scan(data, max_fields, max_values, decoder, packed, text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not a JSON object: something else is expected at byte {error.pos}") from None
    except _OutOfRange as error:
        raise ValueError(f"has a number that is out of range at byte {_place_of_number(data, str(error))}") from None


def _place_of_number(data: bytes, number: str) -> int:
    """Return the byte at which a number begins that stands outside of strings."""
    bare = _STRING.sub(lambda string: b" " * len(string[0]), data)
    found = re.search(rb"(?<![\d.eE+-])" + re.escape(number.encode()) + rb"(?![\d.eE+-])", bare)
    return found.start() if found is not None else 0


def _scan(
    data: bytes, max_fields: int, max_values: int, decoder: json.JSONDecoder, packed_name: str, counted: _Text
) -> tuple[Sequence[Field], Packed]:
    text = data.decode("latin-1")
    found: dict[str, Field] = {}
    packed: Packed = (None, None, 0)
    values = 0
    at = _after(text, 0, "{")
    more = not text.startswith("}", at)
    while more:
        begin = at
        _require(text, at, '"')
        _, at = decoder.raw_decode(text, at)
        # Half of a surrogate pair is no text, and becomes a question mark.
        name = json.loads(data[begin:at]).encode("utf-8", "replace").decode()
        at = value_at = _after(text, at, ":")
        counts_text = name in counted.fields
        tokens = read_tokens(text, at) if name == packed_name else None
        if tokens is not None:
            packed, at = (tokens[0], None, 0), tokens[1]
            count, characters = 1, len(tokens[0]) if counts_text else 0
        else:
            value, at = decoder.raw_decode(text, at)
            if name == packed_name:
                packed = _first_of_several(text, value_at, value, decoder)
            count = _count_values(_without_strings(data[value_at:at]))
            if values + count > max_values:
                raise ValueError(f"has more than {max_values} values")
            characters = 0
            if counts_text:
                part = data[value_at:at]
                characters = counted.characters(
                    value if part.isascii() else decoder.decode(part.decode()), _TEXT_DEPTH + 1
                )
        values += count
        if name in found:
            raise ValueError(f"has the field '{name[:_MAX_NAME]}' twice")
        found[name] = (name, begin, value_at, at, count, characters)
        if len(found) > max_fields:
            raise ValueError(f"has more than {max_fields} fields")
        at = _space(text, at)
        more = text.startswith(",", at)
        at = _space(text, at + 1) if more else at
    if _after(text, at, "}") != len(text):
        raise json.JSONDecodeError("", text, at)
    return list(found.values()), packed


def _require_bounds(bare: bytes, max_values: int) -> None:
    """Refuse what Python should make no objects of: too deep, or certainly with too many values.

    Args:
        bare: See `_without_strings`.
        max_values: In the whole, but for lists of numbers: those are packed.
    """
    if bare.count(b"[") + bare.count(b"{") > MAX_DEPTH:
        depth = 0
        for mark in re.finditer(rb"[\[\]{}]", bare):
            depth += 1 if mark[0] in b"[{" else -1
            if depth > MAX_DEPTH:
                raise ValueError(f"has more than {MAX_DEPTH} lists and objects within one another")
    # Beside the object itself, and with one value for each list of numbers.
    if _count_values(re.sub(rb"\[[0-9,]*+\]", b"0", bare)) - 1 > max_values:
        raise ValueError(f"has more than {max_values} values")


def _without_strings(data: bytes) -> bytes:
    """Return a text without spaces, and with a number in place of each string."""
    return _STRING.sub(b"0", data).translate(None, b" \t\n\r")


def _count_values(bare: bytes) -> int:
    """Return the values in a value, at any depth, itself included."""
    containers = bare.count(b"[") + bare.count(b"{") - bare.count(b"[]") - bare.count(b"{}")
    return 1 + bare.count(b",") + containers


def _first_of_several(text: str, at: int, value: Any, decoder: json.JSONDecoder) -> Packed:
    if not isinstance(value, list) or not value or not isinstance(value[0], list | str):
        return None, None, 0
    first = _after(text, at, "[")
    _, end = decoder.raw_decode(text, first)
    tokens = read_tokens(text, first)
    return None if tokens is None else tokens[0], (first, end), len(value)


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _require(text: str, at: int, mark: str) -> None:
    if not text.startswith(mark, at):
        raise json.JSONDecodeError("", text, at)


def _after(text: str, at: int, mark: str) -> int:
    """Return the place behind a mark and the spaces around it."""
    at = _space(text, at)
    _require(text, at, mark)
    return _space(text, at + 1)
