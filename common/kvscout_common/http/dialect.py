"""Dialect of an HTTP API: where the fields stand in its answers, whole ones and the documents of a stream. Data alone.

A path names a field from the document down: `choices[].delta.content` is the field `content` in the `delta` of each
item of `choices`. A mark is a path, or a path and the text that it must have: `type=message_stop`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

MAX_COUNT = (1 << 32) - 1
"""Largest number of tokens, and largest token id."""


class Usage(NamedTuple):
    """Token usage of a request, as its engine reports it."""

    prompt_tokens: int
    cached_tokens: int | None
    """None = not reported."""
    output_tokens: int = 0
    """0 = not reported."""


@dataclass(frozen=True, eq=False)
class Dialect:
    """Paths of the fields of one API, by their meaning. Several counts of one meaning in a document are added up."""

    errors: tuple[str, ...] = ()
    """Fields whose value is an error, if it is true as Python has it."""
    error_marks: tuple[str, ...] = ()
    """Marks of an object that is an error."""
    text: tuple[str, ...] = ()
    token_ids: tuple[str, ...] = ()
    other_output: tuple[str, ...] = ()
    """Strings and lists that are output where they are not empty, but not text of the answer."""
    finish: tuple[str, ...] = ()
    """Finish reason."""
    prompt_tokens: tuple[str, ...] = ()
    cached_tokens: tuple[str, ...] = ()
    output_tokens: tuple[str, ...] = ()
    chunks: tuple[str, ...] = ()
    """Marks of a chunk of output: one with nothing in it is withheld until something is said."""
    answer_ids: tuple[str, ...] = ()
    """Name of the answer, by which a later request can mean it."""
    ends: tuple[str, ...] = ()
    """Marks of the last document, in streams that do not end with `[DONE]`."""
    cumulative: bool = False
    """Each document may repeat the output before it; its count of output tokens shows whether it does."""

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Return the paths by meaning."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "cumulative"}

    def usage(self, document: dict[str, Any]) -> Usage | None:
        """Return the usage in a whole answer; None = it does not report any."""
        prompt, cached, output = (
            sum(counts)
            if (counts := [count for path in paths if (count := _count(document, path)) is not None])
            else None
            for paths in (self.prompt_tokens, self.cached_tokens, self.output_tokens)
        )
        return None if prompt is None else Usage(prompt, cached, output or 0)


def is_count(value: object) -> bool:
    """Return whether a value is a number of tokens, or a token id."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def _count(document: Any, path: str) -> int | None:
    for name in path.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document if is_count(document) else None
