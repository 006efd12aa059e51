"""The extension's half of a server or a channel, on the running event loop.

::

    epoll ──▶ poll ──▶ events ──▶ whoever registered for the call or connection
                 flush ◀── once a poll, after everybody has said what is to be sent
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from kvscout_common.process.ticks import until_tick
from kvscout_common.transport.deadlines import Deadlines
from kvscout_common.transport.keepalive import TIME_MS, TIMEOUT_MS
from kvscout_common.transport.statuses import Status
from kvscout_common.transport.waiting import Notice
from kvscout_common.worker import ALL_TENANTS
from kvscout_native import (
    HTTP_EVENTS,
    RPC_EVENTS,
    AnswerTimes,
    ByteBudget,
    ByteCharge,
    ClientTls,
    Dialect,
    Http,
    Rpc,
    ServerTls,
)

__all__ = [
    "HTTP_EVENTS",
    "AnswerTimes",
    "ByteBudget",
    "ByteCharge",
    "ClientTls",
    "Dialect",
    "Http",
    "NativeCore",
    "ServerTls",
]

OPEN: Final = RPC_EVENTS["OPEN"]
MESSAGE: Final = RPC_EVENTS["MESSAGE"]
HALF_CLOSED: Final = RPC_EVENTS["HALF_CLOSED"]
RESET: Final = RPC_EVENTS["RESET"]
WRITABLE: Final = RPC_EVENTS["WRITABLE"]
HEADERS: Final = RPC_EVENTS["HEADERS"]
END: Final = RPC_EVENTS["END"]
CONNECTED: Final = RPC_EVENTS["CONNECTED"]
CLOSED: Final = RPC_EVENTS["CLOSED"]
ACCEPT_FAILED: Final = RPC_EVENTS["ACCEPT_FAILED"]
ANSWERED: Final = RPC_EVENTS["ANSWERED"]
CROWDED: Final = RPC_EVENTS["CROWDED"]
HEAD: Final = RPC_EVENTS["HEAD"]

SEEN_MAYBE, SEEN_NOT_SENT = 0, 2
"""Values of END: whether the peer may have looked at the call."""

_OF_CONNECTIONS = frozenset({CONNECTED, CLOSED})
_BEGINNINGS = frozenset({OPEN, HEAD})

TICK_SECONDS = 1.0
MAX_CONNECTIONS = 10_000

Metadata = tuple[tuple[str, str | bytes], ...]


class EventHandler(Protocol):
    """Receives the events of one call, answer, connection or listener."""

    def on_event(self, kind: int, event: tuple[Any, ...]) -> None:
        """Handle an event, as described in the extension's stub."""


class ClosedRpc:
    """Stand-in for the extension's `Rpc` when its core was closed: calls that end after it say so to this.

    Args:
        stats: Its last.
    """

    def __init__(self, stats: dict[str, int]) -> None:
        self._stats = {**stats, "connections": 0, "calls": 0, "queued_bytes": 0}

    def stats(self) -> dict[str, int]:
        """Return the last counts of refusals, and zeros for everything else: nothing is open."""
        return self._stats

    def send(self, *_: object) -> bool:
        """There is room."""
        return True

    def call(self, *_: object) -> None:
        """There is no connection."""

    def peer(self, *_: object) -> None:
        """Everybody has gone."""

    def ignore(self, *_: object) -> None:
        """Ignore a call of a core that is closed."""

    answer = answer_stream = admit = finish = headers = consumed = half_close = reset = close = set_tls = ignore
    trust = ignore


class MessageStream:
    """A gRPC call whose messages the extension can send by itself."""

    core: NativeCore
    number: int
    """Number of the call."""
    takes_messages: bool
    """Its messages are sent as they are, without a serializer."""
    room: Notice
    """Raised when there is room again for messages, after the extension reported that there was none."""


def _not_listening(*_: object) -> None:
    raise RuntimeError("connections come to a core that does not listen")


