"""What the documents in an engine's events say: output, finish, usage, errors. Pure; one function for each dialect.

A field that is looked at and has the wrong type counts as absent, and the document as `wrong`: who passes bytes on does
not mind, who makes messages of them does.
"""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import dataclass, field
from typing import Any

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
"""Longer ones are not read: the event loop has a few milliseconds for each."""
MAX_DEPTH = 200
"""Arrays and objects within one another."""
_MARKS = re.compile(r'"(?:[^"\\]++|\\.?)*+"?|[\[{]|[\]}]', re.DOTALL)
"""What begins and ends lists and objects, and strings, also one that does not end: it would be looked for anew at each
of its quotation marks."""
_TEXTS = ("reasoning", "reasoning_content", "refusal")
"""Of a chat's delta: output, but not the text of the answer."""


@dataclass(slots=True)
class Usage:
    """Tokens, as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None = it does not say."""


@dataclass(slots=True)
class Noticed:
    """What one document says."""

    wrong: bool = False
    error: Any = None
    """Of a stream that failed."""
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    text: str = ""
    other_output: bool = False
    """Something else that a model put out."""
    finish: str = ""
    account: Any = None
    """Usage as the engine wrote it."""
    usage: Usage | None = None
    empty: bool = False
    """A chunk, and nothing in it: it stands for nothing that a client waits for."""
    only_usage: bool = False

    @property
    def has_output(self) -> bool:
        """Return whether a model put something out."""
        return bool(self.token_ids or self.text or self.other_output)


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
        raise NoDocument("it is no object")
    return document


def _check_depth(text: str) -> None:
    depth = 0
    for found in _MARKS.finditer(text):
        depth += (found[0] in "[{") - (found[0] in "]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} arrays and objects within one another")


class OpenAiDocuments:
    """Chunks of completions and of chat completions.

    Args:
        one_choice: Only the first choice is looked at.
    """

    def __init__(self, *, one_choice: bool) -> None:
        self._last = 1 if one_choice else None

    def read(self, document: dict[str, Any]) -> Noticed:
        """Return what it says."""
        found = Noticed()
        found.error = _error(document)
        choices = _list(found, document, "choices")
        for choice in (choices or [])[: self._last]:
            if isinstance(choice, dict):
                self._read_choice(found, choice)
            else:
                found.wrong = True
        usage = _dict(found, document, "usage")
        if usage is not None:
            found.account = usage
            found.usage = _usage(found, usage, _dict(found, usage, "prompt_tokens_details") or {})
        found.empty = bool(choices) and not (found.has_output or found.finish or usage is not None or found.wrong)
        found.only_usage = choices == [] and usage is not None
        return found

    def _read_choice(self, found: Noticed, choice: dict[str, Any]) -> None:
        found.token_ids.extend(_tokens(found, choice, "token_ids"))
        found.text += _text(found, choice, "text")
        found.finish = _text(found, choice, "finish_reason") or found.finish
        delta = _dict(found, choice, "delta")
        if delta is not None:
            found.text += _text(found, delta, "content")
            others = any(isinstance(delta.get(name), str) and delta[name] for name in _TEXTS)
            calls = delta.get("tool_calls")
            found.other_output |= others or bool(isinstance(calls, list) and calls)


class SglangDocuments:
    """What `/generate` streams: cumulative, or incremental where the engine was started so; the count of each shows
    which."""

    def __init__(self) -> None:
        self._tokens = 0
        self._characters = 0

    def read(self, document: dict[str, Any]) -> Noticed:
        """Return what is new in it."""
        found = Noticed()
        found.error = _error(document)
        text = _text(found, document, "text")
        has_ids = document.get("output_ids") is not None
        token_ids = _tokens(found, document, "output_ids")
        meta = _dict(found, document, "meta_info")
        total = _count(found, meta, "completion_tokens") if meta is not None else None
        if total is None:
            total = len(token_ids) if has_ids else self._tokens
        new = max(0, total - self._tokens)
        incremental = self._tokens > 0 and has_ids and len(token_ids) == new
        found.token_ids = token_ids[max(0, len(token_ids) - new) :]
        found.text = text if incremental else text[self._characters :]
        self._tokens = max(self._tokens, total)
        self._characters = self._characters + len(text) if incremental else max(self._characters, len(text))
        if meta is not None:
            found.account = meta
            self._read_end(found, meta, total)
        found.empty = not (found.has_output or found.finish or found.wrong) and (has_ids or meta is not None)
        return found

    def _read_end(self, found: Noticed, meta: dict[str, Any], total: int) -> None:
        reason = meta.get("finish_reason")
        if isinstance(reason, dict):
            if found.error is None and reason.get("status_code") is not None:
                found.error = reason
            found.finish = _text(found, reason, "type")
        elif isinstance(reason, str):
            found.finish = reason
        elif reason is not None:
            found.wrong = True
        prompt, cached = _count(found, meta, "prompt_tokens"), _count(found, meta, "cached_tokens")
        if found.finish and prompt is not None:
            found.usage = Usage(prompt, total, cached)


def _error(document: dict[str, Any]) -> Any:
    return document.get("error") or (document if document.get("object") == "error" else None)


def _usage(found: Noticed, usage: dict[str, Any], details: dict[str, Any]) -> Usage | None:
    prompt = _count(found, usage, "prompt_tokens")
    completion, cached = _count(found, usage, "completion_tokens"), _count(found, details, "cached_tokens")
    if prompt is None:
        found.wrong = True
        return None
    return Usage(prompt, completion or 0, cached)


def _count(found: Noticed, document: dict[str, Any], name: str) -> int | None:
    value = document.get(name)
    if type(value) is int and 0 <= value < 1 << 32:
        return value
    found.wrong |= value is not None
    return None


def _text(found: Noticed, document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    if isinstance(value, str):
        return value
    found.wrong |= value is not None
    return ""


def _list(found: Noticed, document: dict[str, Any], name: str) -> list[Any] | None:
    value = document.get(name)
    if isinstance(value, list):
        return value
    found.wrong |= value is not None
    return None


def _dict(found: Noticed, document: dict[str, Any], name: str) -> dict[str, Any] | None:
    value = document.get(name)
    if isinstance(value, dict):
        return value
    found.wrong |= value is not None
    return None


def _tokens(found: Noticed, document: dict[str, Any], name: str) -> array[int]:
    values = _list(found, document, name) or []
    try:
        if not any(isinstance(value, bool) for value in values):
            return array("I", values)
    except (TypeError, OverflowError):
        pass  # marked below
    found.wrong = True
    return array("I")
