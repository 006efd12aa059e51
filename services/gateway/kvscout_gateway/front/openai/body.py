"""A JSON object whose fields are changed in place: all else in it stays as its sender wrote it, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from json.decoder import JSONDecodeError
from typing import Any, Final, NamedTuple

from kvscout_common.errors import InvalidArgument
from kvscout_common.token_json import read_tokens

INLINE_BODY_BYTES: Final = 256 * 1024
"""Longer bodies are parsed in a thread: the event loop has a few milliseconds for one request at most."""
MAX_FIELDS: Final = 10_000
_WHITE: Final = " \t\n\r"
_PROMPT: Final = "prompt"


def _refuse(name: str) -> Any:
    raise JSONDecodeError(f"{name} is no JSON", name, 0)


_decoder: Final = json.JSONDecoder(parse_constant=_refuse)
_encoder: Final = json.JSONEncoder(separators=(",", ":"))


class _Place(NamedTuple):
    """Where a field stands: from the quotation mark of its name to the end of its value."""

    begin: int
    value: int
    end: int


class JsonBody:
    """The body of a request: an object."""

    def __init__(self, data: bytes) -> None:
        """Reads it. A prompt that is a list of token ids is packed (`token_json`): they are `bytes`.

        Raises:
            InvalidArgument: It is no JSON object, has NaN or infinity in it, or a field twice.
        """
        self._data = data
        try:
            self.fields, self._places = _scan(data.decode())
        except (ValueError, RecursionError, IndexError) as error:
            raise InvalidArgument(f"is no JSON object: {error}", field="body") from error

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field."""
        return self.fields.get(name, default)

    def settle(self) -> None:
        """Nothing is asked of it any more."""
        self._data, self.fields, self._places = b"", {}, {}

    @property
    def size(self) -> int:
        """Bytes of it."""
        return len(self._data)

    def changed(self, changes: Mapping[str, Any]) -> bytes:
        """The body with other values for some fields; None takes a field out. `changed({})` is what came."""
        changes = {name: value for name, value in changes.items() if self._differs(name, value)}
        if not changes:
            return self._data
        # Made anew: a thousand streams would hold each prompt once more, for as long as they are answered.
        text, kept = self._data.decode(), list[str]()
        for name, place in self._places.items():
            if name not in changes:
                kept.append(text[place.begin : place.end])
            elif changes[name] is not None:
                kept.append(text[place.begin : place.value] + _encoder.encode(changes[name]))
        kept += [_encoder.encode({name: changes[name]})[1:-1] for name in changes if name not in self._places]
        return ("{" + ",".join(kept) + "}").encode()

    def _differs(self, name: str, value: Any) -> bool:
        return name in self.fields if value is None else name not in self.fields or self.fields[name] != value


async def parsed(data: bytes) -> JsonBody:
    """Reads a body of any length.

    Raises:
        InvalidArgument: As `JsonBody`.
    """
    return JsonBody(data) if len(data) <= INLINE_BODY_BYTES else await asyncio.to_thread(JsonBody, data)


def _scan(text: str) -> tuple[dict[str, Any], dict[str, _Place]]:
    fields: dict[str, Any] = {}
    places: dict[str, _Place] = {}
    at = _mark(text, 0, "{")
    if text[at] == "}":
        _end(text, at + 1)
        return fields, places
    while True:
        begin = at
        if text[at] != '"':
            raise JSONDecodeError("a name is expected", text, at)
        name, at = _decoder.raw_decode(text, at)
        value_at = _mark(text, at, ":")
        tokens = read_tokens(text, value_at) if name == _PROMPT and text.isascii() else None
        value, at = tokens or _decoder.raw_decode(text, value_at)
        if name in fields:
            raise JSONDecodeError(f"{name!r} is there twice", text, begin)
        fields[name], places[name] = value, _Place(begin, value_at, at)
        if len(fields) > MAX_FIELDS:
            raise JSONDecodeError(f"more than {MAX_FIELDS} fields", text, begin)
        while text[at] in _WHITE:
            at += 1
        if text[at] == "}":
            _end(text, at + 1)
            return fields, places
        at = _mark(text, at, ",")


def _mark(text: str, at: int, mark: str) -> int:
    """Behind a mark, and the white space around it."""
    while text[at] in _WHITE:
        at += 1
    if text[at] != mark:
        raise JSONDecodeError(f"{mark!r} is expected", text, at)
    at += 1
    while text[at] in _WHITE:
        at += 1
    return at


def _end(text: str, at: int) -> None:
    rest = text[at : at + 1024].strip(_WHITE)
    if rest or len(text) > at + 1024:
        raise JSONDecodeError("something is behind the object", text, at)
