"""The ZMQ sockets of one source: a SUB socket for live batches, a DEALER for replays.

Sockets are watched through their file descriptors by the event loop's epoll and drained in bursts, so that hundreds
of silent engines cost nothing and a busy one does not starve the rest. What the process is too slow to read waits in
the socket, up to `RECEIVE_LIMIT` batches; then in the connection, and at the engine up to its own mark. What that drops
shows as a gap in the sequence, or as a hole in a replay, and is requested again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
import zmq.utils.monitor

from kvscout_blocks.bytes.frames import MalformedBatch, Message, parse_message, parse_replay_reply, replay_request
from kvscout_blocks.source.feed import HistoryBroken
from kvscout_common.worker import EventEndpoint

log = logging.getLogger("kvscout.events")

MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Three million tokens in one batch: engines that announce a tenth of it are not known."""
RECEIVE_LIMIT = 16
"""Batches that wait in a socket, so that even the largest ones take 256 MiB: ZMQ counts messages, not bytes. It is read
empty a thousand times a second, which is more than engines need."""
BURST = 64
"""Batches read from one socket before the others, and the rpcs, are served."""
GIVEN_UP_SECONDS = 0.5
"""libzmq says immediately that it will connect again; after a frame that it refuses it does not, and says nothing."""
REPLAY_IDLE_SECONDS = 2.0
"""A replay that has not begun after this long will not: engines answer within 100 ms."""
REPLAY_PAUSE_SECONDS = 0.5
"""One that has begun and is silent this long is over: engines reply in one go, and may drop the end."""


