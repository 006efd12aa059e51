"""Events over NATS core: fire and forget, so that what is lost is asked of the publisher.

::

    bridges ──kvscout.<ns>.core.>──▶ NatsCore ──by subject──▶ CoreFeed ──▶ Source
       ▲                                                         │
       └──── Recover: over NATS, else by rpc to the bridge ◀─────┘

One subscription serves every worker. A message is lost where a connection is, and where this process reads more slowly
than NATS sends (the client then drops): both are told to the sources that may have lost something, and each asks its
publisher from its last event on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from kvscout.v1 import bridge_pb2, bridge_pb2_grpc
from kvscout_blocks.events import DecodedBatch
from kvscout_blocks.feed import Feed, HistoryBroken, NoHistory, SourceInput, SourceState
from kvscout_blocks.index import BlockIndex
from kvscout_blocks.published import PublishedReader
from kvscout_blocks.recovery import recover, recover_request
from kvscout_blocks.sequence import SequencedBatch
from kvscout_common.channel import PLAINTEXT, ClientSecurity, open_channel, stream
from kvscout_common.errors import FailedPrecondition, KvscoutError
from kvscout_common.nats_link import NatsLink
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.worker import Transport, WorkerRank, WorkerSpec

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

log = logging.getLogger("kvscout.events")

PENDING_MESSAGES = 65_536
PENDING_BYTES = 64 * 1024 * 1024
"""Messages that wait to be read; the client drops what comes beyond."""
YIELD_EVERY = 32
"""Messages between two turns of the event loop: the client reads a backlog in one go."""
DROPPED_SECONDS = 0.25
"""Between the first message dropped and asking for it: more follow it."""
UNANSWERED = 3
"""Requests that nobody answers while events go on coming, until their publisher counts as one without a local index."""
RPC_SECONDS = 60.0
"""Longest answer of a bridge by rpc."""
HEAL_SECONDS = 30.0
MAX_HEAL_SECONDS = 600.0
"""Between two tries to complete a history; the wait doubles."""

History = AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]


class NatsCore:
    """`transports.EventTransport` of NATS core.

    Args:
        link: The process's connection.
        security: How bridges are called.
        warnings: Where what is wrong is logged.
        failed: Told of a defect of ours.
    """

    def __init__(
        self,
        link: NatsLink,
        *,
        security: ClientSecurity = PLAINTEXT,
        warnings: RateLimitedLog,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.link = link
        self.unknown_messages = 0
        """Of sources that nobody registered; not indexed."""
        self.dropped_messages = 0
        """By the client, because we read too slowly."""
        self._security = security
        self._warnings = warnings
        self._failed = failed
        self._feeds: dict[str, CoreFeed] = {}
        """By subject."""
        self._subscription: Subscription | None = None
        self._dropped: set[str] = set()
        """Subjects of messages dropped since the last look."""
        self._look: asyncio.TimerHandle | None = None
        self._received = 0
        link.on_connected(self._connected)
        link.on_slow(self._on_slow)

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """See `EventTransport.feed`."""
        return CoreFeed(self, spec, rank, index, self._security)

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """None: the connection is the process's."""
        return {}

    async def close(self) -> None:
        """Ends the subscription; the connection is not ours."""
        if self._look is not None:
            self._look.cancel()
        if self._subscription is not None and self.link.connected:
            await self._subscription.unsubscribe()

    def add(self, feed: CoreFeed) -> None:
        """Begins to deliver to a feed."""
        self._feeds[feed.subject] = feed
        if self._subscription is not None and self.link.connected:
            feed.on_reconnect()

    def remove(self, feed: CoreFeed) -> None:
        """Ends delivery."""
        if self._feeds.get(feed.subject) is feed:
            del self._feeds[feed.subject]

    async def _connected(self) -> None:
        """A hook of the link: every feed asks for what it missed, once the subscription stands."""
        if self._subscription is None:
            self._subscription = await self.link.client.subscribe(
                self.link.names.all_core_events,
                cb=self._on_message,
                pending_msgs_limit=PENDING_MESSAGES,
                pending_bytes_limit=PENDING_BYTES,
            )
        # What is published after the server has answered comes to us; what was before is in the recovery.
        await self.link.client.flush(timeout=5)
        for feed in list(self._feeds.values()):
            feed.on_reconnect()

    async def _on_message(self, message: Msg) -> None:
        try:
            feed = self._feeds.get(message.subject)
            if feed is not None:
                feed.receive(message.data)
            else:
                self.unknown_messages += 1
        except Exception as error:
            # The client would only log it.
            self._failed(error)
        self._received += 1
        if self._received % YIELD_EVERY == 0:
            await asyncio.sleep(0)

    def _on_slow(self, subject: str) -> None:
        """The client dropped a message."""
        if subject not in self._feeds:
            return
        self.dropped_messages += 1
        self._dropped.add(subject)
        self._warnings.warning("slow", "events come faster than they are read; what NATS drops is asked for again")
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(DROPPED_SECONDS, self._ask_for_dropped)

    def _ask_for_dropped(self) -> None:
        self._look = None
        dropped, self._dropped = self._dropped, set()
        for subject in dropped:
            feed = self._feeds.get(subject)
            if feed is not None:
                feed.on_reconnect()


