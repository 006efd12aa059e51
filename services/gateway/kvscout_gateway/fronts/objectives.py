"""Objectives: names that operators give to a priority and targets, and that requests refer to; as InferenceObjective.

``NAME=PRIORITY[,ttft=MS][,itl=MS]``
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from math import inf
from typing import Final, NamedTuple

from kvscout_common.errors import ConfigError

FLAG: Final = "inference_objective"
MAX_PRIORITY: Final = 2**31 - 1
"""Highest priority of a request."""


class Objective(NamedTuple):
    """Priority and targets of requests that name this objective."""

    priority: int = 0
    """In the queue, higher first; below 0, requests may be shed."""
    ttft_target_seconds: float = inf
    itl_target_seconds: float = inf


NO_OBJECTIVE: Final = Objective()


def objectives_of(texts: Iterable[str]) -> dict[str, Objective]:
    """Return objectives by name.

    Raises:
        ConfigError: A text is no objective; names the flag.
    """
    found: dict[str, Objective] = {}
    for text in texts:
        words, *targets = text.split(",")
        name, _, priority = words.rpartition("=")
        try:
            found[name] = Objective(int(priority), **dict(map(_target, targets)))
        except ValueError:
            name = ""
        if not name or abs(found[name].priority) > MAX_PRIORITY:
            raise ConfigError(
                f"{text!r} is not NAME=PRIORITY[,ttft=MS][,itl=MS], with a priority from {-MAX_PRIORITY} to "
                f"{MAX_PRIORITY} and targets above 0",
                field=FLAG,
            )
    return found


def _target(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition("=")
    seconds = float(milliseconds) / 1000
    if name not in ("ttft", "itl") or not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(text)
    return f"{name}_target_seconds", seconds
