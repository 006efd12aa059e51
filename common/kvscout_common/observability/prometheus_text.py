"""A few samples of a page in Prometheus' text format, in time linear in the page, whatever it is.

Only the wanted names are parsed: an engine has some hundred metrics, of which three or four are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

MAX_HITS: Final = 16_384
"""Places where the wanted names stand: 1,024 ranks with four metrics each, and as much again."""
MAX_LINE_BYTES: Final = 16_384
MAX_LABELS: Final = 65_536
"""Largest number of labels of all samples."""
MAX_NUMBER_CHARACTERS: Final = 32
_LABEL: Final = re.compile(r'[ \t]*([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(,?)')
_CLOSING: Final = re.compile(r"[ \t]*\}")
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n"}


class Sample(NamedTuple):
    """One line."""

    name: str
    labels: dict[str, str]
    value: float


def read_samples(page: bytes, names: Iterable[str]) -> list[Sample]:
    """Return the samples of some metrics, by name in the order of `names`.

    Args:
        page: The page.
        names: Of the samples that are wanted.

    Raises:
        ValueError: One of them cannot be read, or there are too many.
    """
    found: list[Sample] = []
    hits = labels = 0
    for name in names:
        wanted = name.encode()
        at = page.find(wanted)
        while at >= 0:
            hits += 1
            if hits > MAX_HITS:
                raise ValueError(f"metrics appear more than {MAX_HITS} times")
            after = at + len(wanted)
            if (at == 0 or page[at - 1 : at] == b"\n") and page[after : after + 1] in (b"{", b" ", b"\t"):
                sample = _sample(name, _line(page, after))
                labels += len(sample.labels)
                if labels > MAX_LABELS:
                    raise ValueError(f"metrics have more than {MAX_LABELS} labels")
                found.append(sample)
            at = page.find(wanted, after)
    return found


def _line(page: bytes, start: int) -> str:
    end = page.find(b"\n", start, start + MAX_LINE_BYTES)
    if end < 0:
        end = len(page)
        if end - start > MAX_LINE_BYTES:
            raise ValueError(f"a line has more than {MAX_LINE_BYTES} bytes")
    return page[start:end].decode()


def _sample(name: str, rest: str) -> Sample:
    """Read what follows a name.

    Raises:
        ValueError: It is no sample.
    """
    labels: dict[str, str] = {}
    at = 0
    if rest.startswith("{"):
        at = 1
        while label := _LABEL.match(rest, at):
            labels[label[1]] = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), label[2])
            at = label.end()
            if not label[3]:
                break
        closing = _CLOSING.match(rest, at)
        if closing is None:
            raise ValueError(f"{name} has labels that cannot be read")
        at = closing.end()
    words = rest[at:].split(maxsplit=2)
    if not words or len(words[0]) > MAX_NUMBER_CHARACTERS:
        raise ValueError(f"{name} has no value")
    return Sample(name, labels, float(words[0]))
