"""States of workers, as a gateway judges them: values."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class WorkerState(IntEnum):
    """See `WorkerState` of the API, which has the same numbers: of several that apply, the highest is told."""

    OK = 1
    NO_EVENTS = 2
    SLOW = 3
    BUSY = 4
    DRAINING = 5
    SUSPECTED = 6
    LEFT_OUT = 7

    def __str__(self) -> str:
        return self.name.replace("_", " ").lower()


class Judgement(NamedTuple):
    """State of a worker or one of its ranks, and why."""

    state: WorkerState
    cause: str = ""
    """Part of a sentence; "" = the state says it."""
    age_seconds: float | None = None
    """Since the cause was first seen; None = not known."""


WELL = Judgement(WorkerState.OK)
