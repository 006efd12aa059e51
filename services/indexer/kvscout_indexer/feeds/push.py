"""Events that publishers push over `PublishEvents`: one stream a source, answered with how far it was applied.

::

    publisher ══messages══▶ Stream ──▶ Source
              ◀══answers═══   cursor; request n: send again from event a on

A stream loses nothing by itself; a gap is a batch that its publisher dropped, or that came before. It is requested
once: request n names the first event wanted, and the publisher goes back to it and continues from there, sends its
state, or refuses by a greeting with number n. All of it comes in order on the same stream, so that it is live: the
sequence holds what came after the gap, and its replay ends when live batches have filled the gap. A greeting of an
older publisher, which names no request, ends the only one. gRPC holds back a publisher whose messages are not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Mapping
from typing import Any, Final, NamedTuple

import grpc

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.bytes.messages import check_version, parse_batch, source_of
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.feed import Cursor, Feed, HistoryBroken, SourceInput, SourceState
from kvscout_blocks.source.published import PublishedReader
from kvscout_common.errors import Draining, FailedPrecondition, InternalError, InvalidArgument, KvscoutError, NotFound
from kvscout_common.process.endings import INTENDED
from kvscout_common.registry.registry import Registry
from kvscout_common.worker import Transport, WorkerRank, WorkerSpec
from kvscout_indexer.feeds.healing import Healing

log = logging.getLogger("kvscout.events")

ACK_MESSAGES: Final = 50
ACK_SECONDS: Final = 0.02
"""An answer comes after a number of messages, or some time after the first that is not answered yet."""
RESEND_SECONDS: Final = 5.0
"""Longest wait for something that was requested again."""


Item = SequencedBatch[DecodedBatch] | SourceState


class ResendRequest(NamedTuple):
    """Request to a publisher: send again from an event on."""

    number: int
    """Number among the requests of its stream, from 1."""
    first_id: int


class Answer(NamedTuple):
    """Progress of a source, and the request to its publisher if there is a new one."""

    cursor: Cursor
    resend: ResendRequest | None
    malformed: int


class GrpcPush:
    """`transports.EventTransport` of publishers that call us.

    Args:
        registry: The workers.
        failed: Called with a defect of this program.
    """

    def __init__(self, registry: Registry, *, failed: Callable[[BaseException], None]) -> None:
        self._registry = registry
        self._failed = failed
        self._feeds: dict[tuple[str, WorkerRank], PushFeed] = {}

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """See `EventTransport.feed`."""
        return PushFeed(self._feeds, spec, rank, index)

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """Return no tasks."""
        return {}

    def drain(self) -> None:
        """End every stream: publishers find another indexer sooner than this one would let them go."""
        for feed in self._feeds.values():
            feed.end_stream(Draining("the indexer shuts down"))

    async def close(self) -> None:
        """Do nothing: streams end with their server."""

    async def publish(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[Answer, None]:
        """Serve one stream: takes its messages and yields answers until it ends.

        Args:
            messages: Serialised `KvEventBatch`es; read only as fast as they are applied.

        Raises:
            InvalidArgument: A message that is none, or names another source than the first.
            NotFound: The worker or rank is not registered.
            FailedPrecondition: Its events are not taken: see `PublishEvents`.
        """
        messages = _until_broken_off(messages)
        first = await anext(messages, None)
        if first is None:
            return
        stream = Stream(self._feed_of(first))
        stream.feed.attach(stream)
        reader = asyncio.get_running_loop().create_task(stream.read(first, messages), name=f"push {stream.feed.name}")
        try:
            async for answer in stream.answers():
                yield answer
        finally:
            reader.cancel()
            stream.feed.detach(stream)
            (outcome,) = await asyncio.gather(reader, return_exceptions=True)
            if isinstance(outcome, BaseException) and not isinstance(outcome, INTENDED):
                self._failed(outcome)

    def _feed_of(self, first: bytes) -> PushFeed:
        """Return the feed that a stream is for.

        Raises:
            KvscoutError: As `publish`.
        """
        message = parse_batch(first)
        if not message.worker_id:
            raise InvalidArgument("must not be empty", field="worker_id")
        if not message.version:
            raise InvalidArgument("must be set", field="version")
        check_version(message)
        rank, pool = source_of(message)
        spec = self._registry.get(pool.tenant, rank.worker_id).spec
        if rank not in spec.ranks:
            raise NotFound(f"worker {rank.worker_id!r} has no rank {rank.dp_rank}")
        if spec.transport is not Transport.GRPC:
            raise FailedPrecondition(
                f"worker {rank.worker_id!r} is registered with transport {spec.transport}, not grpc"
            )
        feed = self._feeds.get((pool.tenant, rank))
        if feed is None:
            raise FailedPrecondition(f"the events of worker {rank.worker_id!r} are not read by this indexer")
        return feed


class PushFeed:
    """`feed.Feed` of one worker rank whose publisher calls.

    Args:
        feeds: Where streams find it, while it is open.
        spec: The worker.
        rank: Which of its ranks.
        index: Decides the form in which batches are decoded.
    """

    def __init__(
        self,
        feeds: dict[tuple[str, WorkerRank], PushFeed],
        spec: WorkerSpec,
        rank: WorkerRank,
        index: BlockIndex,
    ) -> None:
        self.address: Hashable = (Transport.GRPC, spec.tenant, rank)
        self.can_replay = True
        self.rewinds = True
        self.broken = ""
        self.name = f"{rank.worker_id}/{rank.dp_rank}"
        self.identity = (rank, spec.pool)
        """Worker rank and pool that its messages name."""
        self._feeds = feeds
        self._spec = spec
        self._rank = rank
        self._index = index
        self.source: SourceInput
        """Receiver of its batches; set by `open`."""
        self._stream: Stream | None = None
        self._healing = Healing()

    @property
    def outage(self) -> str:
        """See `Feed.outage`."""
        return "" if self._stream is not None else "no publisher is connected"

    def open(self, source: SourceInput) -> None:
        """See `Feed.open`."""
        self.source = source
        self._feeds[self._spec.tenant, self._rank] = self

    def close(self) -> None:
        """See `Feed.close`."""
        if self._feeds.get((self._spec.tenant, self._rank)) is self:
            del self._feeds[self._spec.tenant, self._rank]
        self.end_stream(FailedPrecondition(f"worker {self.name} was removed, or its registration replaced"))

    def end_stream(self, error: KvscoutError) -> None:
        """End the stream, if there is one, with an error for its publisher."""
        if self._stream is not None:
            self._stream.end(error)
            self._stream = None

    def tick(self, now: float) -> None:
        """See `Feed.tick`."""
        self._healing.tick(self.source, now, possible=self._stream is not None)

    def reader(self) -> PublishedReader:
        """Read one stream's messages."""
        return PublishedReader(self._index, self._rank, self._spec.pool)

    def attach(self, stream: Stream) -> None:
        """Attach a new stream; a former one ends."""
        older, self._stream = self._stream, stream
        if older is not None:
            log.warning("a second publisher pushes events of worker %s: closing the first one's stream", self.name)
            older.end(FailedPrecondition("another stream of this source took over"))
        source = self.source
        known = source.cursor.last_event_id is not None
        if source.replaying or (known and not source.cursor.epoch):
            # What was requested over the former stream is requested over this one. And without epochs only the last
            # batch, sent again, shows whether the source is still the same.
            source.on_reconnect()
        elif source.incomplete:
            # A publisher that comes back may have its whole state by now.
            source.heal()

    def detach(self, stream: Stream) -> None:
        """Detach a stream that is over."""
        if self._stream is stream:
            self._stream = None

    async def history(self, first_id: int) -> AsyncGenerator[Item, None]:
        """See `Feed.history`; what the publisher sends again comes live, so that nothing is yielded."""
        if self._stream is None:
            raise HistoryBroken("no publisher is connected")
        await self._stream.replay(first_id)
        nothing: tuple[Item, ...] = ()
        for item in nothing:
            yield item


