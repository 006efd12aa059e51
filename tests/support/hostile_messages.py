"""Random protobuf messages from their descriptors, and bytes that are nearly such messages.

Values are what trips code up: the bounds of each type, NaN, control characters, names that are somebody else's. What a
field is called decides which values are likely, so that many messages get past the first check.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 6
MAX_BYTES = 4 << 20
MESSAGE_BYTES = 4096
"""What a nested message counts for: the time to make it is that of some KiB."""
NUMBER_BYTES = 8
SURROGATE_STAND_IN = "SURROGATE-STANDS"
"""Becomes lone surrogates, which UTF-8 forbids and Python's strings cannot be serialised with."""
SURROGATES = b"\xed\xa0\x80x" * (len(SURROGATE_STAND_IN) // 4)
STRINGS = [
    "", "a", "0", "-1", "*", ".", "..", "a.b", "a>b", "a b", "\0", "a\0b", "\n", "a\nb: c", "\x1b[31mred", "\x7f", "é",
    "\u202eright to left", "\ufeff", "\U0001f600", "\uffff", "%s%n{}", "../../etc/passwd", "'\"\\", "true", "1e999",
    "9" * 400, "x" * 257, "x" * 5_000, "y" * 100_000, SURROGATE_STAND_IN,
]  # fmt: skip
UINT32S = [0, 1, 2, 3, 4, 15, 16, 17, 255, 1023, 1024, 1025, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
UINT64S = [*UINT32S, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
INT32S = [0, 1, 2, -1, -2, 1000, 2**31 - 1, -(2**31)]
INT64S = [*INT32S, 2**53 + 1, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 0.5, 0.7, 1.0, 2.0, -1.0, 1e-9, 5e-324, 1e30, 1e308, float("nan"), float("inf"), float("-inf")]
LENGTHS = [0, 1, 1, 2, 3, 17]
MOSTLY_SET = {"tenant", "model", "worker_id", "worker", "hello", "request_id", "version"}
LONG_LENGTHS = [1_024, 1_025, 20_000, 300_000]

_NUMBERS: dict[int, list[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: INT32S,
    FieldDescriptor.CPPTYPE_INT64: INT64S,
    FieldDescriptor.CPPTYPE_UINT32: UINT32S,
    FieldDescriptor.CPPTYPE_UINT64: UINT64S,
    FieldDescriptor.CPPTYPE_FLOAT: [value for value in FLOATS if not 1e38 < abs(value) < math.inf],
    FieldDescriptor.CPPTYPE_DOUBLE: FLOATS,
    FieldDescriptor.CPPTYPE_BOOL: [True, False],
}


@dataclass(slots=True)
class HostileMessages:
    """Makes them.

    Args:
        words: Likely values of a string field, by the field's name.
        rng: Decides.
    """

    words: Callable[[str], list[str]]
    rng: random.Random
    _room: int = 0
    """Bytes, roughly, that the message in the making may still get: who calls must not be the one that stalls."""

    def serialised(self, kind: Descriptor) -> bytes:
        """Bytes for a method that takes `kind`: mostly such a message, sometimes a damaged one, or none."""
        rng = self.rng
        fate = rng.random()
        if fate < 0.03:
            return rng.randbytes(rng.choice([1, 2, 5, 50, 2_000]))
        good = self.message(kind).SerializeToString().replace(SURROGATE_STAND_IN.encode(), SURROGATES)
        if fate < 0.80 or not good:
            return good
        if fate < 0.86:
            return good[: rng.randrange(len(good))]
        if fate < 0.92:
            # Fields twice: the last one of a oneof counts, messages are merged, lists grow.
            return good + self.message(kind).SerializeToString().replace(SURROGATE_STAND_IN.encode(), SURROGATES)
        damaged = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged)

    def message(self, kind: Descriptor, depth: int = 0) -> Message:
        """A random message."""
        if not depth:
            self._room = MAX_BYTES
        self._room -= MESSAGE_BYTES
        message = message_factory.GetMessageClass(kind)()
        density = self.rng.choice([0.2, 0.5, 0.9])
        for field in kind.fields:
            # What rpcs require is mostly there, or nothing beyond it would ever be reached.
            if self.rng.random() < (0.95 if field.name in MOSTLY_SET else density):
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        target: Any = getattr(message, field.name)
        if self._room <= 0 or (field.message_type is not None and depth >= MAX_DEPTH):
            return
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"]
            for _ in range(self.rng.choice(LENGTHS)):
                key = self._scalar(field.message_type.fields_by_name["key"], field.name)
                if value.message_type is None:
                    target[key] = self._scalar(value, field.name)
        elif field.is_repeated:
            if field.message_type is not None:
                length = self.rng.choice([*LENGTHS, 40] if depth else [*LENGTHS, *LENGTHS, *LENGTHS, 1_025])
                for _ in range(length):
                    if self._room > 0:
                        target.append(self.message(field.message_type, depth + 2))
            elif self.rng.random() < 0.03 and field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
                length = self.rng.choice(LONG_LENGTHS)
                self._room -= NUMBER_BYTES * length
                target.extend([self._scalar(field)] * length)
            else:
                target.extend(self._scalar(field) for _ in range(self.rng.choice(LENGTHS)))
        elif field.message_type is not None:
            target.CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor, name: str = "") -> Any:
        rng = self.rng
        if field.enum_type is not None:
            # Open enums: a number that nobody defined is legal on the wire.
            return rng.choice([*field.enum_type.values_by_number, 99, -1])
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice([0, 1, 32, 1_000]))
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            words = self.words(name or field.name)
            likely = rng.random() < (0.98 if field.name == "tenant" else 0.8)
            text = rng.choice(words if likely else STRINGS)
            self._room -= len(text)
            return text
        if field.name == "version" and rng.random() < 0.9:
            return 1
        if field.name == "block_size" and rng.random() < 0.7:
            return rng.choice([4, 16])
        return rng.choice(_NUMBERS[field.cpp_type]) if rng.random() < 0.7 else self._likely(field)

    def _likely(self, field: FieldDescriptor) -> Any:
        if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return self.rng.uniform(-1, 3)
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            return self.rng.random() < 0.5
        return self.rng.randrange(40)
