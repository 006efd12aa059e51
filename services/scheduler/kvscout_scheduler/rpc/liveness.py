"""Liveness of the peer of a stream: a timeout since its last message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

STEPS = 5
"""Looks within the timeout. Counted instead of timed: a process that was stopped, or is behind, looks once when it
goes on, and reads what has come meanwhile before it looks again."""


class LivenessTimer:
    """Timer that fires once when no message came for too long.

    Args:
        timeout_seconds: For how long; 0 = for ever.
        on_silence: Receives the seconds without a message.
    """

    def __init__(self, timeout_seconds: float, on_silence: Callable[[float], object]) -> None:
        self._step_seconds = timeout_seconds / STEPS
        self._on_silence = on_silence
        self._silent_steps = 0
        self._timer: asyncio.TimerHandle | None = None
        if timeout_seconds:
            self._wait()

    @property
    def silent_seconds(self) -> float:
        """Return the seconds since the last message, in whole steps."""
        return self._silent_steps * self._step_seconds

    def beat(self) -> None:
        """Note a message of the peer."""
        self._silent_steps = 0

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._step_seconds, self._look)

    def _look(self) -> None:
        self._silent_steps += 1
        if self._silent_steps < STEPS:
            self._wait()
        else:
            self._timer = None
            self._on_silence(self.silent_seconds)
