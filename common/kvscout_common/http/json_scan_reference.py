"""Finds the fields of a JSON object in plain Python: what `json_scan` uses where the extension is not built."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from kvscout_common.http.token_json_reference import read_tokens, write_tokens

__all__ = ["scan_object", "write_tokens"]

MAX_DEPTH: Final = 128
"""Arrays and objects within one another."""
MAX_NUMBER_BYTES: Final = 4300
"""Of one number: Python makes no integer of more."""
_MAX_FINITE_BYTES: Final = 300
"""A shorter number without an exponent is finite."""
_WITH_TEXT: Final = ("prompt", "messages", "input")
"""Fields whose text is counted."""
_TEXT_DEPTH: Final = 8
"""Arrays and objects within one another that are looked into for text: a message's content has four."""
_CHARACTERS_A_NUMBER: Final = 4
"""A number stands for a token, which is so many characters, about."""
_MAX_NAME: Final = 100
"""Characters of a name, in an error."""

_SPACE: Final = re.compile(rb"[ \t\n\r]*+")
# None of them goes back on what it has matched: they cost one pass whatever the text.
_PLAIN: Final = re.compile(rb'[^"\\\x00-\x1f]*+')
_ESCAPES: Final = re.compile(rb'(?:\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++')
_DIGITS: Final = re.compile(rb"[0-9]*+")
_WORDS: Final = (b"null", b"true", b"false")
_ENGINES_WORDS: Final = (*_WORDS, b"NaN", b"Infinity", b"-Infinity")

Field: TypeAlias = tuple[str, int, int, int, int, int]
"""The name, and the fields of `json_scan.Place`."""
Packed: TypeAlias = tuple[bytes | None, tuple[int, int] | None, int]
"""The fields of `json_scan.Packed`."""


def scan_object(
    data: bytes, *, max_fields: int, max_values: int, strict: bool, packed: str
) -> tuple[Sequence[Field], Packed]:
    """See `kvscout_common.http.json_scan.scan_object`."""
    try:
        data.decode()
    except UnicodeDecodeError:
        raise ValueError("is no JSON object: it is no UTF-8") from None
    return _Scanner(data, max_values, strict=strict, packed=packed).object(max_fields)


