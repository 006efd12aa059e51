"""SUB sockets that a native thread reads: usual batches go to the index there, and only the rest comes here.

::

    SUB sockets ──▶ Reader (native thread) ──▶ Lane ──▶ index        the next batch in order, nothing to decide
                       │
                       └── queue ──▶ Lanes, on the event loop ──▶ LaneSubscription ──▶ callbacks     all else, in order

The event loop sleeps while engines behave; large batches are decoded beside it, without the GIL.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from kvscout_blocks.bytes.wire import Message, malformed_frames
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.index.native import make_lane, make_reader
from kvscout_blocks.source.feed import Progress
from kvscout_blocks.source.subscriber import BURST, close_sockets, open_sockets
from kvscout_common.endings import INTENDED
from kvscout_common.worker import EventEndpoint, WorkerRank

log = logging.getLogger("kvscout.events")

_MALLOPT = {-1: 64 * 2**20, -2: 2**20, -3: 2**20}
"""M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD of glibc, in bytes: a batch of 1,024 blocks has about 80 KB, and memory
that is given back after each and fetched again, page by page, costs half of libzmq's time."""
_FUNCTIONS = ("msg_init", "msg_close", "msg_more", "msg_size", "msg_data", "msg_recv", "errno")


def make_lanes(*, failed: Callable[[BaseException], None]) -> Lanes | None:
    """Lanes on the running event loop; None where there is no extension, or pyzmq does not show its libzmq.

    Args:
        failed: Told of a defect of ours.
    """
    addresses = libzmq_addresses()
    reader = make_reader(addresses) if addresses else None
    if reader is not None:
        process = ctypes.CDLL(None)
        if hasattr(process, "mallopt"):
            for option, value in _MALLOPT.items():
                process.mallopt(option, value)
    return Lanes(reader, failed=failed) if reader is not None else None


def libzmq_addresses() -> Sequence[int]:
    """Where the functions are that the reader calls, in the libzmq that pyzmq has loaded; empty: not to be found."""
    try:
        from zmq.backend.cython import _zmq

        library = ctypes.CDLL(_zmq.__file__)
        functions = [getattr(library, f"zmq_{name}") for name in _FUNCTIONS]
    except (ImportError, OSError, AttributeError) as error:
        log.info("sockets are read on the event loop: pyzmq does not show its libzmq (%s)", error)
        return ()
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]


class Lanes:
    """All sources that one native thread reads.

    Args:
        reader: The thread.
        failed: Told of a defect of ours.
    """

    def __init__(self, reader: Any, *, failed: Callable[[BaseException], None]) -> None:
        self._reader = reader
        self._failed = failed
        self._subscriptions: dict[int, LaneSubscription] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reader.fileno(), self._drain)

    def close(self) -> None:
        """Ends the thread; every subscription is closed."""
        self._loop.remove_reader(self._reader.fileno())
        self._reader.close()

    def subscribe(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: EventEndpoint,
        rank: WorkerRank,
        index: BlockIndex,
        *,
        on_message: Callable[[Message], None],
        on_malformed: Callable[[str], None],
        on_connected: Callable[[], None],
        on_unconnected: Callable[[int], None],
    ) -> LaneSubscription | None:
        """A subscription whose usual batches are applied to `index`; None: the index is not native.

        Callbacks are those of `subscriber.Subscription`.

        Raises:
            zmq.ZMQError: The endpoint cannot be used.
            OSError: The system watches no more sockets.
        """
        lane = make_lane(index, rank)
        if lane is None:
            return None
        socket, monitor = open_sockets(context, endpoint)

        def close() -> None:
            del self._subscriptions[number]
            self._reader.remove(number)
            close_sockets(socket, monitor)

        try:
            number = self._reader.add(lane, socket.underlying, socket.FD, monitor.underlying, monitor.FD)
        except OSError:
            close_sockets(socket, monitor)
            raise
        subscription = LaneSubscription(
            lane,
            close,
            on_message=on_message,
            on_malformed=on_malformed,
            on_connected=on_connected,
            on_unconnected=on_unconnected,
        )
        self._subscriptions[number] = subscription
        return subscription

    def _drain(self) -> None:
        """Delivers a burst; the descriptor stays readable while there is more."""
        notices = self._reader.take(BURST)
        for number, count in Counter(number for number, _, _ in notices).items():
            if number in self._subscriptions:
                self._subscriptions[number].undelivered += count
        for number, kind, detail in notices:
            if kind == "failed":
                self._failed(RuntimeError(f"the thread that reads engines' sockets has ended: {detail}"))
                continue
            subscription = self._subscriptions.get(number)
            if subscription is None:
                continue  # closed by what was delivered before
            try:
                subscription.deliver(kind, detail)
            except INTENDED:
                raise
            except BaseException as error:
                self._failed(error)


class LaneSubscription:
    """One source's sockets; a `feed.Lane` whose other batches come as from a `subscriber.Subscription`."""

    def __init__(
        self,
        lane: Any,
        close: Callable[[], None],
        *,
        on_message: Callable[[Message], None],
        on_malformed: Callable[[str], None],
        on_connected: Callable[[], None],
        on_unconnected: Callable[[int], None],
    ) -> None:
        self._lane = lane
        self._close = close
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._on_connected = on_connected
        self._on_unconnected = on_unconnected
        self._on_stopped: Callable[[], None] = lambda: None
        self.undelivered = 0
        """Notices that are here, and not delivered yet."""
        self._closed = False

    def close(self) -> None:
        """Closes the sockets; nothing is applied and no callback comes afterwards."""
        if not self._closed:
            self._closed = True
            self._close()

    def lend(self, last_id: int, digests: Sequence[tuple[int, int]], stopped: Callable[[], None]) -> bool:
        """See `feed.Lane.lend`."""
        if self.undelivered or self._closed:
            return False
        self._on_stopped = stopped
        lent: bool = self._lane.lend(last_id, digests)
        return lent

    def take(self) -> Progress | None:
        """See `feed.Lane.take`."""
        taken = self._lane.take()
        return Progress(*taken) if taken is not None else None

    def deliver(self, kind: str, detail: Any) -> None:
        """Tells of one notice of the reader."""
        self.undelivered -= 1
        match kind:
            case "message":
                self._on_message(Message(*detail))
            case "malformed":
                self._on_malformed(str(malformed_frames(detail)))
            case "connected":
                self._on_connected()
            case "unconnected":
                self._on_unconnected(detail)
            case "stopped":
                self._on_stopped()
