"""vLLM's stream of completion chunks: bytes of server-sent events → pieces of output. Pure."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

from kvscout_common.errors import Unavailable

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A longer event is no completion chunk: the first one repeats the prompt's token ids, 7 bytes each."""

_DONE = b"[DONE]"


class EngineFailed(Unavailable):
    """The engine refused the request, or its stream broke."""

    def __init__(self, message: str, *, client_fault: bool = False, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds)
        self.client_fault = client_fault
        """The engine says that the request itself is wrong: no other worker would take it."""


@dataclass(slots=True)
class Chunk:
    """A piece of an engine's output."""

    token_ids: array[int] | None = None
    """None = no tokens."""
    text: str = ""
    finish_reason: str = ""
    """"" = not finished."""
    prompt_tokens: int | None = None
    """Set in the usage chunk, as are the next two."""
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """None = the engine does not report it."""

    @property
    def has_output(self) -> bool:
        """Whether it carries a token or text."""
        return bool(self.token_ids or self.text)


class CompletionStream:
    """Parses one stream, whatever pieces it arrives in. What arrives at once becomes one chunk."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._held = 0
        self.done = False
        """[DONE] came."""
        self.failure: EngineFailed | None = None
        """What ended the stream before that; output that came first is handed out first."""

    def feed(self, data: bytes) -> Chunk | None:
        """Takes the next bytes; None = they complete no piece of output."""
        if b"\n" not in data:
            self._hold(data)
            return None
        head, _, tail = data.rpartition(b"\n")
        lines = b"".join((*self._parts, head)).split(b"\n")
        self._parts.clear()
        self._held = 0
        if tail:
            self._hold(tail)
        chunk: Chunk | None = None
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # empty lines end events; comments and other fields carry nothing
            payload = line[5:].strip()
            if payload == _DONE:
                self.done = True
                break
            if payload:
                try:
                    chunk = _add(chunk, payload)
                except EngineFailed as error:
                    self.failure = error
                    break
        return chunk

    def end(self) -> None:
        """The bytes are over."""
        if not self.done and self.failure is None:
            self.failure = EngineFailed("the engine broke off its stream")

    def _hold(self, data: bytes) -> None:
        self._held += len(data)
        if self._held > MAX_EVENT_BYTES:
            self._parts.clear()
            self.failure = EngineFailed(f"the engine sent an event of over {MAX_EVENT_BYTES >> 20} MiB")
        else:
            self._parts.append(data)


def _add(chunk: Chunk | None, payload: bytes) -> Chunk:
    """A chunk with one more event in it."""
    try:
        document = json.loads(str(payload, "utf-8"))
        if "error" in document:
            raise EngineFailed(f"the engine reports: {_reported(document['error'])}")
        chunk = chunk or Chunk()
        choices = document.get("choices")
        if choices:
            _add_choice(chunk, choices[0])
        usage = document.get("usage")
        if usage:
            chunk.prompt_tokens = int(usage["prompt_tokens"])
            chunk.completion_tokens = int(usage.get("completion_tokens") or 0)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            chunk.cached_tokens = None if cached is None else int(cached)
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
        raise EngineFailed(f"the engine sent an event that is no completion chunk: {error}") from error
    return chunk


def _add_choice(chunk: Chunk, choice: dict[str, Any]) -> None:
    token_ids = choice.get("token_ids")
    if token_ids:
        if chunk.token_ids is None:
            chunk.token_ids = array("I", token_ids)
        else:
            chunk.token_ids.extend(token_ids)
    text = choice.get("text")
    if text:
        chunk.text += text
    reason = choice.get("finish_reason")
    if reason:
        chunk.finish_reason = str(reason)


def _reported(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
