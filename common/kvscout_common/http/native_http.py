"""HTTP by the extension, on the running event loop: what its clients and servers share, so that what one of them reads
can be passed on by the other without Python.

::

    epoll ──▶ poll ──▶ events ──▶ the call, answer or listener that they are of
                 flush ◀── once an iteration of the loop, after everybody has written
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from kvscout_common.http.http import VANISHED_SECONDS, StreamReport
from kvscout_common.process.ticks import until_tick
from kvscout_common.transport.native_core import HTTP_EVENTS, EventHandler, Http, NativeCore

REQUEST: Final = HTTP_EVENTS["REQUEST"]
BODY: Final = HTTP_EVENTS["BODY"]
BODY_FAILED: Final = HTTP_EVENTS["BODY_FAILED"]
GONE: Final = HTTP_EVENTS["GONE"]
WRITABLE: Final = HTTP_EVENTS["WRITABLE"]
ANSWER: Final = HTTP_EVENTS["ANSWER"]
FIRST: Final = HTTP_EVENTS["FIRST"]
CHUNK: Final = HTTP_EVENTS["CHUNK"]
FULL: Final = HTTP_EVENTS["FULL"]
ENDED: Final = HTTP_EVENTS["ENDED"]
ACCEPT_FAILED: Final = HTTP_EVENTS["ACCEPT_FAILED"]
RPC_DUE: Final = HTTP_EVENTS["RPC_DUE"]
AGAIN: Final = HTTP_EVENTS["AGAIN"]
CROWDED: Final = HTTP_EVENTS["CROWDED"]

_OF_CALLS = frozenset({BODY, BODY_FAILED, GONE, WRITABLE})

TICK_SECONDS = 0.25
RESTING_TICK_SECONDS = 1.0
"""While no connection has anything under way."""


class ServerCall:
    """A call of a server of ours that the extension can write an answer to by itself."""

    core: HttpCore
    number: int
    """Number of the call."""
    ends_with_answer: bool
    """See `http.HttpCall`."""

    def answered(self) -> None:
        """Record that the extension has ended its answer."""


class ClosedHttp:
    """Stand-in for the extension's `Http` when its core was closed: calls and answers that end after it say so to
    this."""

    def report(self, answer: int) -> None:
        """Report nothing: the call has ended."""

    def write(self, call: int, data: bytes) -> None:
        """Drop the data: the client has gone."""

    def open_connections(self, listener: int) -> int:
        """Return 0: they are closed."""
        return 0

    def stats(self) -> dict[str, int]:
        """Return zeros: nothing is open."""
        return {"connections_refused": 0, "connections_evicted": 0}

    def ignore(self, *_: object) -> None:
        """Ignore a call of a core that is closed."""

    want_body = respond = start = end = handled = set_tls = trust = ignore
    keep = stream = pass_to_call = pass_to_messages = resume = abort = close_idle = ignore


class HttpCore:
    """One epoll of its own, read by the loop that was running when it was made; see `shared`."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.http = Http(self.loop.time(), vanished_seconds=VANISHED_SECONDS)
        self.calls: dict[int, EventHandler] = {}
        self.answers: dict[int, EventHandler] = {}
        self.listeners: dict[int, EventHandler] = {}
        self.rpc_cores: dict[Any, NativeCore] = {}
        """Cores of gRPC servers that answers were passed to."""
        self._users = 0
        self._closed = False
        self._flushing = False
        self._polling = False
        self._next_poll: asyncio.Handle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._fd = self.http.fileno()
        self.loop.add_reader(self._fd, self._poll)
        self._rests = False
        """The next tick is a resting one."""
        self._set_timer(rests=True)

    def use(self) -> None:
        """Note one more user."""
        self._users += 1

    def release(self) -> None:
        """Release it for one user; the last release closes it and its sockets."""
        self._users -= 1
        if self._users == 0:
            self._handle(self.http.flush())
            self._closed = True
            self.loop.remove_reader(self._fd)
            if self._tick_timer is not None:
                self._tick_timer.cancel()
            _cores.pop(self.loop, None)
            self.rpc_cores.clear()
            # Now, and here: the extension's object must not be left to a garbage collector that runs in another thread.
            self.http = cast("Http", ClosedHttp())

    def flush(self) -> None:
        """Send what was written, once all callbacks of this iteration have run."""
        if self._rests:
            self._set_timer(rests=False)
        if not self._flushing:
            self._flushing = True
            if not self._polling:
                self.loop.call_soon(self._flush)

    def report(self, answer: int) -> StreamReport | None:
        """Return what was noticed of an answer until now; None = it is over."""
        found = self.http.report(answer)
        return None if found is None else StreamReport(**found)

    def _poll(self) -> None:
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        if self._closed:
            return
        if self._rests:
            self._set_timer(rests=False)
        # What is said meanwhile leaves at the end of this, and not of the loop's next iteration.
        self._polling = True
        try:
            self._handle(self.http.poll())
        finally:
            self._polling = False
            if self._flushing:
                self._flush()

    def _flush(self) -> None:
        # What is said to what this brings leaves with it, once.
        for _ in range(2):
            self._flushing = False
            if self._closed:
                return
            self._polling = True
            try:
                self._handle(self.http.flush())
            finally:
                self._polling = False
            if not self._flushing:
                return
        self.loop.call_soon(self._flush)

    def _tick(self) -> None:
        self._rests = False
        # What came while the loop did something else is not late.
        self._poll()
        under_way = not self._closed and self.http.tick()
        self._poll()
        if not self._closed:
            self._set_timer(rests=not under_way)

    def _set_timer(self, *, rests: bool) -> None:
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._rests = rests
        seconds = RESTING_TICK_SECONDS if rests else TICK_SECONDS
        self._tick_timer = self.loop.call_later(until_tick(seconds), self._tick)

    def _handle(self, events: list[tuple[Any, ...]]) -> None:
        for event in events:
            kind = event[0]
            if kind == REQUEST:
                handler = self.listeners.get(event[2])
            elif kind == CROWDED:
                handler = self.listeners.get(event[1])
            elif kind in _OF_CALLS:
                handler = self.calls.get(event[1])
            elif kind == AGAIN:
                # Not immediately: the loop's timers and other sockets come first.
                if self._next_poll is None:
                    self._next_poll = self.loop.call_soon(self._poll)
                continue
            elif kind == RPC_DUE:
                self.rpc_cores[event[1]].poll()
                continue
            elif kind == ACCEPT_FAILED:
                for listener in self.listeners.values():
                    listener.on_event(kind, event)
                continue
            else:
                handler = self.answers.get(event[1])
            if handler is not None:
                handler.on_event(kind, event)


_cores: dict[asyncio.AbstractEventLoop, HttpCore] = {}


def shared() -> HttpCore:
    """Return that of the running loop; call `release` when it is no longer needed."""
    loop = asyncio.get_running_loop()
    core = _cores.get(loop)
    if core is None:
        core = _cores[loop] = HttpCore()
    core.use()
    return core
