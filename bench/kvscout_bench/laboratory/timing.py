"""What a step of an engine takes, in whole picoseconds: sums of steps are exact, in whatever order they are added.

::

    step = base + prefill_token · prefill tokens + request · decoding requests + context_token · Σ their contexts

A decoding request reads the keys and values of its whole context in each step, so the last term counts every context in
full, also where requests share blocks: sharing saves memory, not reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from kvscout_common.errors import ConfigError

PICOSECONDS = 1_000_000_000_000
"""A second's."""


def picoseconds(seconds: float) -> int:
    """A time in whole picoseconds."""
    return round(seconds * PICOSECONDS)


def seconds(time: int) -> float:
    """Picoseconds as seconds."""
    return time / PICOSECONDS


@dataclass(frozen=True, slots=True)
class StepTime:
    """The four rates of an engine; the defaults are about those of a model of 70B on eight large accelerators."""

    base_ms: float = 8.0
    prefill_us_per_token: float = 50.0
    decode_us_per_request: float = 50.0
    context_ns_per_token: float = 15.0

    def validate(self) -> StepTime:
        """Itself, if every rate is in range.

        Raises:
            ConfigError: Naming the first that is not.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"must be a finite number of at least 0, not {value}", field=field.name)
        if not self.base_ms > 0:
            raise ConfigError("must be above 0", field="base_ms")
        return self

    @property
    def base(self) -> int:
        """Of an empty step, in picoseconds."""
        return round(self.base_ms * 1_000_000_000)

    @property
    def prefill_token(self) -> int:
        """Of a prompt token, in picoseconds."""
        return round(self.prefill_us_per_token * 1_000_000)

    @property
    def request(self) -> int:
        """Of a decoding request, in picoseconds."""
        return round(self.decode_us_per_request * 1_000_000)

    @property
    def context_token(self) -> int:
        """Of a token of a decoding request's context, in picoseconds."""
        return round(self.context_ns_per_token * 1_000)
