"""Events over NATS core: fire and forget, so that what is lost is requested from the publisher.

::

    bridges ──kvscout.<ns>.core.>──▶ NatsCore ──by subject──▶ PublisherFeed ──▶ Source
       ▲                                                         │
       └──── Recover: over NATS, else by rpc to the bridge ◀─────┘

One subscription serves every worker; a shard of several subscribes to its own ranks instead, so that the others' events
do not come to it. A message is lost where a connection is, and where this process reads more slowly
than NATS sends (the client then drops). Either is reported to the sources that may have lost something, and each
requests the events after its last one from its publisher.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import nats.errors

from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.feed import Feed
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.nats.barrier import NatsBarrier
from kvscout_common.nats.link import NatsLink
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import INTENDED
from kvscout_common.shards import WHOLE, Shard
from kvscout_common.worker import Transport, WorkerRank, WorkerSpec
from kvscout_indexer.feeds.publisher_feed import PublisherFeed

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

log = logging.getLogger("kvscout.events")

PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 * 1024 * 1024
"""Messages that wait to be read; the client drops what comes beyond."""
LEAST_PENDING_MESSAGES = 256
"""Of one rank, where each has a share of them."""
YIELD_EVERY = 32
"""Messages between two iterations of the event loop: the client reads a backlog in one go."""
SUBSCRIBED_SECONDS = 5.0
"""Longest wait for the server to show that it has our subscription."""
DROPPED_SECONDS = 0.25
"""Between the first message dropped and the request for it: more follow."""


class NatsCore:
    """`transports.EventTransport` of NATS core.

    Args:
        link: The process's connection.
        security: How bridges are called.
        shard: Which workers are read.
        warnings: Where what is wrong is logged.
        failed: Called with a defect of this program.
    """

    def __init__(
        self,
        link: NatsLink,
        *,
        security: ClientSecurity = PLAINTEXT,
        shard: Shard = WHOLE,
        warnings: RateLimitedLog,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.link = link
        self.unknown_messages = 0
        """Messages of sources that are not registered; not indexed."""
        self.dropped_messages = 0
        """By the client, because we read too slowly."""
        self._security = security
        self._warnings = warnings
        self._failed = failed
        self._feeds: dict[str, PublisherFeed] = {}
        """By subject."""
        self._shard = shard
        self._subscriptions: dict[str, Subscription] = {}
        """By subject."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._barrier = NatsBarrier(link.client)
        self._dropped: set[str] = set()
        """Subjects of messages dropped since the last look."""
        self._look: asyncio.TimerHandle | None = None
        self._received = 0
        link.on_connected(self._connected)
        link.on_slow(self._on_slow)

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """See `EventTransport.feed`."""
        return PublisherFeed(
            self,
            spec,
            rank,
            index,
            self._security,
            transport=Transport.NATS_CORE,
            subject=self.link.names.core_events(spec.tenant, spec.model, rank),
        )

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return no tasks: the connection is the process's."""
        return {}

    async def close(self) -> None:
        """End the subscription; the connection is not ours."""
        if self._look is not None:
            self._look.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.link.connected:
            for subscription in self._subscriptions.values():
                await subscription.unsubscribe()

    def add(self, feed: PublisherFeed) -> None:
        """Begin to deliver to a feed."""
        self._feeds[feed.subject] = feed
        if not self.link.connected:
            return
        if self._shard.count > 1:
            self._begin(partial(self._follow, feed))
        elif self._subscriptions:
            feed.on_reconnect()

    def remove(self, feed: PublisherFeed) -> None:
        """End delivery."""
        if self._feeds.get(feed.subject) is feed:
            del self._feeds[feed.subject]
            subscription = self._subscriptions.pop(feed.subject, None)
            if subscription is not None:
                self._begin(subscription.unsubscribe)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            try:
                await work()
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.info("a subscription waits for the next connection to NATS: %r", error)
            except INTENDED:
                raise
            except BaseException as error:
                self._failed(error)

        task = asyncio.get_running_loop().create_task(run(), name="subscription of a rank")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, feed: PublisherFeed) -> None:
        """Subscribe to one rank's events, and have it request what it missed."""
        await self._subscribe(feed.subject)
        await self._barrier.wait(self._barrier.generation, seconds=SUBSCRIBED_SECONDS)
        if self._feeds.get(feed.subject) is feed:
            feed.on_reconnect()

    async def _subscribe(self, subject: str) -> None:
        if subject in self._subscriptions:
            return
        # Of all ranks together so much waits, but for a message or two of each.
        share = max(1, len(self._feeds)) if self._shard.count > 1 else 1
        subscription = await self.link.client.subscribe(
            subject,
            cb=self._on_message,
            pending_msgs_limit=max(LEAST_PENDING_MESSAGES, PENDING_MESSAGES // share),
            pending_bytes_limit=max(2 * self.link.client.max_payload, PENDING_BYTES // share),
        )
        if self._shard.count > 1 and (subject not in self._feeds or subject in self._subscriptions):
            await subscription.unsubscribe()
        else:
            self._subscriptions[subject] = subscription

    async def _connected(self) -> None:
        """Have every feed request what it missed, once the subscription stands; a hook of the link."""
        whole = [self.link.names.all_core_events]
        for subject in whole if self._shard.count == 1 else list(self._feeds):
            await self._subscribe(subject)
        # What is published after the server has answered comes to us; what was before is in the recovery.
        await self._barrier.wait(self._barrier.generation, seconds=SUBSCRIBED_SECONDS)
        for feed in list(self._feeds.values()):
            feed.on_reconnect()

    async def _on_message(self, message: Msg) -> None:
        try:
            feed = self._feeds.get(message.subject)
            if feed is not None:
                feed.receive(message.data)
            else:
                self.unknown_messages += 1
        except INTENDED:
            raise
        except BaseException as error:
            # The client would only log it.
            self._failed(error)
        self._received += 1
        if self._received % YIELD_EVERY == 0:
            await asyncio.sleep(0)

    def _on_slow(self, subject: str) -> None:
        """Note that the client dropped a message."""
        if subject not in self._feeds:
            return
        self.dropped_messages += 1
        self._dropped.add(subject)
        self._warnings.warning(
            "slow", "events arrive faster than they are read; events that NATS drops are requested again"
        )
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(DROPPED_SECONDS, self._request_dropped)

    def _request_dropped(self) -> None:
        self._look = None
        dropped, self._dropped = self._dropped, set()
        for subject in dropped:
            feed = self._feeds.get(subject)
            if feed is not None:
                feed.on_reconnect()
