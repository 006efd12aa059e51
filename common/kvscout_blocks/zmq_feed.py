"""The feed of one rank from its engine's own sockets."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import zmq

from kvscout_blocks.events import DecodedBatch, EventBatch
from kvscout_blocks.feed import Lane, Progress, SourceInput, SourceState
from kvscout_blocks.index import BlockIndex
from kvscout_blocks.lanes import Lanes, LaneSubscription
from kvscout_blocks.native_index import decode_for
from kvscout_blocks.sequence import SequencedBatch, digest
from kvscout_blocks.subscriber import Subscription, replay
from kvscout_blocks.wire import MalformedBatch, Message
from kvscout_common.endings import guarded
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.worker import EventEndpoint, WorkerRank

log = logging.getLogger("kvscout.events")

REOPEN_SECONDS = 1.0
"""Between two tries to use an endpoint: an address that is in use, such as our own of a moment ago, gets free."""


class ZmqFeed:
    """`feed.Feed` of an engine's PUB socket and, where it has one, its replay socket.

    Args:
        rank: Whose.
        endpoint: Where it publishes.
        index: Decides the form in which batches are decoded.
        context: For its sockets.
        clock: Monotonic seconds.
        warnings: Where batches that cannot be read are logged.
        failed: Told of a defect of ours.
        lanes: Read its socket and apply what is usual; None = all batches come to the source.
    """

    def __init__(
        self,
        rank: WorkerRank,
        endpoint: EventEndpoint,
        index: BlockIndex,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
        warnings: RateLimitedLog,
        failed: Callable[[BaseException], None],
        lanes: Lanes | None = None,
    ) -> None:
        self.address = endpoint
        self.can_replay = bool(endpoint.replay_endpoint)
        self.broken = ""
        self.outage = ""
        self._rank = rank
        self._index = index
        self._context = context
        self._clock = clock
        self._warnings = warnings
        self._failed = failed
        self._lanes = lanes
        self._source: SourceInput | None = None
        self._reopen_at: float | None = None
        self._subscription: Subscription | LaneSubscription | None = None

    def open(self, source: SourceInput) -> Lane | None:
        """See `Feed.open`."""
        self._source = source
        self._subscribe()
        # The subscription may be another one later.
        return self

    def lend(self, last_id: int, digests: Sequence[tuple[int, int]], stopped: Callable[[], None]) -> bool:
        """See `Lane.lend`."""
        subscription = self._subscription
        return isinstance(subscription, LaneSubscription) and subscription.lend(last_id, digests, stopped)

    def take(self) -> Progress | None:
        """See `Lane.take`."""
        subscription = self._subscription
        return subscription.take() if isinstance(subscription, LaneSubscription) else None

    def close(self) -> None:
        """See `Feed.close`."""
        self._reopen_at = None
        if self._subscription is not None:
            self._subscription.close()

    def tick(self, now: float) -> None:
        """See `Feed.tick`."""
        if self._reopen_at is not None and self._reopen_at <= now:
            self._subscribe()

    async def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        """See `Feed.history`."""
        async with aclosing(replay(self._context, self.address.replay_endpoint, first_id)) as replies:
            async for message in replies:
                yield self._sequenced(message)

    def _subscribe(self) -> None:
        source = self._source
        assert source is not None
        try:
            self._subscription = self._subscription_of(source)
        except (zmq.ZMQError, OSError) as error:
            reason = f"{self.address.endpoint}: {error}"
            if reason != self.broken:
                log.error("worker %s/%d publishes where nothing can be read: %s", *self._rank, reason)
            self.broken = reason
            self._reopen_at = self._clock() + REOPEN_SECONDS
        else:
            self.broken = ""
            self._reopen_at = None

    def _subscription_of(self, source: SourceInput) -> Subscription | LaneSubscription:
        on_message = guarded(lambda message: source.on_batch(self._sequenced(message)), self._failed)
        on_malformed = guarded(source.on_malformed, self._failed)
        on_connected = guarded(source.on_reconnect, self._failed)
        subscription = None
        if self._lanes is not None:
            subscription = self._lanes.subscribe(
                self._context,
                self.address,
                self._rank,
                self._index,
                on_message=on_message,
                on_malformed=on_malformed,
                on_connected=on_connected,
            )
        return subscription or Subscription(
            self._context,
            self.address,
            on_message=on_message,
            on_malformed=on_malformed,
            on_connected=on_connected,
        )

    def _sequenced(self, message: Message) -> SequencedBatch[DecodedBatch]:
        payload = message.payload
        try:
            batch = decode_for(self._index, payload)
        except MalformedBatch as error:
            self._warnings.warning(
                (self._rank, "batch"), "worker %s/%d: batch %d is malformed: %s", *self._rank, message.seq, error
            )
            return SequencedBatch(message.seq, digest(payload), EventBatch(()), len(payload), malformed=True)
        return SequencedBatch(
            message.seq, digest(payload), batch, len(payload), dp_rank=batch.dp_rank, cleared=batch.cleared
        )
