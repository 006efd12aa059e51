"""The reader of engines' ZMQ sockets: native threads where the extension is, else libzmq on the event loop.

::

    PUB sockets ──▶ Intake (native) or Subscription (libzmq) ──▶ callbacks
    replay sockets ──▶ IntakeReplay (native) or replay (libzmq) ──▶ replies
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import zmq

from kvscout_blocks.bytes.frames import Message
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source import subscriber
from kvscout_blocks.source.feed import Lent, Progress
from kvscout_blocks.source.intake import IntakeReplay, make_intake
from kvscout_blocks.source.subscriber import Callbacks, Subscription, replay
from kvscout_common.worker import EventEndpoint, WorkerRank


class ZmqSubscription(Protocol):
    """One source that is read."""

    def lend(self, last_id: int, digests: bytes, stopped: Callable[[], None]) -> bool:
        """See `feed.Bypass.lend`."""

    def pause(self, *, paused: bool) -> None:
        """See `feed.Bypass.pause`."""

    def take(self) -> Progress | None:
        """See `feed.Bypass.take`."""

    def peek(self) -> Lent | None:
        """See `feed.Bypass.peek`."""

    def close(self) -> None:
        """Close the sockets; nothing is applied and no callback comes afterwards."""


class ZmqReader:
    """All sockets of a process.

    Args:
        threads: Native threads among which the sources are divided.
        failed: Called with a defect of this program.
    """

    def __init__(self, *, threads: int = 1, failed: Callable[[BaseException], None]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_535)
        self._intake = make_intake(threads=threads, failed=failed)

    def subscribe(
        self, endpoint: EventEndpoint, rank: WorkerRank, index: BlockIndex, callbacks: Callbacks
    ) -> ZmqSubscription:
        """Begin to read a source; its usual batches may be applied to `index` while a position is lent.

        Raises:
            OSError, zmq.ZMQError: The endpoint cannot be used, or the system watches no more sockets.
        """
        native = self._intake.subscribe(endpoint, rank, index, callbacks) if self._intake is not None else None
        return native or Subscription(self._context, endpoint, callbacks)

    def native_replay(self, endpoint: str, rank: WorkerRank, index: BlockIndex, first_id: int) -> IntakeReplay | None:
        """Request every batch from `first_id` on; None: `replay` can, the native thread cannot.

        Raises:
            OSError: The threads have ended.
        """
        return self._intake.replay(endpoint, rank, index, first_id) if self._intake is not None else None

    def replay(self, endpoint: str, first_id: int) -> AsyncGenerator[Message, None]:
        """Return every batch from `first_id` on from a replay socket; see `subscriber.replay`."""
        idle, pause = subscriber.REPLAY_IDLE_SECONDS, subscriber.REPLAY_PAUSE_SECONDS
        return replay(self._context, endpoint, first_id, idle_seconds=idle, pause_seconds=pause)

    def close(self) -> None:
        """Close every socket."""
        if self._intake is not None:
            self._intake.close()
        self._context.destroy(linger=0)
