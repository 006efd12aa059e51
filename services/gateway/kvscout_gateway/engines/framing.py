"""vLLM's stream of completion chunks: bytes of server-sent events → pieces of output. Pure."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any

from kvscout_gateway.engines.failure import EngineFailed, reported

MAX_EVENT_BYTES = 64 * 1024 * 1024
"""A longer event is no completion chunk: the first one repeats the prompt's token ids, 7 bytes each."""

_DONE = b"[DONE]"


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

    @property
    def is_progress(self) -> bool:
        """Whether it brings the end nearer: empty events come without end, too."""
        return self.has_output or bool(self.finish_reason) or self.prompt_tokens is not None


class CompletionStream:
    """Parses one stream, whatever pieces it arrives in. What arrives at once becomes one chunk."""

    def __init__(self, max_tokens: int | None = None) -> None:
        """Nothing has arrived.

        Args:
            max_tokens: The output ends with so many, whatever the engine sends; None = the engine knows when.
        """
        self._max_tokens = max_tokens
        self._tokens = 0
        self._texts = 0
        """Pieces of text that came without token ids."""
        self._finished = False
        self.overrun = False
        """The engine went on past the end; the stream is done all the same, and its connection of no more use."""
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
                    chunk = self._add(chunk, payload)
                except EngineFailed as error:
                    self.failure = error
                    break
                if self.overrun:
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

    def _add(self, chunk: Chunk | None, payload: bytes) -> Chunk:
        """A chunk with one more event in it."""
        try:
            document = json.loads(str(payload, "utf-8"))
            error = document.get("error") or (document if document.get("object") == "error" else None)
            if error is not None:
                raise reported(error)
            chunk = chunk or Chunk()
            choices = document.get("choices")
            if choices:
                self._add_choice(chunk, choices[0])
            usage = document.get("usage")
            if usage:
                _add_usage(chunk, usage)
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
            raise EngineFailed(f"the engine sent an event that is no completion chunk: {error}") from error
        return chunk

    def _add_choice(self, chunk: Chunk, choice: dict[str, Any]) -> None:
        token_ids = array("I", choice.get("token_ids") or ())
        text, reason = choice.get("text") or "", choice.get("finish_reason")
        self._tokens += len(token_ids)
        # Each stands for a token at least, but for what was held back and comes with the end.
        self._texts += bool(text and not token_ids and not reason)
        over = max(self._tokens, self._texts) - self._max_tokens if self._max_tokens is not None else 0
        if (over > 0 or self._finished) and (token_ids or text):
            self.overrun = self.done = True
            if self._finished:
                return
            del token_ids[max(0, len(token_ids) - over) :]
            text, reason = "", "length"
        if token_ids:
            if chunk.token_ids is None:
                chunk.token_ids = token_ids
            else:
                chunk.token_ids.extend(token_ids)
        chunk.text += text
        if reason:
            self._finished = True
            chunk.finish_reason = str(reason)


def _add_usage(chunk: Chunk, usage: dict[str, Any]) -> None:
    chunk.prompt_tokens = int(usage["prompt_tokens"])
    chunk.completion_tokens = int(usage.get("completion_tokens") or 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    chunk.cached_tokens = None if cached is None else int(cached)
