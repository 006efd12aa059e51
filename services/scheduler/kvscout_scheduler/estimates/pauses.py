"""Pauses between the turns of sessions, learned from those that came back and those that did not; pure.

A pause is described by its *stages*: up to a second, 4, 16, 64, 256 and 1,024 seconds. Of the sessions that have been
away for as long as a stage begins, a share comes back in it: the *hazard* of the stage. All of them say how likely a
session is to come back, and how soon, however long it has been away. A stage counts as soon as a session has passed it:
waiting for its return would count only those that do.

Sessions resemble each other by the class of their output (`Reservation.output_class`); the more turns a session has
had, the more its own pauses count:

    every session ──▶ class ──▶ session
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from math import log
from typing import Final

STAGES: Final = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0)
"""Seconds at which each stage begins."""
ENDS: Final = (*STAGES[1:], 1_024.0)
"""Seconds at which each ends; who has been away for longer than the last one does not come back."""
WIDTH: Final = log(4.0)
"""Of each stage but the first, in factors of e."""
BELIEVED: Final = 0.1
"""Hazard of each stage while nothing is known."""
KEPT: Final = 0.995
"""Weight left of a pause when the next one of its class is known."""
PARENT_WEIGHT: Final = 16.0
"""Pauses that the containing class counts for."""
MAX_CLASSES: Final = 1_024
"""Those that were not used for longest are forgotten."""


class PauseClass:
    """Pauses that resemble each other.

    Args:
        parent: The class that contains this one; None = this contains all.
    """

    __slots__ = ("_came", "_parent", "_reached")

    def __init__(self, parent: PauseClass | None = None) -> None:
        self._parent = parent
        self._reached = [0.0] * len(STAGES)
        """Pauses that were as long as each stage begins, and of which it is known whether they ended in it."""
        self._came = [0.0] * len(STAGES)
        """Those that did."""

    def add(self, stage: int, *, came: bool) -> None:
        """Add a stage of a pause, here and to what contains this.

        Args:
            stage: Which one.
            came: Whether the session came back in it, or is away for longer.
        """
        if self._parent is not None:
            self._parent.add(stage, came=came)
        self._reached[stage] = KEPT * self._reached[stage] + 1.0
        self._came[stage] = KEPT * self._came[stage] + came

    def hazard(self, stage: int) -> float:
        """Return the share of sessions that come back in a stage, of those that have not before."""
        above = BELIEVED if self._parent is None else self._parent.hazard(stage)
        return (self._came[stage] + PARENT_WEIGHT * above) / (self._reached[stage] + PARENT_WEIGHT)

    def soon(self, seconds: float) -> float:
        """Return the chance that a session comes back before it has been away e times as long as now.

        Args:
            seconds: How long it has been away.
        """
        if seconds >= ENDS[-1]:
            return 0.0
        stage = bisect_right(STAGES, seconds) - 1 if seconds > 0.0 else 0
        hazard = self.hazard(stage)
        return hazard if not stage else 1.0 - (1.0 - hazard) ** (1.0 / WIDTH)


class Pauses:
    """Pauses of one pool, by class."""

    def __init__(self) -> None:
        self.everyone = PauseClass()
        self._classes: OrderedDict[str, PauseClass] = OrderedDict()

    def of(self, output_class: str) -> PauseClass:
        """Return the pauses of a class of outputs."""
        found = self._classes.get(output_class)
        if found is None:
            if len(self._classes) >= MAX_CLASSES:
                self._classes.popitem(last=False)
            found = self._classes[output_class] = PauseClass(self.everyone)
        else:
            self._classes.move_to_end(output_class)
        return found
