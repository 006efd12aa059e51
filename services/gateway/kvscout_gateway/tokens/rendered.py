"""Answers of servers that tokenize: vLLM's render endpoints and `/tokenize` of vLLM and SGLang. Pure."""

from __future__ import annotations

import json
import struct
from typing import Any, Final, NamedTuple

from kvscout_common.errors import Unavailable
from kvscout_common.hashing import MmItem
from kvscout_common.http.json_scan import Scanned, load_value, scan_object
from kvscout_common.plain_text import printable

MAX_FEATURE_BYTES: Final = 1024 * 1024
MAX_FEATURE_VALUES: Final = 50_000
MAX_ID_CHARACTERS: Final = 1_024
_LENGTH: Final = struct.Struct("<Q")
TOKEN_BYTES: Final = 4


class Rendered(NamedTuple):
    """Prompt as rendered by a server."""

    token_ids: bytes
    """u32 each."""
    mm_items: tuple[MmItem, ...] = ()
    """Its images, sounds and films, by modality and in the order in which the server names them."""

    def packed(self) -> bytes:
        """Return it as bytes, for a cache."""
        return _LENGTH.pack(len(self.token_ids)) + self.token_ids + json.dumps(self.mm_items).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Rendered:
        """Return what was packed."""
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        return cls(data[_LENGTH.size : end], tuple(MmItem(*item) for item in json.loads(data[end:])))


def read_tokenized(page: bytes) -> Rendered:
    """Return the tokens in an answer of `/tokenize`.

    Raises:
        Unavailable: There are none.
    """
    return Rendered(_token_ids(_scanned(page, "tokens")))


def read_rendered(page: bytes) -> Rendered:
    """Return tokens and items in an answer of a render endpoint; of a list of answers, the only one.

    Raises:
        Unavailable: There are none, or the items are not within the tokens.
    """
    answer = page.strip()
    if answer.startswith(b"[") and answer.endswith(b"]"):
        answer = answer[1:-1]
    scanned = _scanned(answer, "token_ids")
    token_ids = _token_ids(scanned)
    if not token_ids:
        raise Unavailable("a renderer answers without tokens")
    place = scanned.places.get("features")
    if place is None:
        return Rendered(token_ids)
    if place.end - place.value > MAX_FEATURE_BYTES or place.values > MAX_FEATURE_VALUES:
        raise Unavailable(f"a renderer's features have {place.end - place.value} bytes and {place.values} values")
    features = load_value(answer, place.value, place.end)
    try:
        return Rendered(token_ids, _items(features, len(token_ids) // TOKEN_BYTES))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise Unavailable("a renderer's features are not those of its tokens") from error


def _items(features: Any, tokens: int) -> tuple[MmItem, ...]:
    if features is None:
        return ()
    hashes, places = features["mm_hashes"], features["mm_placeholders"]
    items = []
    for modality, names in hashes.items():
        for name, place in zip(names, places[modality], strict=True):
            if not _is_item(name, place["offset"], place["length"], tokens):
                raise ValueError("an item is not within the tokens")
            items.append(MmItem(name, place["offset"], place["length"]))
    return tuple(items)


def _is_item(name: Any, offset: Any, length: Any, tokens: int) -> bool:
    named = isinstance(name, str) and 0 < len(name) <= MAX_ID_CHARACTERS
    numbers = type(offset) is int and type(length) is int
    return named and numbers and offset >= 0 and length >= 1 and offset + length <= tokens


def _scanned(page: bytes, packed: str) -> Scanned:
    try:
        return scan_object(page, strict=False, packed=packed)
    except ValueError as error:
        raise Unavailable(f"a server was asked to tokenize and its answer {printable(str(error))}") from error


def _token_ids(scanned: Scanned) -> bytes:
    if scanned.packed.token_ids is None or scanned.packed.first is not None:
        raise Unavailable("a server was asked to tokenize and answers without tokens")
    return scanned.packed.token_ids
