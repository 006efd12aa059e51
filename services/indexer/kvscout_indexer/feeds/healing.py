"""Schedule of requests for the whole state of a source whose history is incomplete."""

from __future__ import annotations

from typing import Final

from kvscout_blocks.source.feed import SourceInput

HEAL_SECONDS: Final = 30.0
MAX_HEAL_SECONDS: Final = 600.0
"""Between two tries to complete a history; the wait doubles."""


class Healing:
    """The tries of one source. Its publisher may come to have its whole state, or answer better than it did."""

    def __init__(self) -> None:
        self._at: float | None = None
        """Time of the next try; None = history was complete when it was last looked at."""
        self._seconds = HEAL_SECONDS

    def tick(self, source: SourceInput, now: float, *, possible: bool) -> None:
        """Request the state if that is due, and possible now."""
        if not source.incomplete:
            self._at = None
        elif self._at is None:
            self._seconds = HEAL_SECONDS
            self._at = now + self._seconds
        elif now >= self._at and possible and not source.replaying:
            self._seconds = min(2 * self._seconds, MAX_HEAL_SECONDS)
            self._at = now + self._seconds
            source.heal()
