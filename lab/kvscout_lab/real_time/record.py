"""Records of a replay: one of each request, and one of the whole."""

from __future__ import annotations

from dataclasses import dataclass

from kvscout_common.worker import WorkerRank


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. All times are seconds from the start of the run."""

    session_id: str
    turn: int
    """Number within its session, from 0."""
    scheduled: float
    """Due time."""
    sent: float
    """Time it was sent; above `scheduled` where the driver was late or its limit was reached."""
    finished: float
    prompt_tokens: int
    first_token: float | None = None
    """Arrival of the first token; None = it did not come."""
    gaps_seconds: tuple[float, ...] = ()
    """Between consecutive messages that carried tokens."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that the engine took from its cache, in its own words; None = it did not say."""
    worker: WorkerRank | None = None
    delayed: bool = False
    """Waited for a place among the outstanding requests."""
    refused: bool = False
    """Never sent: too many were waiting for a place."""
    error: str = ""
    """Why it failed; "" = it was served."""

    @property
    def ttft_seconds(self) -> float | None:
        """Return the time to first token since the request was *due*: a late driver counts against the system."""
        return None if self.first_token is None else self.first_token - self.scheduled

    @property
    def last_token(self) -> float | None:
        """Return the arrival of the last token, or None."""
        return None if self.first_token is None else self.first_token + sum(self.gaps_seconds)


@dataclass(frozen=True, slots=True)
class Replay:
    """A whole replay."""

    records: tuple[RequestRecord, ...]
    """In order of completion."""
    abandoned_turns: int
    """Turns never due, because a turn before them in their session failed."""
    duration_seconds: float
