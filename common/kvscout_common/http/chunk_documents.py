"""Content of the documents in an engine's events, as the paths of a dialect find it. Pure.

A value at a path that has the wrong type counts as absent, and the document as `wrong`: who passes bytes on does not
mind, who makes messages of them does. `null` is absent.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvscout_common.http.dialect import MAX_COUNT, Dialect, Usage, is_count

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""Longer ones are not read: the event loop has a few milliseconds for each."""
MAX_DEPTH = 200
"""Arrays and objects within one another."""
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.?)*+"?|[\[{]|[\]}]', re.DOTALL)
"""Brackets of lists and objects, and strings, also one that does not end: it would be looked for anew at each
of its quotation marks."""

_TYPED = frozenset({"text", "token_ids", "finish", "prompt_tokens", "cached_tokens", "output_tokens"})
"""Meanings that only values of one type can have."""


@dataclass(slots=True)
class Noticed:
    """Content of one document."""

    wrong: bool = False
    error: Any = None
    """Error of a stream that failed."""
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    has_ids: bool = False
    text: str = ""
    other_output: bool = False
    """Something else that a model put out."""
    finish: str = ""
    answer_id: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    """Tokens, by their meaning in the dialect."""
    usage: Usage | None = None
    """Usage of the request: with its end, or in a document of its own."""
    is_chunk: bool = False
    is_end: bool = False

    @property
    def has_output(self) -> bool:
        """Return whether a model put something out."""
        return bool(self.token_ids or self.text or self.other_output)

    @property
    def empty(self) -> bool:
        """Return whether it is a chunk with nothing in it that a client waits for."""
        return self.is_chunk and not (self.has_output or self.finish or self.usage or self.wrong)

    @property
    def only_usage(self) -> bool:
        """Return whether there is nothing but usage in it."""
        return self.usage is not None and not self.is_chunk


class NoDocument(Exception):
    """These bytes are no document of the dialect."""


def load(payload: bytes) -> dict[str, Any]:
    """Return an event's document.

    Raises:
        NoDocument: It is no JSON object.
    """
    if len(payload) > MAX_DOCUMENT_BYTES:
        raise NoDocument(f"it has more than {MAX_DOCUMENT_BYTES >> 20} MiB")
    try:
        text = str(payload, "utf-8")
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(text)
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NoDocument(str(error)) from error
    if not isinstance(document, dict):
        raise NoDocument("it is not an object")
    return document


def _check_depth(text: str) -> None:
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} arrays and objects within one another")


class _Node:
    """Field of a dialect, with the fields below it."""

    def __init__(self) -> None:
        self.meanings: list[tuple[str, str]] = []
        """Each with the text that the value must have; "" = any."""
        self.fields: dict[str, _Node] = {}
        self.items: _Node | None = None

    @property
    def is_typed(self) -> bool:
        """Return whether a value can have the wrong type."""
        return bool(self.fields or self.items or any(meaning in _TYPED for meaning, _ in self.meanings))

    def add(self, meaning: str, mark: str) -> None:
        """Add a path or mark."""
        path, _, text = mark.partition("=")
        node = self
        for name in path.split("."):
            name, brackets, _ = name.partition("[]")
            node = node.fields.setdefault(name, _Node())
            if brackets:
                node.items = node = node.items or _Node()
        node.meanings.append((meaning, text))


class Documents:
    """Reads the documents of one stream.

    Args:
        dialect: Of the documents.
        one_choice: Only the first item of each list is read.
    """

    def __init__(self, dialect: Dialect, *, one_choice: bool) -> None:
        self._last = 1 if one_choice else None
        self._cumulative = dialect.cumulative
        self._fields = _Node()
        for meaning, paths in dialect.paths().items():
            for path in paths:
                self._fields.add(meaning, path)
        self._tokens = 0
        self._characters = 0
        self.counts: dict[str, int] = {}
        """Tokens by meaning, as last reported."""

    @property
    def usage(self) -> Usage | None:
        """Return the usage reported until now; None = nothing of the prompt."""
        counts = self.counts
        if "prompt_tokens" not in counts:
            return None
        return Usage(counts["prompt_tokens"], counts.get("cached_tokens"), counts.get("output_tokens", 0))

    def read(self, document: dict[str, Any]) -> Noticed:
        """Return what is new in a document."""
        found = Noticed()
        self._read(self._fields, document, document, found)
        if self._cumulative:
            self._drop_repeated(found)
        self.counts |= found.counts
        if found.counts and (found.finish or found.is_end or not found.is_chunk):
            found.usage = self.usage
            found.wrong |= found.usage is None and not found.is_chunk
        return found

    def _read(self, node: _Node, value: Any, owner: Any, found: Noticed) -> None:
        if value is None:
            return
        fits = False
        if isinstance(value, dict) and node.fields:
            fits = True
            for name, child in node.fields.items():
                self._read(child, value.get(name), value, found)
        elif isinstance(value, list) and node.items is not None:
            fits = True
            for item in value[: self._last]:
                self._read(node.items, item, value, found)
        for meaning, text in node.meanings:
            fits |= _take(meaning, text, value, owner, found)
        found.wrong |= node.is_typed and not fits

    def _drop_repeated(self, found: Noticed) -> None:
        """Leave what is new in a document that may repeat the output before it."""
        ids, text = found.token_ids, found.text
        total = found.counts.get("output_tokens", len(ids) if found.has_ids else self._tokens)
        new = max(0, total - self._tokens)
        incremental = self._tokens > 0 and found.has_ids and len(ids) == new
        del ids[: max(0, len(ids) - new)]
        found.text = text if incremental else text[self._characters :]
        self._tokens = max(self._tokens, total)
        self._characters = self._characters + len(text) if incremental else max(self._characters, len(text))
        if found.counts:
            found.counts["output_tokens"] = total


def _take(meaning: str, text: str, value: Any, owner: Any, found: Noticed) -> bool:
    """Note a value; return whether it has the type of its meaning; false for those that have none."""
    match meaning:
        case "errors":
            found.error = found.error or value or None
        case "error_marks":
            found.error = found.error or (owner if text in ("", value) else None)
        case "other_output":
            found.other_output |= isinstance(value, str | list) and bool(value)
        case "chunks":
            found.is_chunk = True
        case "ends":
            found.is_end |= text in ("", value)
        case "answer_ids":
            found.answer_id = found.answer_id or (value if isinstance(value, str) else "")
        case "token_ids":
            return isinstance(value, list) and _take_ids(value, found)
        case "text" if isinstance(value, str):
            found.text += value
            return True
        case "finish" if isinstance(value, str):
            found.finish = value or found.finish
            return True
        case "prompt_tokens" | "cached_tokens" | "output_tokens" if is_count(value):
            found.counts[meaning] = min(found.counts[meaning] + value, MAX_COUNT)
            return True
    return False


def _take_ids(values: list[Any], found: Noticed) -> bool:
    if not all(map(is_count, values)):
        return False
    found.has_ids = True
    found.token_ids.extend(values)
    return True
