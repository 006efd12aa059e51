"""Expected lengths of outputs, learned from outputs that ended; pure.

A length is described by how many of its tokens fall into each *stage* of an output: 0..64, 64..256, 256..1,024,
1,024..4,096 and beyond. The mean of that over requests that resemble each other says how long an output is expected to
be, how many outputs go through a stage, and what is to be expected of one that has come so far.

Requests resemble each other by class (`Reservation.output_class`), by the bounds that their callers give, by lineage,
and by session: agents set `max_tokens` to a constant, whatever they expect. The fewer outputs of a class are known, the
more the class that contains it counts:

    every request ──▶ class and bounds ──▶ the same, and lineage ──▶ the same, and session

What a caller says is a bound: neither a class that is not known nor what it learned makes an output longer than that.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

STAGES: Final = (0.0, 64.0, 256.0, 1_024.0, 4_096.0)
"""Output tokens at which each stage begins."""
LAST: Final = 32_768.0
"""Output tokens at which the last stage ends; of longer outputs no more is counted."""
WIDTHS: Final = (64.0, 192.0, 768.0, 3_072.0, 28_672.0)
"""Tokens of each stage."""
BELIEVED: Final = (52.0, 85.0, 75.0, 35.0, 10.0)
"""Tokens in each stage of an output of which nothing is known: 257 in all, of which every second has more than 130."""
KEPT: Final = 0.98
"""Weight left of an output when the next one of its class has ended: the last fifty or so make the mean."""
PARENT_WEIGHT: Final = 4.0
"""Outputs that the containing class counts for."""
MAX_CLASSES: Final = 4_096
"""And sessions; those that were not used for longest are forgotten."""

Stages = tuple[float, float, float, float, float]
"""A number for each stage."""


class OutputLengths:
    """Output lengths of one pool, by class."""

    def __init__(self) -> None:
        self._everyone = _Class(None)
        self._classes: OrderedDict[object, _Class] = OrderedDict()
        self._sessions: OrderedDict[object, _Class] = OrderedDict()
        self._key: tuple[str, int, int, int, int] | None = None
        """Arguments of `_answer`, since the last output: a booking follows a selection with the same ones."""
        self._answer: Stages = BELIEVED

    def __len__(self) -> int:
        return len(self._classes) + len(self._sessions)

    def expected(self, output_class: str, lineage: int, most: int, expected: int, session: int = 0) -> Stages:
        """Return the tokens that are expected in each stage of an output.

        Args:
            output_class: As its caller says.
            lineage: Of its prompt; 0 = unknown.
            most: Tokens at which it ends; 0 = unknown.
            expected: Tokens that its caller expects; 0 = unknown.
            session: Conversation of it; 0 = unknown.
        """
        key = (output_class, lineage, most, expected, session)
        if key != self._key:
            mean = self._class(output_class, lineage, most, expected, session).mean()
            self._key, self._answer = key, _bounded(mean, min(most or LAST, expected or LAST))
        return self._answer

    def add(self, output_class: str, lineage: int, most: int, expected: int, tokens: int, session: int = 0) -> None:
        """Learn from an output that has ended.

        Args:
            output_class: As its caller said.
            lineage: Of its prompt; 0 = unknown.
            most: Tokens at which it would have ended; 0 = unknown.
            expected: Tokens that its caller expected; 0 = unknown.
            tokens: That it had.
            session: Conversation of it; 0 = unknown.
        """
        self._key = None
        self._class(output_class, lineage, most, expected, session).add(_bounded(WIDTHS, tokens))

    def _class(self, output_class: str, lineage: int, most: int, expected: int, session: int) -> _Class:
        # Bounds that differ by less than a factor of two are one class.
        bounds = (output_class, most.bit_length(), expected.bit_length())
        found = _found(self._classes, bounds, self._everyone)
        if lineage:
            found = _found(self._classes, (bounds, lineage), found)
        # Apart from the classes: one that comes once takes no room of theirs.
        return _found(self._sessions, (bounds, session), found) if session else found


class _Class:
    """Outputs that resemble each other.

    Args:
        parent: The class that contains this one; None = this contains all.
    """

    __slots__ = ("_parent", "_sums", "_weight")

    def __init__(self, parent: _Class | None) -> None:
        self._parent = parent
        self._weight = 0.0
        self._sums: Stages = (0.0, 0.0, 0.0, 0.0, 0.0)

    def mean(self) -> Stages:
        """Return the mean tokens in each stage."""
        above = BELIEVED if self._parent is None else self._parent.mean()
        if not self._weight:
            return above
        first, second, third, fourth, last = self._sums
        share = 1.0 / (self._weight + PARENT_WEIGHT)
        rest = PARENT_WEIGHT * share
        return (
            share * first + rest * above[0],
            share * second + rest * above[1],
            share * third + rest * above[2],
            share * fourth + rest * above[3],
            share * last + rest * above[4],
        )

    def add(self, stages: Stages) -> None:
        """Add an output, by its tokens in each stage, here and to what contains this."""
        if self._parent is not None:
            self._parent.add(stages)
        kept, (a, b, c, d, e), (first, second, third, fourth, last) = KEPT, self._sums, stages
        self._weight = kept * self._weight + 1.0
        self._sums = (kept * a + first, kept * b + second, kept * c + third, kept * d + fourth, kept * e + last)


def _found(classes: OrderedDict[object, _Class], key: object, parent: _Class) -> _Class:
    found = classes.get(key)
    if found is None:
        if len(classes) >= MAX_CLASSES:
            classes.popitem(last=False)
        found = classes[key] = _Class(parent)
    else:
        classes.move_to_end(key)
    return found


def _bounded(mean: Stages, bound: float) -> Stages:
    """Return what is left of stages up to a number of tokens."""
    if bound >= LAST:
        return mean
    first, second, third, fourth, last = mean
    if bound <= STAGES[1]:
        return min(first, bound), 0.0, 0.0, 0.0, 0.0
    return (
        min(first, bound),
        min(second, max(0.0, bound - STAGES[1])),
        min(third, max(0.0, bound - STAGES[2])),
        min(fourth, max(0.0, bound - STAGES[3])),
        min(last, max(0.0, bound - STAGES[4])),
    )


def reaching(stages: Stages, stage: int = 0) -> Stages:
    """Return the share of outputs that go through each stage, on average over its tokens.

    Args:
        stages: Tokens expected in each.
        stage: Which one these outputs have reached.
    """
    first, second, third, fourth, last = stages
    width_0, width_1, width_2, width_3, width_4 = WIDTHS
    through = (first / width_0, second / width_1, third / width_2, fourth / width_3, last / width_4)
    if not stage:
        return through
    first, second, third, fourth, last = through
    here = through[stage]
    if not here:
        # It is longer than any was: it may end at any time.
        return 1.0, float(stage > 1), float(stage > 2), float(stage > 3), 0.0
    return (
        min(1.0, first / here),
        min(1.0, second / here),
        min(1.0, third / here),
        min(1.0, fourth / here),
        min(1.0, last / here),
    )
