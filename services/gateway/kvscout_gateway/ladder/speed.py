"""Prefill speed, learned from times to the first token. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FADING: Final = 0.99
"""Weight of what was learned before, at each request."""


@dataclass(slots=True)
class PrefillSpeed:
    """The straight line through the times of the last requests, over the tokens that they computed."""

    number: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn from a request: tokens that were computed, time to its first token."""
        self.number = self.number * FADING + 1
        self.tokens = self.tokens * FADING + tokens
        self.seconds = self.seconds * FADING + seconds
        self.squares = self.squares * FADING + tokens * tokens
        self.products = self.products * FADING + tokens * seconds

    @property
    def seconds_per_token(self) -> float:
        """Return the slope: what all requests wait for alike is none of it. 0 = unknown."""
        spread = self.number * self.squares - self.tokens * self.tokens
        rise = self.number * self.products - self.tokens * self.seconds
        return rise / spread if spread > 0 and rise > 0 else 0.0
