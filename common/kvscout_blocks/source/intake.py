"""Engines' sockets that a native thread reads: usual batches go to the index there, and only the rest comes here.

::

    sockets ──▶ native thread ──▶ bypass ──▶ index        the next batch in order, nothing to decide
                       │
                       └── queue ──▶ Intake, on the event loop ──▶ IntakeSubscription ──▶ callbacks   all else, in order

The event loop sleeps while engines behave; large batches are decoded beside it, without the GIL. The thread speaks ZMTP
itself: libzmq has a thread of its own, which costs as much as all the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvscout_blocks.bytes.frames import Message, malformed_frames
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.index.native import make_bypass, make_intake_thread
from kvscout_blocks.source import subscriber
from kvscout_blocks.source.feed import Lent, Progress
from kvscout_blocks.source.sequence import DIGESTS_KEPT
from kvscout_blocks.source.subscriber import BURST, Callbacks
from kvscout_common.process.endings import INTENDED
from kvscout_common.worker import EventEndpoint, WorkerRank


def make_intake(*, failed: Callable[[BaseException], None]) -> Intake | None:
    """Return an intake on the running event loop; None where there is no extension.

    Args:
        failed: Called with a defect of this program.
    """
    thread = make_intake_thread()
    return Intake(thread, failed=failed) if thread is not None else None


class Intake:
    """All sources that one native thread reads.

    Args:
        thread: It.
        failed: Called with a defect of this program.
    """

    def __init__(self, thread: Any, *, failed: Callable[[BaseException], None]) -> None:
        self._thread = thread
        self._failed = failed
        self._subscriptions: dict[int, IntakeSubscription] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(thread.fileno(), self._drain)

    def close(self) -> None:
        """End the thread; every subscription is closed."""
        self._loop.remove_reader(self._thread.fileno())
        self._thread.close()

    def subscribe(
        self, endpoint: EventEndpoint, rank: WorkerRank, index: BlockIndex, callbacks: Callbacks
    ) -> IntakeSubscription | None:
        """Return a subscription whose usual batches are applied to `index`.

        Returns:
            None: the index is not native, or the address has a name that libzmq alone knows, such as an interface's.

        Raises:
            OSError: The endpoint cannot be used, or the system watches no more sockets.
        """
        bypass = make_bypass(index, rank, DIGESTS_KEPT)
        if bypass is None:
            return None
        number = self._thread.add(
            bypass,
            endpoint.endpoint,
            bind=endpoint.bind,
            topic=endpoint.topic,
            longest_frame=subscriber.MAX_FRAME_BYTES,
        )
        if number is None:
            return None

        def close() -> None:
            del self._subscriptions[number]
            self._thread.remove(number)

        self._subscriptions[number] = subscription = IntakeSubscription(bypass, callbacks, close)
        return subscription

    def _drain(self) -> None:
        """Deliver a burst; the descriptor stays readable while there is more."""
        notices = self._thread.take(BURST)
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


class IntakeSubscription:
    """One source; a `feed.Bypass` whose other batches come as from a `subscriber.Subscription`."""

    def __init__(self, bypass: Any, callbacks: Callbacks, close: Callable[[], None]) -> None:
        self._bypass = bypass
        self._callbacks = callbacks
        self._close = close
        self._on_stopped: Callable[[], None] = lambda: None
        self.undelivered = 0
        """Notices that are here, and not delivered yet."""
        self._closed = False

    def close(self) -> None:
        """Close the sockets; nothing is applied and no callback comes afterwards."""
        if not self._closed:
            self._closed = True
            self._close()

    def lend(self, last_id: int, digests: Sequence[tuple[int, int]], stopped: Callable[[], None]) -> bool:
        """See `feed.Bypass.lend`."""
        if self.undelivered or self._closed:
            return False
        self._on_stopped = stopped
        lent: bool = self._bypass.lend(last_id, digests)
        return lent

    def take(self) -> Progress | None:
        """See `feed.Bypass.take`."""
        taken = self._bypass.take()
        return Progress(*taken) if taken is not None else None

    def peek(self) -> Lent | None:
        """See `feed.Bypass.peek`."""
        lent = self._bypass.peek()
        return Lent(*lent) if lent is not None else None

    def deliver(self, kind: str, detail: Any) -> None:
        """Call back for one notice of the thread."""
        self.undelivered -= 1
        match kind:
            case "message":
                self._callbacks.on_message(Message(*detail))
            case "malformed":
                self._callbacks.on_malformed(str(malformed_frames(detail)))
            case "connected":
                self._callbacks.on_connected()
            case "unconnected":
                self._callbacks.on_unconnected()
            case "refused":
                self._callbacks.on_refused(detail)
            case "stopped":
                self._on_stopped()
