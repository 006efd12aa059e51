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


def bytes_of_field(message: bytes, field: int) -> bytes:
    """The value of the last field of a number that is of bytes; b"" = there is none.

    Args:
        message: As protobuf has written it: nothing in it is checked.
        field: Its number.
    """
    at, found = 0, b""
    while at < len(message):
        tag, at = _read_varint(message, at)
        match tag & 7:
            case 0:
                _, at = _read_varint(message, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case _:
                size, at = _read_varint(message, at)
                if tag >> 3 == field:
                    found = message[at : at + size]
                at += size
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
