"""A publisher for engines without an event loop: it has one of its own, in a thread."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvscout_blocks.bytes.events import Event
from kvscout_client.kv_publisher import CLOSE_SECONDS, CacheEvents, KvEventPublisher, PublisherStatus
from kvscout_client.loop_thread import LoopThread

T = TypeVar("T")


class ThreadedKvEventPublisher(CacheEvents):
    """`KvEventPublisher` for any thread; made by its `in_thread`; methods and arguments are the same.

    Args:
        publisher: Not open; it is not used otherwise from now on.
    """

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher, self.spec = publisher, publisher.spec
        self._thread = LoopThread(f"kv-events-{publisher.spec.worker_id}")
        self._opened = self._open = False

    def open(self) -> ThreadedKvEventPublisher:
        """Begin to publish; `with` does it.

        Raises:
            ValueError: It was opened before.
        """
        if self._opened:
            raise ValueError("the publisher was opened before")
        self._opened = self._open = True
        try:
            self._wait(self._publisher.open())
        except BaseException:
            self._open = False
            self._thread.end()
            raise
        return self

    def publish(self, events: Sequence[Event], event_id: int | None = None) -> int | None:
        """See `CacheEvents.publish`; events were hashed in the caller's thread: the loop is left to the network."""

        async def publish() -> int | None:
            return self._publisher.publish(events, event_id)

        return self._wait(publish())

    def restart(self, *, epoch: int | None = None) -> None:
        """See `KvEventPublisher.restart`."""

        async def restart() -> None:
            self._publisher.restart(epoch=epoch)

        self._wait(restart())

    def flush(self, timeout: float | None = None) -> bool:
        """See `KvEventPublisher.flush`."""
        return self._wait(self._publisher.flush(timeout))

    @property
    def status(self) -> PublisherStatus:
        """See `KvEventPublisher.status`."""

        async def status() -> PublisherStatus:
            return self._publisher.status

        return self._wait(status())

    def close(self, *, timeout: float = CLOSE_SECONDS) -> None:
        """See `KvEventPublisher.close`; publishing afterwards is an error."""
        if not self._open:
            return
        try:
            self._wait(self._publisher.close(timeout=timeout))
        finally:
            self._open = False
            self._thread.end()

    def __enter__(self) -> ThreadedKvEventPublisher:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop. Waiting for it bounds what threads can have under way, and brings its errors."""
        if not self._open:
            coroutine.close()
            raise ValueError("the publisher is not open")
        return self._thread.run(coroutine)