class _Scanner:
    def __init__(self, data: bytes, max_values: int, *, strict: bool, packed: str) -> None:
        self._data = data
        self._at = 0
        self._max_values = max_values
        self._strict = strict
        self._packed_name = packed
        self._values = 0

    def object(self, max_fields: int) -> tuple[Sequence[Field], Packed]:
        """Return all of it."""
        found: dict[str, Field] = {}
        packed: Packed = (None, None, 0)
        self._space()
        self._mark(b"{")
        self._space()
        if self._peek() == b"}":
            self._at += 1
        else:
            while True:
                begin = self._at
                # Half of a surrogate pair is no text, and becomes a question mark.
                name = json.loads(self._string()).encode("utf-8", "replace").decode()
                self._colon()
                value_at, before = self._at, self._values
                counted = _TEXT_DEPTH + 1 if name in _WITH_TEXT else 0
                if name == self._packed_name:
                    packed, characters = self._packed(counted)
                else:
                    characters = self._value(1, counted)
                if name in found:
                    raise ValueError(f"has the field '{name[:_MAX_NAME]}' twice")
                found[name] = (name, begin, value_at, self._at, self._values - before, characters)
                if len(found) > max_fields:
                    raise ValueError(f"has more than {max_fields} fields")
                self._space()
                if self._peek() != b",":
                    break
                self._at += 1
                self._space()
            self._mark(b"}")
        self._space()
        if self._at != len(self._data):
            raise self._syntax()
        return list(found.values()), packed

    def _packed(self, counted: int) -> tuple[Packed, int]:
        begin = self._at
        token_ids = self._token_ids()
        if token_ids is not None:
            return (token_ids, None, 0), len(token_ids) if counted else 0
        if self._peek() == b"[":
            self._at += 1
            self._space()
            if self._peek() in (b"[", b'"'):
                first, values, count = self._at, self._values, 0
                token_ids = self._token_ids()
                if token_ids is None:
                    self._value(2, 0)
                # What is counted is counted now, with all the rest.
                end, self._at, self._values = self._at, begin, values
                self._count()

                def each() -> int:
                    nonlocal count
                    count += 1
                    return self._value(2, max(0, counted - 1))

                characters = self._within(b"]", 1, each)
                return (token_ids, (first, end), count), characters
            self._at = begin
        return (None, None, 0), self._value(1, counted)

    def _token_ids(self) -> bytes | None:
        """Return a list of token ids; None = there is none here."""
        if self._peek() != b"[":
            return None
        end = self._data.find(b"]", self._at) + 1
        found = read_tokens(self._data[self._at : end].decode(errors="replace"), 0)
        if found is None:
            return None
        self._at = end
        self._values += 1
        return found[0]

    def _value(self, depth: int, counted: int) -> int:
        """Pass over a value; the characters of text in it, if any are counted so deep."""
        self._count()
        first = self._peek()
        match first:
            case b"{":
                return self._within(b"}", depth, lambda: self._member(depth, counted))
            case b"[":
                return self._within(b"]", depth, lambda: self._value(depth + 1, max(0, counted - 1)))
            case b'"':
                text = self._string()
                return len(json.loads(text)) if counted else 0
            case b"-" | b"0" | b"1" | b"2" | b"3" | b"4" | b"5" | b"6" | b"7" | b"8" | b"9":
                return _CHARACTERS_A_NUMBER if self._number() and counted else 0
        self._word()
        # Python's truth values are integers.
        return _CHARACTERS_A_NUMBER if counted and first in (b"t", b"f") else 0

    def _count(self) -> None:
        self._values += 1
        if self._values > self._max_values:
            raise ValueError(f"has more than {self._max_values} values")

    def _member(self, depth: int, counted: int) -> int:
        name = self._string()
        self._colon()
        is_text = counted > 1 and json.loads(name) in ("content", "text")
        return self._value(depth + 1, counted - 1 if is_text else 0)

    def _within(self, close: bytes, depth: int, each: Callable[[], int]) -> int:
        if depth >= MAX_DEPTH:
            raise ValueError(f"has more than {MAX_DEPTH} lists and objects within one another")
        self._at += 1
        self._space()
        characters = 0
        if self._peek() != close:
            while True:
                characters += each()
                self._space()
                if self._peek() != b",":
                    break
                self._at += 1
                self._space()
        self._mark(close)
        return characters

    def _colon(self) -> None:
        self._space()
        self._mark(b":")
        self._space()

    def _string(self) -> bytes:
        """Return a string with its quotation marks."""
        begin = self._at
        self._mark(b'"')
        while True:
            self._match(_PLAIN)
            last = self._peek()
            if last == b'"':
                break
            at = self._at
            self._match(_ESCAPES)
            if self._at == at:
                raise self._escape_problem()
        self._at += 1
        return self._data[begin : self._at]

    def _escape_problem(self) -> ValueError:
        if self._peek() == b"\\":
            self._at += 1  # what is wrong is what is escaped
        return self._syntax()

    def _number(self) -> bool:
        """Pass over a number; whether it is an integer."""
        begin = self._at
        if self._peek() == b"-":
            self._at += 1
            if self._peek() == b"I":
                self._at = begin
                self._word()
                return False
        if self._peek() == b"0":
            self._at += 1
        else:
            self._digits()
        whole, exponent = True, False
        if self._peek() == b".":
            whole = False
            self._at += 1
            self._digits()
        if self._peek() in (b"e", b"E"):
            whole, exponent = False, True
            self._at += 1
            if self._peek() in (b"+", b"-"):
                self._at += 1
            self._digits()
        length = self._at - begin
        looked_at = not whole and (exponent or length > _MAX_FINITE_BYTES)
        if length > MAX_NUMBER_BYTES or (
            looked_at and self._strict and not math.isfinite(float(self._data[begin : self._at]))
        ):
            raise ValueError(f"has a number that is out of range at byte {begin}")
        return whole

    def _digits(self) -> None:
        begin = self._at
        self._match(_DIGITS)
        if self._at == begin:
            raise self._syntax()

    def _word(self) -> None:
        for word in _WORDS if self._strict else _ENGINES_WORDS:
            if self._data.startswith(word, self._at):
                self._at += len(word)
                return
        raise self._syntax()

    def _match(self, pattern: re.Pattern[bytes]) -> None:
        found = pattern.match(self._data, self._at)
        if found is not None:
            self._at = found.end()

    def _peek(self) -> bytes:
        return self._data[self._at : self._at + 1]

    def _space(self) -> None:
        self._match(_SPACE)

    def _mark(self, mark: bytes) -> None:
        if self._peek() != mark:
            raise self._syntax()
        self._at += 1

    def _syntax(self) -> ValueError:
        return ValueError(f"is no JSON object: something else is expected at byte {self._at}")
