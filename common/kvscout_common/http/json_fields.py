"""The fields of a JSON object whose values become Python objects when they are asked for, one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kvscout_common.errors import InvalidArgument
from kvscout_common.http.json_scan import Packed, Place, load_value, scan_object

INLINE_BYTES: Final = 256 * 1024
"""A longer text is scanned in a thread: the event loop has a few milliseconds for one request at most."""
MAX_FIELD_BYTES: Final = 8 * 1024 * 1024
"""Of a field that has a prompt and becomes Python objects, in a thread if it is longer than `INLINE_BYTES`. All other
fields have at most these. What is only passed on may be longer."""
MAX_FIELD_VALUES: Final = 100_000
"""Values in a field that becomes Python objects."""
_PROMPT: Final = "prompt"
_LONG: Final = frozenset({_PROMPT, "messages", "tools", "documents", "system", "input", "instructions"})


class Prompts(NamedTuple):
    """List of prompts, of which only the first is made."""

    first: str | bytes | None
    """None = it is neither text nor token ids, or too long."""
    number: int
    further_characters: int
    """Characters of the others."""


class Fields(Mapping[str, Any]):
    """The fields of an object; a value becomes Python objects when it is asked for.

    A `prompt` that is a list of token ids is packed (little-endian u32): they are `bytes`. One that is a list of texts,
    or of lists, is `Prompts`.
    """

    def __init__(
        self, data: bytes = b"", places: Mapping[str, Place] | None = None, packed: Packed | None = None
    ) -> None:
        self._data = data
        self.places = places or {}
        """Place of each of them in the text."""
        self._packed = packed or Packed()
        self._known: dict[str, Any] = {}

    @classmethod
    def scanned(cls, data: bytes, *, strict: bool = True) -> Fields:
        """Scan the fields of an object.

        Args:
            data: JSON.
            strict: See `scan_object`.

        Raises:
            ValueError: It is no object, or beyond a bound.
        """
        return cls(data, *scan_object(data, strict=strict))

    def __getitem__(self, name: str) -> Any:
        """Return the value of a field.

        Raises:
            KeyError: There is none.
            InvalidArgument: It is too long to be made here, or there is too much in it.
        """
        if name not in self._known:
            self._known[name] = self._prompt() if name == _PROMPT else self._made(name)
        return self._known[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, as `[]` does; the default where there is none."""
        if name in self._known:
            return self._known[name]
        return self[name] if name in self.places else default

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter({**self.places, **self._known} if self._known else self.places)

    def __bool__(self) -> bool:
        return bool(self.places or self._known)

    def __len__(self) -> int:
        return len(self.places.keys() | self._known.keys())

    def written(self, names: Iterable[str]) -> bytes:
        """Return some of the fields as the client wrote them, without the braces of the object."""
        found = (self.places[name] for name in names if name in self.places)
        return b",".join(self._data[place.begin : place.end] for place in found)

    def named(self, model: str) -> Fields:
        """Return the same with a model, unless they name one themselves."""
        if "model" not in self:
            self._known["model"] = model
        return self

    @property
    def characters(self) -> int:
        """Return the characters of its prompt's text, whichever field has that: images and names are not counted."""
        return sum(place.characters for place in self.places.values())

    def is_long(self, name: str) -> bool:
        """Return whether a field is too long to be made here."""
        place = self.places[name]
        return place.end - place.value > _most_bytes(name) or place.values > MAX_FIELD_VALUES

    def _made(self, name: str) -> Any:
        _, begin, end, values, _ = self.places[name]
        if (end - begin > INLINE_BYTES and end - begin > _most_bytes(name)) or values > MAX_FIELD_VALUES:
            raise InvalidArgument(
                f"has {end - begin} bytes and {values} values;"
                f" at most {_most_bytes(name)} and {MAX_FIELD_VALUES} are read",
                field=name,
            )
        return load_value(self._data, begin, end)

    def _prompt(self) -> Any:
        token_ids, first, count = self._packed
        if first is None:
            return self._made(_PROMPT) if token_ids is None else token_ids
        begin, end = first
        made: str | bytes | None = token_ids
        if self._data.startswith(b'"', begin) and end - begin <= MAX_FIELD_BYTES:
            made = load_value(self._data, begin, end)
        return Prompts(made, count, self.places[_PROMPT].characters - len(made or ""))


def _most_bytes(name: str) -> int:
    return MAX_FIELD_BYTES if name in _LONG else INLINE_BYTES
