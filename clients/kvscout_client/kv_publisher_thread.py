"""A publisher for engines without an event loop: it has one of its own, in a thread."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kvscout_blocks.bytes.events import Cleared, Event
from kvscout_client.kv_publisher import CLOSE_SECONDS, KvEventPublisher, PublisherStatus
from kvscout_client.kv_publisher_rank import removed_events, stored_events
from kvscout_client.loop_thread import LoopThread

T = TypeVar("T")


class ThreadedKvEventPublisher:
    """`KvEventPublisher` for any thread; made by its `in_thread`; methods and arguments are the same.

    Args:
        publisher: Not open; it is not used otherwise from now on.
    """

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher
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

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        *,
        lora_name: str | None = None,
        medium: str | None = None,
        cache_salt: str | None = None,
        mm_items: Sequence[Sequence[str]] = (),
        event_id: int | None = None,
    ) -> int | None:
        """See `KvEventPublisher.publish_stored`."""
        # Hashed in the caller's thread: the other one is left to the network.
        events = stored_events(
            token_ids,
            num_block_tokens,
            block_hashes,
            parent_hash,
            block_size=self._publisher.spec.block_size,
            lora_name=lora_name,
            medium=medium,
            cache_salt=cache_salt,
            mm_items=mm_items,
        )
        return self._wait(self._publish(events, event_id))

    def publish_removed(
        self, block_hashes: Sequence[int], *, medium: str | None = None, event_id: int | None = None
    ) -> int | None:
        """See `KvEventPublisher.publish_removed`."""
        return self._wait(self._publish(removed_events(block_hashes, medium=medium), event_id))

    def publish_cleared(self, *, event_id: int | None = None) -> int | None:
        """See `KvEventPublisher.publish_cleared`."""
        return self._wait(self._publish([Cleared()], event_id))

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

    async def _publish(self, events: Sequence[Event], event_id: int | None) -> int | None:
        return self._publisher.publish(events, event_id)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop. Waiting for it bounds what threads can have under way, and brings its errors."""
        if not self._open:
            coroutine.close()
            raise ValueError("the publisher is not open")
        return self._thread.run(coroutine)