def open_sockets(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: EventEndpoint
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return a SUB socket on an endpoint, and the monitor that reports its connection.

    Raises:
        zmq.ZMQError: The endpoint cannot be used; no socket is left open.
    """
    socket = context.socket(zmq.SUB)
    socket.set(zmq.RCVHWM, RECEIVE_LIMIT)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.RECONNECT_IVL, 100)
    socket.set(zmq.RECONNECT_IVL_MAX, 2000)
    # A peer that vanished without a word (host gone) is noticed within 30 s and reconnected to. By TCP, not by ZMTP's
    # heartbeats: libzmq sends them to peers of ZMTP 3.0 as well, which do not know them, and ends the connection then.
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 4)
    # One that does not even refuse is no more there than one that does.
    socket.set(zmq.CONNECT_TIMEOUT, 5000)
    socket.set(zmq.HANDSHAKE_IVL, 5000)
    socket.set(zmq.IPV6, int("[" in endpoint.endpoint))
    socket.subscribe(endpoint.topic)
    monitor = socket.get_monitor_socket(MONITORED)
    try:
        if endpoint.bind:
            socket.bind(endpoint.endpoint)
        else:
            socket.connect(endpoint.endpoint)
    except zmq.ZMQError:
        close_sockets(socket, monitor)
        raise
    return socket, monitor


def close_sockets(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close what `open_sockets` returned."""
    socket.disable_monitor()
    monitor.close()
    socket.close()


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Callbacks of a subscription, in the order of arrival; each runs on the event loop and must not block."""

    on_message: Callable[[Message], None]
    on_malformed: Callable[[str], None]
    """Something came that is no batch, and why."""
    on_connected: Callable[[], None]
    """After each handshake with an engine, the first one and every other, of which the data itself says nothing; before
    the first message of that connection."""
    on_unconnected: Callable[[], None]
    """There is no connection, or none any more; it is made as soon as that is possible."""
    on_refused: Callable[[str], None]
    """A connection was ended because of what came, and why. Where we connect, it is not made again."""


class Subscription:
    """A SUB socket of libzmq on one endpoint.

    A connection is reported before its first message, unless a burst of the former one is still being read: then when
    the socket is empty.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: EventEndpoint, callbacks: Callbacks) -> None:
        self._callbacks = callbacks
        self._bound = endpoint.bind
        self._loop = asyncio.get_running_loop()
        self._socket, self._monitor = open_sockets(context, endpoint)
        self._closed = False
        self._backlog = False
        """The socket was not read empty yet."""
        self._connected = False
        """A handshake is still to be reported."""
        self._then: int | None = None
        """Last event of the monitor after the handshake."""
        self._unconnected: int | None = None
        """Event that `on_unconnected` reported last."""
        self._giving_up: asyncio.TimerHandle | None = None
        """Since the connection ended, until libzmq says that it tries again."""
        self._loop.add_reader(self._socket.FD, self._drain)
        self._loop.add_reader(self._monitor.FD, self._drain_monitor)
        self._loop.call_soon(self._drain)
        self._loop.call_soon(self._drain_monitor)

    def close(self) -> None:
        """Close the sockets; no callback comes afterwards."""
        if self._closed:
            return
        self._closed = True
        self._goes_on()
        self._loop.remove_reader(self._socket.FD)
        self._loop.remove_reader(self._monitor.FD)
        close_sockets(self._socket, self._monitor)

    def lend(self, last_id: int, digests: bytes, stopped: Callable[[], None]) -> bool:
        """Return False: every batch is called back with."""
        return False

    def pause(self, *, paused: bool) -> None:
        """Go on reading: what comes is held by the sequence."""

    def take(self) -> None:
        """Return None: nothing is lent."""

    def peek(self) -> None:
        """Return None: nothing is lent."""

    def _drain(self) -> None:
        """Read a burst. The descriptor only signals news, so a socket left unread must be visited again."""
        # A handshake shows in the monitor before its first batch does in the socket.
        self._drain_monitor()
        for _ in range(BURST):
            if self._closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._backlog = False
                self._report_connected()
                return
            try:
                message = parse_message(parts)
            except MalformedBatch as error:
                self._callbacks.on_malformed(str(error))
                continue
            self._callbacks.on_message(message)
        self._backlog = True
        self._loop.call_soon(self._drain)

    def _drain_monitor(self) -> None:
        while not self._closed:
            try:
                event = zmq.utils.monitor.parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._then = True, None
            elif self._connected:
                self._then = event["event"]
            else:
                self._report_unconnected(event["event"])
        if not self._backlog:
            self._report_connected()

    def _report_connected(self) -> None:
        if self._connected and not self._closed:
            self._connected, self._unconnected = False, None
            then, self._then = self._then, None
            self._goes_on()
            self._callbacks.on_connected()
            if then is not None:
                self._report_unconnected(then)

    def _report_unconnected(self, event: int) -> None:
        # Tries that fail one after the other are reported once.
        if event != self._unconnected and not self._closed:
            self._unconnected = event
            self._goes_on()
            if event == zmq.EVENT_DISCONNECTED and not self._bound:
                self._giving_up = self._loop.call_later(GIVEN_UP_SECONDS, self._on_given_up)
            self._callbacks.on_unconnected()

    def _goes_on(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _on_given_up(self) -> None:
        self._callbacks.on_refused(f"a frame above {MAX_FRAME_BYTES} bytes, or one that is not ZMQ's")


async def replay(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    start: int,
    *,
    idle_seconds: float = REPLAY_IDLE_SECONDS,
    pause_seconds: float = REPLAY_PAUSE_SECONDS,
) -> AsyncGenerator[Message, None]:
    """Request every batch from `start` on from an engine's replay socket; end with the engine's end marker.

    Args:
        context: For its socket.
        endpoint: The replay socket.
        start: First batch wanted.
        idle_seconds: Longest wait for the first reply.
        pause_seconds: Longest wait for the next one.

    Raises:
        HistoryBroken: If the engine falls silent, or sends something else.
    """
    timeout_seconds = idle_seconds
    socket = zmq.asyncio.Context.shadow(context).socket(zmq.DEALER)
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, RECEIVE_LIMIT)
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            socket.connect(endpoint)
            # A DEALER blocks while it has no peer: an engine that is away must not hold the caller.
            async with asyncio.timeout(idle_seconds):
                await socket.send_multipart(replay_request(start))
            while True:
                async with asyncio.timeout(timeout_seconds):
                    parts = await socket.recv_multipart()
                message = parse_replay_reply(parts)
                if message is None:
                    return
                timeout_seconds = pause_seconds
                yield message
        except TimeoutError as error:
            raise HistoryBroken(f"{endpoint} was silent for {timeout_seconds:g} s") from error
        except (MalformedBatch, zmq.ZMQError) as error:
            raise HistoryBroken(f"{endpoint}: {error}") from error
    finally:
        socket.close()
