"""Fields of protobuf messages, written without the message: what is bytes already is not unpacked to be packed again.

Messages in a row are one message, in which repeated fields add up and of others the last one counts: so a message is
made longer by what stands behind it.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _LENGTH = 0, 2


def number_field(field: int, value: int) -> bytes:
    """Return a field of an unsigned integer."""
    return varint(field << 3 | _VARINT) + varint(value)


def bytes_field(field: int, value: bytes) -> bytes:
    """Return a field that is bytes, a string, a message, or packed numbers of fixed width."""
    return b"".join((varint(field << 3 | _LENGTH), varint(len(value)), value))


def varint(value: int) -> bytes:
    """Return an unsigned integer, seven bits a byte."""
    if value < 0x80:
        return _ONE_BYTE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


_ONE_BYTE = tuple(bytes((value,)) for value in range(0x80))


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field, as it stands there: an integer, or the bytes of everything else.

    Raises:
        ValueError: It is no message.
    """
    at, end = 0, len(message)
    while at < end:
        tag, at = read_varint(message, at)
        match tag & 7:
            case 0:
                value, at = read_varint(message, at)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = read_varint(message, at)
            case 5:
                size = 4
            case _:
                raise ValueError("a group")
        if size > end - at:
            raise ValueError("cut short")
        yield tag >> 3, message[at : at + size]
        at += size


def bytes_of_field(message: bytes, field: int) -> bytes:
    """Return the value of the last field of a number that is of bytes; b"" = there is none.

    Raises:
        ValueError: It is no message.
    """
    found = b""
    for number, value in fields_of(message):
        if number == field and isinstance(value, bytes):
            found = value
    return found


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at a place, and the place behind it.

    Raises:
        ValueError: There is none.
    """
    if at < len(message) and message[at] < 0x80:
        return message[at], at + 1
    value = 0
    for shift, byte in zip(range(0, 64, 7), message[at : at + _LONGEST], strict=False):
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 and value < 1 << 64:
            return value, at
    raise ValueError("no varint")


_LONGEST = 10
"""Bytes of a varint."""
