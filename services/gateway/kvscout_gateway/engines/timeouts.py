"""Timeouts of engines: an engine may be silent for as long as its prompts explain.

Only output counts. Pings, comments and empty events come from an HTTP server in front of an engine that hangs, too.

A request may stand in line inside its engine. Output for others says that the engine works, so that the silence of a
request is that of its worker rank, up to a limit; and the prompts that came before its own take their time, too.

An answer that comes as a whole shows nothing of its engine until it is complete: its silence says nothing, and only its
time is limited. Health checks find that an engine is lost, and end at once whatever waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from kvscout_common.http.http import StreamReport
from kvscout_common.transport.waiting import running_task

LOOK_SECONDS = 5.0
"""Seconds between two checks of a request whose timeout is over."""
SUSPICIOUS_SECONDS = 3.0
"""Silence after which an engine is suspected to hang, beside the time that computing prompts takes."""
STREAM_SECONDS = 20.0
"""An engine that has been lost for a shorter time may go on with the answers that it began: no other engine can."""


@dataclass(slots=True)
class Liveness:
    """Liveness of one worker rank, as all requests of this gateway observe it."""

    beat_at: float = float("-inf")
    """Time of its last output for a request that has ended, on the loop's clock."""
    prefilling: dict[SilenceWatch, int] = field(default_factory=dict)
    """Tokens that it has to compute for each request without a first token, in the order in which they came."""
    decoding: set[SilenceWatch] = field(default_factory=set)
    """Requests that have one."""
    streamed_seconds: float = 0.0
    """Time from the first token of each streamed answer to its last one, all requests together, as last counted."""
    streamed_tokens: int = 0
    """Tokens in that time."""
    streams: bool = False
    """An answer was streamed since the last count."""

    def count(self) -> tuple[float, int]:
        """Count what is streamed until now; return seconds and tokens since start."""
        for watch in self.decoding:
            watch.count()
        self.streams = bool(self.decoding)
        return self.streamed_seconds, self.streamed_tokens

    @property
    def waits(self) -> bool:
        """Tell whether requests wait for output."""
        return bool(self.prefilling or self.decoding)

    def last_beat(self) -> float:
        """Return when it last put out something, for whomever."""
        return max([self.beat_at, *(watch.last_output_at for watch in self.decoding)])

    def silent_since(self, *, whole_answers: bool) -> float:
        """Return since when requests wait for output, and none came for anyone; infinity = none waits.

        Args:
            whole_answers: Requests whose answers come as a whole wait, too.
        """
        waiting = (
            watch.silent_since
            for watch in (*self.prefilling, *self.decoding)
            if whole_answers or not watch.whole_answer
        )
        return max(self.last_beat(), min(waiting, default=float("inf")))

    def suspicious_seconds(self, now: float) -> float | None:
        """Return how long it has been silent, if that is longer than its prompts explain; None = it is not."""
        silent_seconds = now - self.silent_since(whole_answers=False)
        if silent_seconds < SUSPICIOUS_SECONDS:
            return None
        watches = (*self.prefilling, *self.decoding)
        return silent_seconds if silent_seconds >= SUSPICIOUS_SECONDS + watches[0].prefill_seconds else None

    def lose(self, problem: str, asked_at: float, *, began: bool = True) -> None:
        """End the waiting of all requests that the lost engine could have put out something for since then.

        Args:
            problem: What is wrong.
            asked_at: Time of that check, on the loop's clock.
            began: Also those whose answers have begun, which nobody else can go on with.
        """
        for watch in [*self.prefilling, *(self.decoding if began else ())]:
            if watch.silent_since <= asked_at:
                watch.lose(problem)


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Timeouts of one gateway's engines."""

    connect_seconds: float = 2.0
    """Longest wait for a connection, its name's resolution included."""
    first_output_seconds: float = 30.0
    """Longest silence before a first token, beside the time that computing prompts takes."""
    prefill_tokens_per_second: float = 1000.0
    """Lowest prefill speed of an engine."""
    idle_seconds: float = 30.0
    """Longest silence after it, beside that time."""
    queue_seconds: float = 300.0
    """Longest silence of a request, whatever its worker rank does for others."""
    answer_seconds: float = 1800.0
    """Longest time for an answer that comes as a whole, beside that of its prompt."""