class CoreFeed:
    """`feed.Feed` of one worker rank.

    Args:
        core: Delivers its messages.
        spec: The worker.
        rank: Which of its ranks.
        index: Decides the form in which batches are decoded.
        security: How its bridge is called.
    """

    def __init__(
        self, core: NatsCore, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex, security: ClientSecurity
    ) -> None:
        self.subject = core.link.names.core_events(spec.tenant, spec.model, rank)
        self.address: Hashable = (Transport.NATS_CORE, self.subject, spec.bridge_endpoint)
        self.can_replay = True
        self.broken = ""
        self._core = core
        self._spec = spec
        self._rank = rank
        self._index = index
        self._security = security
        self._reader = PublishedReader(index, rank, spec.pool)
        self._source: SourceInput | None = None
        self._received = 0
        self._unanswered = 0
        """Requests in a row that nobody answered while events came."""
        self._heal_at: float | None = None
        self._heal_seconds = HEAL_SECONDS

    @property
    def outage(self) -> str:
        """See `Feed.outage`."""
        return self._core.link.problem

    def open(self, source: SourceInput) -> None:
        """See `Feed.open`."""
        self._source = source
        self._core.add(self)

    def close(self) -> None:
        """See `Feed.close`."""
        self._core.remove(self)

    def tick(self, now: float) -> None:
        """See `Feed.tick`: a publisher that was away may be back, with its whole state."""
        source = self._source
        assert source is not None
        if not source.incomplete:
            self._heal_at, self._heal_seconds = None, HEAL_SECONDS
        elif self._heal_at is None:
            self._heal_at = now + self._heal_seconds
        elif now >= self._heal_at and self._core.link.connected and not source.replaying:
            self._heal_seconds = min(2 * self._heal_seconds, MAX_HEAL_SECONDS)
            self._heal_at = now + self._heal_seconds
            source.heal()

    def on_reconnect(self) -> None:
        """Messages may have been lost."""
        assert self._source is not None
        # Chunks of before belong to a state that may have lost some.
        self._reader = PublishedReader(self._index, self._rank, self._spec.pool)
        self._source.on_reconnect()

    def receive(self, message: bytes) -> None:
        """A message came on its subject."""
        assert self._source is not None
        self._received += 1
        try:
            item = self._reader.read(message)
        except KvscoutError as error:
            if isinstance(error, FailedPrecondition):
                self.broken = str(error)
            self._source.on_malformed(str(error))
            return
        self.broken = ""
        if isinstance(item, SourceState):
            self._source.on_state(item)
        elif item is not None:
            self._source.on_batch(item)

    async def history(self, first_id: int) -> History:
        """See `Feed.history`; over NATS, and where that fails by rpc."""
        asked_at = self._received
        parts = 0
        try:
            async with aclosing(self._ask(self._over_nats, first_id)) as items:
                async for item in items:
                    parts += 1
                    yield item
        except HistoryBroken as broken:
            if self._spec.bridge_endpoint:
                # What it repeats is dropped as any duplicate.
                async with aclosing(self._ask(self._by_rpc, first_id)) as items:
                    async for item in items:
                        yield item
            else:
                raise self._judge(broken, answered=parts > 0, alive=self._received > asked_at) from broken
        self._unanswered = 0

    def _judge(self, broken: HistoryBroken, *, answered: bool, alive: bool) -> HistoryBroken:
        """Whether to ask again: a publisher that sends events and never answers keeps none of them."""
        assert self._source is not None
        if answered:
            self._unanswered = 0
        elif alive or self._unanswered == 0:
            self._unanswered += 1
        if self._unanswered >= UNANSWERED:
            # One more silence will do the next time.
            self._unanswered = UNANSWERED - 1
            return NoHistory(f"its publisher keeps no history: {broken}")
        return broken

    async def _ask(self, way: Callable[[int | None], AsyncGenerator[Any, None]], first_id: int) -> History:
        """The batches and states of an answer.

        Raises:
            HistoryBroken: It ended before its end, or cannot be read.
        """
        reader = PublishedReader(self._index, self._rank, self._spec.pool)
        behind = False
        # From the beginning on: the state is shorter than all that led to it.
        async with aclosing(way(first_id or None)) as responses:
            async for response in responses:
                behind = response.outcome == bridge_pb2.RECOVER_OUTCOME_TOO_NEW
                item = _item(reader, response)
                if item is not None:
                    yield item
        if reader.amid_state:
            raise HistoryBroken("the state broke off")
        if behind and first_id:
            # It has not even what we have: it lives anew, or lost what it knew.
            async with aclosing(way(None)) as responses:
                async for item in _items(reader, responses):
                    yield item

    async def _over_nats(self, first_id: int | None) -> AsyncGenerator[bridge_pb2.RecoverResponse, None]:
        link = self._core.link
        if not link.connected:
            raise HistoryBroken(link.problem or "not connected to NATS")
        subject = link.names.recover(self._spec.tenant, self._rank)
        request = recover_request(self._spec.tenant, self._rank, first_id)
        async with aclosing(recover(link.client, subject, request)) as responses:
            async for response in responses:
                yield response

    async def _by_rpc(self, first_id: int | None) -> AsyncGenerator[bridge_pb2.RecoverResponse, None]:
        request = recover_request(self._spec.tenant, self._rank, first_id)
        channel = open_channel(self._spec.bridge_endpoint, self._security)
        try:
            recover_rpc = bridge_pb2_grpc.BridgeStub(channel).Recover
            async with aclosing(stream(recover_rpc, request, timeout=RPC_SECONDS)) as responses:
                async for response in responses:
                    yield response
        except FailedPrecondition as error:
            raise NoHistory(f"its bridge at {self._spec.bridge_endpoint}: {error}") from error
        except KvscoutError as error:
            raise HistoryBroken(f"its bridge at {self._spec.bridge_endpoint}: {error}") from error
        finally:
            await channel.close()


def _item(
    reader: PublishedReader, response: bridge_pb2.RecoverResponse
) -> SequencedBatch[DecodedBatch] | SourceState | None:
    """What a part of an answer says, if anything yet."""
    if response.outcome == bridge_pb2.RECOVER_OUTCOME_INVALID_RANGE:
        raise HistoryBroken("the publisher says that the range is wrong")
    if not response.HasField("batch"):
        return None
    try:
        return reader.read(response.batch.SerializeToString())
    except KvscoutError as error:
        raise HistoryBroken(f"the publisher's answer cannot be read: {error}") from error


async def _items(reader: PublishedReader, responses: AsyncIterator[bridge_pb2.RecoverResponse]) -> History:
    async for response in responses:
        item = _item(reader, response)
        if item is not None:
            yield item
    if reader.amid_state:
        raise HistoryBroken("the state broke off")