class NativeCore:
    """One epoll of its own, read by the running loop.

    Args:
        opened: Called for each call that comes, and before that if its message is still coming.
        failed: Receives why connections cannot be accepted.
        crowded: Called when there is no room for more.
        max_message_bytes: Longest message in either direction.
        max_streams: Calls open at once on a connection.
        max_connections: Accepted and open at once.
        max_age_seconds: About so long a connection that was accepted takes new calls; None = for ever.
        keepalive_ms: Silence after which a peer is pinged.
        budget: The extension's `ByteBudget`, charged for messages that come; None = one of its own.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int,
        max_streams: int = 1000,
        max_connections: int = MAX_CONNECTIONS,
        max_age_seconds: float | None = None,
        keepalive_ms: int = TIME_MS,
        budget: Any = None,
        opened: Callable[[tuple[Any, ...]], None] = _not_listening,
        failed: Callable[[str], None] = _not_listening,
        crowded: Callable[[], None] = _not_listening,
    ) -> None:
        self.rpc = Rpc(
            max_message_bytes=max_message_bytes,
            max_streams=max_streams,
            max_connections=max_connections,
            max_age_seconds=max_age_seconds,
            budget=budget,
            keepalive_seconds=keepalive_ms / 1000,
            keepalive_timeout_seconds=TIMEOUT_MS / 1000,
            clock=time.monotonic(),
        )
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self.calls: dict[int, EventHandler] = {}
        self.connections: dict[int, EventHandler] = {}
        """Handlers of a channel's connections."""
        self._opened = opened
        self._failed = failed
        self._crowded = crowded
        self._flushing = False
        self._polling = False
        self._next_poll: asyncio.Handle | None = None
        self._fd = self.rpc.fileno()
        self.loop.add_reader(self._fd, self.poll)
        self._tick_timer = self.loop.call_later(until_tick(TICK_SECONDS), self._tick)
        self._closed = False

    def flush(self) -> None:
        """Send what was written, once all callbacks of this iteration have run."""
        if not self._flushing:
            self._flushing = True
            if not self._polling:
                self.loop.call_soon(self._flush)

    def flush_now(self) -> None:
        """Flush immediately, if nobody else will write anything."""
        self._flushing = True
        if not self._polling:
            self._flush()

    def finish(self, number: int, status: Status) -> None:
        """End a call that came."""
        self.rpc.finish(number, status.code.value[0], status.text, list(status.trailers))
        self.flush()

    def admit(self, number: int, tenant: str) -> None:
        """Admit a call that came: its messages may be large, and are charged to its caller's tenant."""
        self.rpc.admit(number, None if tenant == ALL_TENANTS else tenant)
        self.flush()

    def close(self) -> None:
        """End it, and close its sockets."""
        if not self._closed:
            self._closed = True
            self.loop.remove_reader(self._fd)
            self._tick_timer.cancel()
            self.deadlines.close()
            # Now, and here: the extension's object must not be left to a garbage collector that runs in another thread.
            self.rpc = cast("Rpc", ClosedRpc(self.rpc.stats()))

    def poll(self) -> None:
        """Read what has come, and dispatch it."""
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        if self._closed:
            return
        # What is said meanwhile leaves at the end of this, and not of the loop's next iteration.
        self._polling = True
        try:
            self._dispatch()
        finally:
            self._polling = False
            # Handlers may have sent nothing, and the extension have answered by itself.
            self._flushing = True
            self._flush()

    def _dispatch(self) -> None:
        for event in self.rpc.poll():
            kind = event[0]
            if kind in _BEGINNINGS:
                self._opened(event)
            elif kind == ACCEPT_FAILED:
                self._failed(event[2])
            elif kind == CROWDED:
                self._crowded()
            else:
                handlers = self.connections if kind in _OF_CONNECTIONS else self.calls
                handler = handlers.get(event[1])
                if handler is not None:
                    handler.on_event(kind, event)

    def _flush(self) -> None:
        if not self._flushing:
            return
        self._flushing = False
        if not self._closed and self.rpc.flush() and self._next_poll is None:
            # Not immediately: the loop's timers and other sockets come first.
            self._next_poll = self.loop.call_soon(self.poll)

    def _tick(self) -> None:
        self.rpc.tick()
        self.poll()
        if self._closed:
            return
        self._tick_timer = self.loop.call_later(until_tick(TICK_SECONDS), self._tick)
