"""Fields of protobuf messages, written without the message: what is bytes already is not unpacked to be packed again.

Messages in a row are one message, in which repeated fields add up and of others the last one counts: so a message is
made longer by what stands behind it.
"""

from __future__ import annotations

_VARINT, _LENGTH = 0, 2


def number_field(field: int, value: int) -> bytes:
    """A field of an unsigned integer."""
    return varint(field << 3 | _VARINT) + varint(value)


def bytes_field(field: int, value: bytes) -> bytes:
    """A field that is bytes, a string, a message, or packed numbers of fixed width."""
    return b"".join((varint(field << 3 | _LENGTH), varint(len(value)), value))


def varint(value: int) -> bytes:
    """An unsigned integer, seven bits a byte."""
    if value < 0x80:
        return _ONE_BYTE[value]
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


_ONE_BYTE = tuple(bytes((value,)) for value in range(0x80))
