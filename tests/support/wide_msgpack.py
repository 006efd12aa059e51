"""Values as msgpack in any of the forms that the format allows, as no library packs them: longer integers and lengths
than needed, keys of any type, keys twice, and bytes as they are."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

INTEGERS = (
    (0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"), (0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"),
)  # fmt: skip


class Raw(NamedTuple):
    """Bytes that are put in place of a value."""

    data: bytes


class Entries(NamedTuple):
    """A map by its keys and values, in order."""

    pairs: Sequence[tuple[Any, Any]]


def extension(kind: int, data: bytes) -> list[Raw]:
    """Every form of an extension with this type and data."""
    body = struct.pack(">b", kind) + data
    forms = [struct.pack(form, tag, len(data)) for tag, form in ((0xC8, ">BH"), (0xC9, ">BI"))]
    if len(data) < 2**8:
        forms.append(bytes([0xC7, len(data)]))
    if len(data) in (1, 2, 4, 8, 16):
        forms.append(bytes([0xD4 + len(data).bit_length() - 1]))
    return [Raw(head + body) for head in forms]


def pack(value: Any, rng: random.Random, wide: float) -> bytes:  # noqa: PLR0911  # one for each type
    """Pack a value; `wide` is the probability of a longer form than needed."""
    match value:
        case Raw():
            return value.data
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return _integer(value, rng if rng.random() < wide else None)
        case float():
            # Half of them shorter, and less exact.
            return struct.pack(">Bf", 0xCA, value) if rng.random() < wide else struct.pack(">Bd", 0xCB, value)
        case str():
            data = value.encode(errors="surrogateescape")
            return _head(len(data), rng, wide, 0xA0, 32, (0xD9, 0xDA, 0xDB)) + data
        case bytes():
            return _head(len(value), rng, wide, 0, 0, (0xC4, 0xC5, 0xC6)) + value
        case list() | tuple() if not isinstance(value, Entries):
            return _head(len(value), rng, wide, 0x90, 16, (0, 0xDC, 0xDD)) + b"".join(pack(v, rng, wide) for v in value)
        case dict() | Entries():
            pairs = value.pairs if isinstance(value, Entries) else list(value.items())
            packed = b"".join(pack(key, rng, wide) + pack(entry, rng, wide) for key, entry in pairs)
            return _head(len(pairs), rng, wide, 0x80, 16, (0, 0xDE, 0xDF)) + packed
    raise TypeError(type(value))


def _integer(value: int, rng: random.Random | None) -> bytes:
    if rng is None and -32 <= value < 128:
        return struct.pack(">b", value)
    forms = []
    for tag, form in INTEGERS:
        try:
            forms.append(bytes([tag]) + struct.pack(form, value))
        except struct.error:
            continue
    return rng.choice(forms) if rng is not None else min(forms, key=len)


def _head(length: int, rng: random.Random, wide: float, fixed: int, below: int, tags: tuple[int, int, int]) -> bytes:
    forms = [
        struct.pack(form, tag, length)
        for tag, form, most in zip(tags, (">BB", ">BH", ">BI"), (2**8, 2**16, 2**32), strict=True)
        if tag and length < most
    ]
    if length < below:
        forms.insert(0, bytes([fixed | length]))
    return rng.choice(forms) if rng.random() < wide else forms[0]
