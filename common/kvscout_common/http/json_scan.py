"""Finds the fields of a JSON object, and checks every byte of it, without making an object of any value.

It costs one pass over the bytes, and memory for the object's own fields, whatever stands in it. The work is done by the
extension, which lets other threads run meanwhile if the text is long, or, where that is not built, by
`json_scan_reference`, with equal results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvscout_common.hashing import native_available

if TYPE_CHECKING or not native_available():
    from kvscout_common.http import json_scan_reference as _backend
else:
    import kvscout_native as _backend

MAX_FIELDS: Final = 10_000
"""Largest number of fields of the object itself."""
MAX_VALUES: Final = 2_000_000
"""In an object, at any depth. Token ids that are packed are none."""


TEXT_FIELDS: Final = ("prompt", "messages", "system", "input", "instructions")
"""Fields whose text is counted."""
TEXT_KEYS: Final = ("content", "text", "output", "thinking")
"""Keys of the text in their objects."""


class Place(NamedTuple):
    """Place of a field, in bytes: from the quotation mark of its name to the end of its value."""

    begin: int
    value: int
    end: int
    values: int
    """In it, at any depth, itself included."""
    characters: int
    """Characters of text in it, if it is one of the text fields; else 0."""


class Packed(NamedTuple):
    """Content of the field whose token ids are packed."""

    token_ids: bytes | None = None
    """Little-endian u32: its list, or the first of its lists; None = there is no such list."""
    first: tuple[int, int] | None = None
    """Beginning and end of the first of several texts or lists, in bytes; None = it is no list of such."""
    prompts: int = 0
    """Number of such, other values in the list counted as well."""


load_value: Final = _backend.load_value
"""Takes a text that was scanned, and where a value of it begins and ends, in bytes; returns the value as Python
objects. Other threads run while a long one is made."""
_made: Final = tuple.__new__
"""Makes a named tuple of a tuple without a call in Python."""


class Scanned(NamedTuple):
    """An object."""

    places: dict[str, Place]
    """By the field's name."""
    packed: Packed


def scan_object(data: bytes, *, strict: bool = True, packed: str = "prompt", max_values: int = MAX_VALUES) -> Scanned:
    """Find the fields of an object.

    Args:
        data: UTF-8.
        strict: NaN, infinity and what is out of range are refused; engines write them.
        packed: The field whose token ids are packed.
        max_values: In the object, at any depth.

    Raises:
        ValueError: It is no JSON object, has a field twice, or is beyond a bound; says which, as a predicate.
    """
    fields, found = _backend.scan_object(
        data,
        max_fields=MAX_FIELDS,
        max_values=max_values,
        strict=strict,
        packed=packed,
        text_fields=TEXT_FIELDS,
        text_keys=TEXT_KEYS,
    )
    return Scanned({place[0]: _made(Place, place[1:]) for place in fields}, Packed(*found))


def load_json(data: bytes, *, max_values: int) -> Any:
    """Read any JSON as Python objects, if it is small.

    Args:
        data: UTF-8.
        max_values: In it, at any depth.

    Raises:
        ValueError: It is no JSON, or there is more in it; says which, as a predicate.
    """
    scan_object(b'{"":' + data + b"}", strict=False, max_values=max_values)
    return load_value(data, 0, len(data))


def write_tokens(token_ids: bytes) -> bytes:
    """Write token ids as JSON, without the brackets of the list.

    Args:
        token_ids: Packed: little-endian u32.
    """
    return _backend.write_tokens(token_ids)
