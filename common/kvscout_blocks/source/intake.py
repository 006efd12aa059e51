"""Engines' sockets that native threads read: usual batches go to the index there, and only the rest comes here.

::

    sockets ──▶ a native thread ──▶ bypass ──▶ index      the next batch in order, nothing to decide
                       │
                       └── queue ──▶ Intake, on the event loop ──▶ IntakeSubscription ──▶ callbacks   all else, in order
                                                              └──▶ IntakeReplay ──▶ replies

The event loop sleeps while engines behave; large batches are decoded beside it, without the GIL. A source belongs to
one thread, so that what comes of it stays in order. The threads speak ZMTP themselves: libzmq has a thread of its own,
which costs as much as all the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from kvscout_blocks.bytes.frames import Message, malformed_frames
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.index.native import make_bypass, make_intake_threads
from kvscout_blocks.source import subscriber
from kvscout_blocks.source.feed import HistoryBroken, Lent, Progress
from kvscout_blocks.source.held import HELD_BATCHES
from kvscout_blocks.source.sequence import DIGESTS_KEPT
from kvscout_blocks.source.subscriber import BURST, Callbacks
from kvscout_common.process.endings import INTENDED
from kvscout_common.worker import EventEndpoint, WorkerRank


def make_intake(*, threads: int = 1, failed: Callable[[BaseException], None]) -> Intake | None:
    """Return an intake on the running event loop; None where there is no extension.

    Args:
        threads: Threads among which the sources are divided.
        failed: Called with a defect of this program.
    """
    native = make_intake_threads(threads)
    return Intake(native, failed=failed) if native is not None else None


class Intake:
    """All sources that native threads read.

    Args:
        native: The threads.
        failed: Called with a defect of this program.
    """

    def __init__(self, native: Any, *, failed: Callable[[BaseException], None]) -> None:
        self._native = native
        self._failed = failed
        self._subscriptions: dict[int, IntakeSubscription | IntakeReplay] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(native.fileno(), self._drain)

    def close(self) -> None:
        """End the threads; every subscription is closed."""
        self._loop.remove_reader(self._native.fileno())
        self._native.close()

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
        number = self._native.add(
            bypass,
            endpoint.endpoint,
            bind=endpoint.bind,
            topic=endpoint.topic,
            longest_frame=subscriber.MAX_FRAME_BYTES,
        )
        if number is None:
            return None

        subscription = IntakeSubscription(
            bypass, callbacks, partial(self._close, number), partial(self._native.pause, number)
        )
        self._subscriptions[number] = subscription
        return subscription

    def replay(self, endpoint: str, rank: WorkerRank, index: BlockIndex, first_id: int) -> IntakeReplay | None:
        """Request all batches from `first_id` on from a replay socket; None: as of `subscribe`.

        Raises:
            OSError: The threads have ended.
        """
        bypass = make_bypass(index, rank, HELD_BATCHES)
        if bypass is None:
            return None
        number = self._native.replay(
            bypass,
            endpoint,
            first_id,
            longest_frame=subscriber.MAX_FRAME_BYTES,
            first_within=subscriber.REPLAY_IDLE_SECONDS,
            next_within=subscriber.REPLAY_PAUSE_SECONDS,
        )
        if number is None:
            return None
        replay = IntakeReplay(bypass, endpoint, number, self._native, partial(self._close, number))
        self._subscriptions[number] = replay
        return replay

    def _close(self, number: int) -> None:
        del self._subscriptions[number]
        self._native.remove(number)

    def _drain(self) -> None:
        """Deliver a burst; the descriptor stays readable while there is more."""
        notices = self._native.take(BURST)
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

    def __init__(
        self, bypass: Any, callbacks: Callbacks, close: Callable[[], None], pause: Callable[[bool], None]
    ) -> None:
        self._bypass = bypass
        self._callbacks = callbacks
        self._close = close
        self._pause = pause
        self._on_stopped: Callable[[], None] = lambda: None
        self.undelivered = 0
        """Notices that are here, and not delivered yet."""
        self._closed = False

    def close(self) -> None:
        """Close the sockets; nothing is applied and no callback comes afterwards."""
        if not self._closed:
            self._closed = True
            self._close()

    def lend(self, last_id: int, digests: bytes, stopped: Callable[[], None]) -> bool:
        """See `feed.Bypass.lend`."""
        if self.undelivered or self._closed:
            return False
        self._on_stopped = stopped
        lent: bool = self._bypass.lend(last_id, digests)
        return lent

    def pause(self, *, paused: bool) -> None:
        """See `feed.Bypass.pause`."""
        if not self._closed:
            self._pause(paused)

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


class IntakeReplay:
    """One replay, whose usual replies are applied by the thread while a position is lent."""

    def __init__(self, bypass: Any, endpoint: str, number: int, native: Any, close: Callable[[], None]) -> None:
        self._bypass = bypass
        self._endpoint = endpoint
        self._number = number
        self._native = native
        self._close = close
        self._on_stopped: Callable[[], None] = lambda: None
        self.undelivered = 0
        self._waiting: deque[tuple[str, Any]] = deque()
        self._news = asyncio.Event()

    def close(self) -> None:
        """Close the socket; nothing is applied afterwards."""
        self._close()

    def lend(self, last_id: int, before: int | None, stopped: Callable[[], None]) -> bool:
        """See `feed.Bypass.lend_replay`."""
        self._on_stopped = stopped
        lent: bool = self._bypass.lend(last_id, b"", before)
        return lent

    def take(self) -> Progress | None:
        """See `feed.Bypass.take`."""
        taken = self._bypass.take()
        return Progress(*taken) if taken is not None else None

    def deliver(self, kind: str, detail: Any) -> None:
        """Keep one notice of the thread for `replies`."""
        self._waiting.append((kind, detail))
        self._news.set()

    async def replies(self) -> AsyncGenerator[Message, None]:
        """Yield the replies that were not applied by the thread, to the end of the replay.

        Raises:
            HistoryBroken: If the engine falls silent, or sends something else.
        """
        while True:
            while self._waiting:
                kind, detail = self._waiting.popleft()
                self._native.hand_over(self._number, len(detail[1]) if kind == "reply" else 0)
                match kind:
                    case "reply":
                        yield Message(*detail)
                    case "reply stopped":
                        self._on_stopped()
                    case "reply end":
                        return
                    case "reply broken":
                        raise HistoryBroken(f"{self._endpoint}: {detail}")
                if not self._waiting:
                    # What came was dealt with, and a position lent if that is possible: now the thread reads on.
                    self._native.pause(self._number, False)
            self._news.clear()
            await self._news.wait()