async def _until_broken_off(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the messages until there are no more; a broken call is not an error of the indexer."""
    try:
        async for message in messages:
            yield message
    except grpc.aio.BaseError as error:
        log.info("a publisher's stream was lost: %s", error)


class Stream:
    """One publisher's stream.

    Args:
        feed: Takes its events.
    """

    def __init__(self, feed: PushFeed) -> None:
        self.feed = feed
        self._reader = feed.reader()
        self._malformed = 0
        self._requests = 0
        """Resend requests made on this stream."""
        self._request: ResendRequest | None = None
        """The last request, until the publisher has gone back or refused."""
        self._request_due = False
        """True if the next answer carries the request."""
        self._reply: asyncio.Future[None] | None = None
        """Done when the source has what it requested, or the publisher has no more; None = nobody waits."""
        self._silence: asyncio.Timeout | None = None
        """Ends the wait for the reply."""
        self._unanswered = 0
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ended: KvscoutError | None = None
        self._finished = False

    async def read(self, first: bytes, messages: AsyncIterator[bytes]) -> None:
        """Take messages until there are no more."""
        try:
            await self._take(first, opening=True)
            self._due.set()
            async for message in messages:
                await self._take(message)
            self._end_reply(HistoryBroken("the publisher ended its stream"))
            # The last answer reports all that came.
            await self.feed.source.caught_up()
        except KvscoutError as error:
            self.end(error)
        except INTENDED:
            raise
        except BaseException:
            self.end(InternalError("internal error; the service's log has the details"))
            raise
        else:
            self._finished = True
            self._due.set()

    async def answers(self) -> AsyncGenerator[Answer, None]:
        """Yield answers as they come due, until the stream ends.

        Raises:
            KvscoutError: Why it was ended.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            if self._ended is not None:
                raise self._ended
            finished = self._finished
            yield self._answer()
            if finished:
                return

    def end(self, error: KvscoutError) -> None:
        """End the stream with an error for its publisher."""
        self._ended = self._ended or error
        self._end_reply(HistoryBroken("the publisher's stream has ended"))
        self._due.set()

    async def replay(self, first_id: int) -> None:
        """Request events from `first_id` on; return once the source has them, or the publisher has no more.

        Raises:
            HistoryBroken: Nothing new came for `RESEND_SECONDS`, or the stream ended.
        """
        if self._request is None or self._request.first_id != first_id:
            self._requests += 1
            self._request, self._request_due = ResendRequest(self._requests, first_id), True
            self._due.set()
        reply = self._reply = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(RESEND_SECONDS) as self._silence:
                await reply
        except TimeoutError as error:
            raise HistoryBroken(f"nothing was sent again within {RESEND_SECONDS:g} s") from error
        finally:
            if self._reply is reply:
                self._reply = self._silence = None

    async def _take(self, message: bytes, *, opening: bool = False) -> None:
        if self._ended is not None:
            raise self._ended
        try:
            item = self._reader.read(message)
        except InvalidArgument:
            greeting = parse_batch(message)
            if not self._is_greeting(greeting):
                raise
            if not opening:  # it may not have seen a request yet
                self._on_greeting(greeting.resend_id)
        else:
            if item is not None:
                await self._deliver(item)
        self._answer_soon()

    async def _deliver(self, item: Item) -> None:
        source, request = self.feed.source, self._request
        before = source.cursor if self._reply is not None else None
        if request is not None and (isinstance(item, SourceState) or item.event_id <= request.first_id):
            self._request = None
        if isinstance(item, SourceState):
            source.on_state(item)
            await source.caught_up()
        else:
            self._malformed += item.malformed or bool(item.content.faults)
            source.on_batch(item)
        if not source.replaying:
            self._end_reply()
        elif self._silence is not None and source.cursor != before:
            self._silence.reschedule(asyncio.get_running_loop().time() + RESEND_SECONDS)

    def _on_greeting(self, resend_id: int) -> None:
        """End the reply to a request: the publisher has sent all that it has."""
        if self._reply is None or resend_id not in (0, self._requests):
            return
        ambiguous = not resend_id and self._request is not None and self._requests > 1
        self._request = None
        # It may end the reply to a former request; another request costs less than events that are lost.
        self._end_reply(HistoryBroken("the publisher has nothing, for an unnamed request") if ambiguous else None)

    def _end_reply(self, broken: HistoryBroken | None = None) -> None:
        reply = self._reply
        if reply is None or reply.done():
            return
        if broken is None:
            reply.set_result(None)
        else:
            reply.set_exception(broken)

    def _is_greeting(self, message: events_pb2.KvEventBatch) -> bool:
        return not message.events and not message.HasField("event_id") and source_of(message) == self.feed.identity

    def _answer_soon(self) -> None:
        self._unanswered += 1
        if self._unanswered >= ACK_MESSAGES:
            self._due.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ACK_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._due.set()

    def _answer(self) -> Answer:
        self._unanswered = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        request = self._request if self._request_due else None
        self._request_due = False
        return Answer(self.feed.source.cursor, request, self._malformed)