class SilenceWatch:
    """Over the silence of one request, from when it goes to its engine; ended with it."""

    def __init__(
        self,
        timeouts: EngineTimeouts,
        uncached_tokens: int,
        liveness: Liveness,
        now: float,
        *,
        whole_answer: bool = False,
    ) -> None:
        """Begin to watch.

        Args:
            timeouts: With its engine.
            uncached_tokens: Of its prompt, those that the engine has to compute.
            liveness: That of its worker rank.
            now: On the loop's clock, as everywhere here.
            whole_answer: The whole answer comes at once, when it is complete.
        """
        self._timeouts = timeouts
        self._liveness = liveness
        self._since = now
        self._uncached = uncached_tokens
        self._seconds = timeouts.answer_seconds if whole_answer else timeouts.first_output_seconds
        self.whole_answer = whole_answer
        """Its answer comes as a whole, and it is not complete."""
        self.lost = ""
        """Reason why its engine will not answer; "" = none is known."""
        self.on_lost: Callable[[], object] | None = None
        """Called when that becomes known."""
        self._noticed: Callable[[], StreamReport] | None = None
        self._counted_at, self._counted_tokens = 0.0, 0
        """Until when its answer has been counted, 0 = not yet, and the tokens until then."""
        liveness.prefilling[self] = uncached_tokens

    def end(self) -> None:
        """End the watch. A second call does nothing."""
        liveness = self._liveness
        liveness.prefilling.pop(self, None)
        if self in liveness.decoding:
            self.count()
            liveness.decoding.remove(self)
            liveness.beat_at = max(liveness.beat_at, self.last_output_at)

    def lose(self, problem: str) -> None:
        """Stop waiting for a lost engine."""
        self.lost = problem
        if self.on_lost is not None:
            self.on_lost()

    def follow(self, noticed: Callable[[], StreamReport]) -> None:
        """Follow the report of an answer that begins: its output counts, too."""
        self._noticed = noticed

    def count(self) -> None:
        """Add to its worker rank's totals what has been streamed since the last call."""
        report = self._noticed() if self._noticed is not None else None
        if report is None or not report.first_output_at:
            return
        since, tokens = (self._counted_at, self._counted_tokens) if self._counted_at else (report.first_output_at, 1)
        if report.last_output_at - since < SUSPICIOUS_SECONDS:  # a longer pause says that it hung, not how fast it is
            self._liveness.streamed_seconds += max(0.0, report.last_output_at - since)
            self._liveness.streamed_tokens += max(0, report.tokens - tokens)
        self._counted_at, self._counted_tokens = report.last_output_at, report.tokens

    def chunk(self, now: float) -> None:
        """Something of an answer came that is no stream of events: the rest may take as long as all of it may."""
        self._since = now

    def output(self, now: float) -> None:
        """Record output."""
        self.whole_answer = False
        self._since = now
        self._seconds, self._uncached = self._timeouts.idle_seconds, 0
        self._liveness.prefilling.pop(self, None)
        self._liveness.decoding.add(self)
        self._liveness.streams = True

    @property
    def last_output_at(self) -> float:
        """Return when it last put out something, or else began."""
        return max(self._since, self._noticed().progress_at) if self._noticed is not None else self._since

    @property
    def silent_since(self) -> float:
        """Time since which the engine has been silent while its output was read; infinity while nobody listens."""
        if self._noticed is None:
            return self._since
        report = self._noticed()
        return max(self._since, report.progress_at, report.listening_since)

    @property
    def prefill_seconds(self) -> float:
        """Return the longest time that all prompts may take which its worker rank has to compute now."""
        return sum(self._liveness.prefilling.values()) / self._timeouts.prefill_tokens_per_second

    @property
    def seconds(self) -> float:
        """Return the longest silence that is allowed, as of now."""
        tokens = 0
        for watch, uncached in self._liveness.prefilling.items():
            tokens += uncached
            if watch is self:
                break  # those that came later are no reason
        return self._seconds + tokens / self._timeouts.prefill_tokens_per_second

    def deadline(self) -> float:
        """Return when the engine counts as hung, as of now: it moves with what the worker rank does."""
        since = self.silent_since
        at_most = max(
            self._timeouts.queue_seconds, self._seconds + self._uncached / self._timeouts.prefill_tokens_per_second
        )
        return min(max(since, self._liveness.last_beat()) + self.seconds, since + at_most)

    def left(self, now: float) -> float:
        """Return the seconds until then; 0 or less = it hangs. Look at others of the rank only if it matters."""
        if self.lost:
            return 0.0
        left = self._since + self._seconds - now
        if left < LOOK_SECONDS:
            # It may have been heard of since then: that is asked only where it matters.
            left = self.silent_since + self._seconds - now
        return left if left > 0 else self.deadline() - now


class Bounded:
    """Bounds what a task awaits by a watch's deadline, which may move while it waits; a context manager that may be
    entered again and again, one time after the other. `end` it.

    As `asyncio.timeout`, whose deadline would have to be moved, and whose two coroutines cost more than all of this.
    One timer serves all waits of a request: it looks at the deadline `LOOK_SECONDS` later at most.

    Args:
        watch: The request's.

    Raises:
        TimeoutError: It passed.
    """

    __slots__ = ("_cancelling", "_expired", "_loop", "_task", "_timer", "_watch")

    def __init__(self, watch: SilenceWatch) -> None:
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._task: asyncio.Task[Any] | None = None
        """The task that waits."""
        self._cancelling = 0
        self._expired = False

    def __enter__(self) -> None:
        self._task = task = running_task()
        self._cancelling = task.cancelling()
        watch = self._watch
        if watch.lost:
            self._look_now()
        elif self._timer is None:
            self._look_later(watch.left(now := self._loop.time()), now)
        watch.on_lost = self._look_now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task, self._watch.on_lost = self._task, None, None
        if self._expired:
            self._expired = False
            # Who else cancels the task meanwhile has it cancelled.
            if task is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def end(self) -> None:
        """Stop waiting. A second call does nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_now(self) -> None:
        self.end()
        self._timer = self._loop.call_soon(self._look)

    def _look_later(self, left: float, now: float) -> None:
        self._timer = self._loop.call_at(now + max(0.0, min(left, LOOK_SECONDS)), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._task is None:
            return  # nobody waits now: who does next looks for itself
        now = self._loop.time()
        left = self._watch.left(now)
        if left > 0:
            self._look_later(left, now)
        else:
            self._expired = True
            self._task.cancel()
