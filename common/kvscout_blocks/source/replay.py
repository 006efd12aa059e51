"""State of a requested replay: its rounds of replies, and the retries."""

from __future__ import annotations

from typing import Final

FIRST_RETRY_SECONDS: Final = 0.2
MAX_ATTEMPTS: Final = 8
"""Replays tried for one recovery; the wait between them doubles."""


class Replay:
    """One recovery of a source: a replay request, or several if a round of replies left something out."""

    def __init__(self) -> None:
        self.active = False
        self.attempt = 0
        """Number of the request that is answered now."""
        self.retry_at: float | None = None
        """Time to request again, on the caller's clock; None = not scheduled."""
        self.failures = 0
        """Rounds in a row that brought nothing."""
        self.verified = True
        """True once the replay has shown the last batch applied with the digest that is known."""
        self.answered = False
        """True once a reply of this round came, so that the next ones continue it."""
        self.healing = False
        """True if the replay is requested because history is incomplete, not because anything new is missing."""
        self._begun_at: tuple[int, int | None] = (0, None)

    def begin(self, *, epoch: int, last_id: int | None, failures: int) -> None:
        """Begin a round; arguments are the sequence's cursor, and the rounds in a row that brought nothing."""
        self.active = True
        self.attempt += 1
        self.retry_at = None
        self.failures = failures
        self.answered = self.healing = False
        self._begun_at = (epoch, last_id)
        # With epochs a restart shows itself: a source that has nothing newer than `last_id` has lost nothing.
        self.verified = last_id is None or epoch > 0

    def end(self) -> None:
        """End the replay."""
        self.active = self.healing = False
        self.retry_at = None
        self.failures = 0

    @property
    def goes_on(self) -> bool:
        """Return whether replies came that continue what was applied, and nothing about them is doubted."""
        return self.active and self.answered and self.verified and not self.healing

    def moved(self, epoch: int, last_id: int | None) -> bool:
        """Return whether this round has moved the cursor."""
        return self._begun_at != (epoch, last_id)

    def answers(self, attempt: int) -> bool:
        """Return whether a reply to a request is awaited."""
        return self.active and attempt == self.attempt

    def schedule_retry(self, now: float) -> bool:
        """Note a round that brought nothing; return False if it was the last one."""
        self.attempt += 1
        self.failures += 1
        if self.failures >= MAX_ATTEMPTS:
            return False
        self.retry_at = now + FIRST_RETRY_SECONDS * 2 ** (self.failures - 1)
        return True
