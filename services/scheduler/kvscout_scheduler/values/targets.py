"""Targets of response times, of the scheduler, a model or one request."""

from __future__ import annotations

import math
from math import inf
from typing import Final, NamedTuple

from kvscout_common.errors import InvalidArgument


class Targets(NamedTuple):
    """Targets of a request, in seconds; inf = no target."""

    ttft_seconds: float = inf
    """To the first token, including the wait in the queue."""
    itl_seconds: float = inf
    """Between two tokens."""

    def or_else(self, others: Targets) -> Targets:
        """Return the same, with other targets where there is none."""
        return Targets(*(own if own < inf else other for own, other in zip(self, others, strict=True)))

    def validate(self) -> Targets:
        """Return itself, if each is above 0.

        Raises:
            InvalidArgument: Naming the one that is not.
        """
        for name, seconds in self._asdict().items():
            if math.isnan(seconds) or seconds <= 0:
                raise InvalidArgument(f"must be above 0, not {seconds}", field=name.replace("_seconds", "_target_ms"))
        return self


NO_TARGETS: Final = Targets()
