"""Sets of worker slots as integers: slot s is in a set if its bit 1 << s is.

What one more worker costs is a bit in a machine word, so that `&`, `& ~` and `bit_count` of a thousand slots take as
long as looking up two of them; an intersection never depends on the order in which the sets were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def slot_set(slots: Iterable[int]) -> int:
    """Return the set of some slots."""
    made = 0
    for slot in slots:
        made |= 1 << slot
    return made


def large_slot_set(slots: Iterable[int], size: int) -> int:
    """Return the same of many slots, all below a size."""
    flags = bytearray(b"0" * (size + 1))
    for slot in slots:
        flags[size - slot] = 49  # "1"
    return int(flags, 2)


def slots_in(members: int) -> Iterator[int]:
    """Return the slots of a set, ascending; for sets of few."""
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def in_order(members: int, order: Sequence[int]) -> list[int]:
    """Return those slots of an order that are in a set."""
    if not members:
        return []
    flags = f"{members:b}"[::-1].ljust(max(order, default=0) + 1, "0")
    return [slot for slot in order if flags[slot] == "1"]


def packed(members: int) -> bytes:
    """Return a set as bytes, the lowest slots first: as the extension takes it."""
    return members.to_bytes((members.bit_length() + 7) // 8, "little")
