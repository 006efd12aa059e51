"""How long an engine may be silent: as long as a request's own prompt explains.

Only output counts. Pings, comments and empty events come from an HTTP server in front of an engine that hangs, too.

A request may stand in line inside its engine, behind others. Output of those says that the engine works, so that the
silence of a request is that of its worker rank, up to a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Pulse:
    """Of one worker rank, as all requests of this gateway feel it."""

    beat_at: float = float("-inf")
    """When it last put out something, on the loop's clock."""


@dataclass(frozen=True, slots=True)
class Patience:
    """With the engines of one gateway."""

    connect_seconds: float = 2.0
    """Longest wait for a connection, its name's resolution included."""
    first_output_seconds: float = 30.0
    """Longest silence before a first token, beside the time that computing the prompt takes."""
    prefill_tokens_per_second: float = 1000.0
    """How fast an engine computes a prompt, at the slowest."""
    idle_seconds: float = 30.0
    """Longest silence after it."""
    queue_seconds: float = 300.0
    """Longest silence of a request while its worker rank puts out something for others."""

    def with_request(self, uncached_tokens: int, pulse: Pulse, now: float) -> Watch:
        """The watch over one request that goes to its engine now."""
        expected = self.first_output_seconds + uncached_tokens / self.prefill_tokens_per_second
        return Watch(self, expected, pulse, now)


class Watch:
    """Over the silence of one request."""

    def __init__(self, patience: Patience, expected_seconds: float, pulse: Pulse, now: float) -> None:
        self._patience = patience
        self._pulse = pulse
        self._since = now
        self.seconds = expected_seconds
        """The silence that is borne."""

    def deadline(self) -> float:
        """When the engine counts as hung, as of now: it moves with what the worker rank does."""
        at_most = max(self._patience.queue_seconds, self.seconds)
        return min(max(self._since, self._pulse.beat_at) + self.seconds, self._since + at_most)

    def output(self, now: float) -> None:
        """There was some."""
        self._since = self._pulse.beat_at = now
        self.seconds = self._patience.idle_seconds

    def paused(self, now: float) -> None:
        """The engine could not be heard until now, because nobody listened."""
        self._since = now


@asynccontextmanager
async def until(deadline: Callable[[], float]) -> AsyncIterator[None]:
    """Bounds what is awaited by a deadline on the loop's clock that may move while it waits.

    Raises:
        TimeoutError: It passed.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        at = deadline()
        if at <= loop.time():
            scope.reschedule(at)
        else:
            timer = loop.call_at(at, look)

    async with asyncio.timeout(None) as scope:
        timer = loop.call_at(deadline(), look)
        try:
            yield
        finally:
            timer.cancel()
