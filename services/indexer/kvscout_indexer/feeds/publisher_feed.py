"""The feed of one rank whose publisher sends over NATS, and keeps a local index that answers requests for the past.

::

    NATS core · JetStream ──▶ carrier ──receive──▶ PublisherFeed ──▶ Source
                                                       │
    publisher ◀── Recover: over NATS, else by rpc ─────┘
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from contextlib import aclosing
from typing import Any, Protocol

from kvscout.v1 import bridge_pb2, bridge_pb2_grpc
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.feed import HistoryBroken, NoHistory, SourceInput, SourceState
from kvscout_blocks.source.published import PublishedReader
from kvscout_blocks.source.recovery import recover, recover_request
from kvscout_common.errors import FailedPrecondition, KvscoutError
from kvscout_common.identity.client_security import ClientSecurity
from kvscout_common.nats.link import NatsLink
from kvscout_common.rpc.channel import open_channel, stream
from kvscout_common.worker import Transport, WorkerRank, WorkerSpec
from kvscout_indexer.feeds.healing import Healing

UNANSWERED = 3
"""Requests that nobody answers while events go on coming, until their publisher counts as one without a local index."""
RPC_SECONDS = 60.0
"""Longest answer of a bridge by rpc."""

History = AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]


class Carrier(Protocol):
    """Transport that delivers the messages of feeds."""

    @property
    def link(self) -> NatsLink:
        """Return the process's connection."""

    def add(self, feed: Any) -> None:
        """Begin to deliver to a feed of its own kind."""

    def remove(self, feed: Any) -> None:
        """End delivery."""


class PublisherFeed:
    """`feed.Feed` of one worker rank.

    Args:
        carrier: Delivers its messages.
        spec: The worker.
        rank: Which of its ranks.
        index: Decides the form in which batches are decoded.
        security: How its bridge is called.
        transport: The carrier's.
        subject: On which its messages come.
    """

    def __init__(
        self,
        carrier: Carrier,
        spec: WorkerSpec,
        rank: WorkerRank,
        index: BlockIndex,
        security: ClientSecurity,
        *,
        transport: Transport,
        subject: str,
    ) -> None:
        self.subject = subject
        self.address: Hashable = (transport, subject, spec.bridge_endpoint)
        self.can_replay = True
        self.rewinds = False
        self.broken = ""
        self._carrier = carrier
        self._spec = spec
        self._rank = rank
        self._index = index
        self._security = security
        self._reader = PublishedReader(index, rank, spec.pool)
        self._source: SourceInput
        """Set by `open`."""
        self._received = 0
        self._unanswered = 0
        """Requests in a row that nobody answered, with events between them."""
        self._received_before = 0
        """Messages that had come when the last one of them failed."""
        self._healing = Healing()

    @property
    def outage(self) -> str:
        """See `Feed.outage`."""
        return self._carrier.link.problem

    def open(self, source: SourceInput) -> None:
        """See `Feed.open`."""
        self._source = source
        self._carrier.add(self)

    def close(self) -> None:
        """See `Feed.close`."""
        self._carrier.remove(self)

    def tick(self, now: float) -> None:
        """See `Feed.tick`."""
        self._healing.tick(self._source, now, possible=self._carrier.link.connected)

    def on_reconnect(self) -> None:
        """Note that messages may have been lost."""
        # Chunks of before belong to a state that may have lost some.
        self._reader = PublishedReader(self._index, self._rank, self._spec.pool)
        self._source.on_reconnect()

    def receive(self, message: bytes) -> None:
        """Take a message of its subject."""
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
        parts = 0
        try:
            async with aclosing(self._request(self._over_nats, first_id)) as items:
                async for item in items:
                    parts += 1
                    yield item
        except HistoryBroken as broken:
            if self._spec.bridge_endpoint:
                # What it repeats is dropped as any duplicate.
                async with aclosing(self._request(self._by_rpc, first_id)) as items:
                    async for item in items:
                        yield item
            else:
                raise self._judge(broken, answered=parts > 0) from broken
        self._unanswered = 0

    def _judge(self, broken: HistoryBroken, *, answered: bool) -> HistoryBroken:
        """Return whether to request again: a publisher that sends events and never answers keeps none of them."""
        if answered:
            self._unanswered = 0
        elif self._received > self._received_before:
            self._unanswered += 1
            self._received_before = self._received
        if self._unanswered >= UNANSWERED:
            # One more silence will do the next time.
            self._unanswered = UNANSWERED - 1
            return NoHistory(f"its publisher keeps no history: {broken}")
        return broken

    async def _request(self, way: Callable[[int | None], AsyncGenerator[Any, None]], first_id: int) -> History:
        """Return the batches and states of an answer.

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
        link = self._carrier.link
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
    """Return what a part of an answer says, if anything yet."""
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
