"""How long an engine may be silent: as long as the prompts that it has explain.

Only output counts. Pings, comments and empty events come from an HTTP server in front of an engine that hangs, too.

A request may stand in line inside its engine. Output for others says that the engine works, so that the silence of a
request is that of its worker rank, up to a limit; and the prompts that came before its own take their time, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType

LOOK_SECONDS = 5.0
"""How often a deadline is looked at that may have come nearer meanwhile."""


@dataclass(slots=True)
class Pulse:
    """Of one worker rank, as all requests of this gateway feel it."""

    beat_at: float = float("-inf")
    """When it last put out something, on the loop's clock."""
    prefilling: dict[Watch, int] = field(default_factory=dict)
    """Tokens that it has to compute for each request without a first token, in the order in which they came."""


@dataclass(frozen=True, slots=True)
class Patience:
    """With the engines of one gateway."""

    connect_seconds: float = 2.0
    """Longest wait for a connection, its name's resolution included."""
    first_output_seconds: float = 30.0
    """Longest silence before a first token, beside the time that computing prompts takes."""
    prefill_tokens_per_second: float = 1000.0
    """How fast an engine computes a prompt, at the slowest."""
    idle_seconds: float = 30.0
    """Longest silence after it, beside that time."""
    queue_seconds: float = 300.0
    """Longest silence of a request, whatever its worker rank does for others."""


class Watch:
    """Over the silence of one request, from when it goes to its engine; entered and left with it."""

    def __init__(self, patience: Patience, uncached_tokens: int, pulse: Pulse, now: float) -> None:
        """Begins.

        Args:
            patience: With its engine.
            uncached_tokens: Of its prompt, those that the engine has to compute.
            pulse: Of its worker rank.
            now: On the loop's clock, as everywhere here.
        """
        self._patience = patience
        self._pulse = pulse
        self._since = now
        self._uncached = uncached_tokens
        self._seconds = patience.first_output_seconds

    def __enter__(self) -> Watch:
        self._pulse.prefilling[self] = self._uncached
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pulse.prefilling.pop(self, None)

    @property
    def seconds(self) -> float:
        """The silence that is borne, as of now."""
        tokens = 0
        for watch, uncached in self._pulse.prefilling.items():
            tokens += uncached
            if watch is self:
                break  # those that came later are no reason
        return self._seconds + tokens / self._patience.prefill_tokens_per_second

    def deadline(self) -> float:
        """When the engine counts as hung, as of now: it moves with what the worker rank does."""
        at_most = max(
            self._patience.queue_seconds, self._seconds + self._uncached / self._patience.prefill_tokens_per_second
        )
        return min(max(self._since, self._pulse.beat_at) + self.seconds, self._since + at_most)

    def silence(self, now: float) -> float:
        """Seconds since the engine could have been heard last."""
        return now - self._since

    def output(self, now: float) -> None:
        """There was some."""
        self._since = self._pulse.beat_at = now
        self._seconds, self._uncached = self._patience.idle_seconds, 0
        self._pulse.prefilling.pop(self, None)

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
            timer = loop.call_at(min(at, loop.time() + LOOK_SECONDS), look)

    async with asyncio.timeout(None) as scope:
        timer = loop.call_at(min(deadline(), loop.time() + LOOK_SECONDS), look)
        try:
            yield
        finally:
            timer.cancel()
