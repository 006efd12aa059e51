"""Events that publishers push over `PublishEvents`: one stream a source, answered with how far it was applied.

::

    publisher ══messages══▶ Stream ──live────▶ Source
              ◀══answers═══   │  └──resent──▶ history ──▶ Source
                              └── cursor, resend_from

A stream loses nothing by itself; a gap is a batch that its publisher dropped, or that came before. It is asked for
once, by `resend_from`; what goes on coming until the publisher has turned back is live and waits in the sequence, what
comes after is the history, until it has caught up. A greeting, too, ends the history that it names by its `resend_id`:
it may come when the next one has been asked for. A publisher whose messages are not read is held back by gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Hashable, Mapping
from typing import Any, Final, NamedTuple

import grpc

from kvscout.v1 import events_pb2
from kvscout_blocks.bytes.codec import check_version, parse_batch, source_of
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.feed import Cursor, Feed, HistoryBroken, SourceInput, SourceState
from kvscout_blocks.source.published import PublishedReader
from kvscout_blocks.source.sequence import SequencedBatch
from kvscout_common.errors import Draining, FailedPrecondition, InternalError, InvalidArgument, KvscoutError, NotFound
from kvscout_common.process.endings import INTENDED
from kvscout_common.registry.registry import Registry
from kvscout_common.worker import Transport, WorkerRank, WorkerSpec
from kvscout_indexer.feeds.healing import Healing
from kvscout_indexer.feeds.resend import Item, Question, Resend

log = logging.getLogger("kvscout.events")

ACK_MESSAGES: Final = 50
ACK_SECONDS: Final = 0.02
"""An answer comes after so many messages, or so long after the first that is not answered yet."""
RESEND_SECONDS: Final = 5.0
"""Longest wait for something that was asked for again."""


class Answer(NamedTuple):
    """How far a source is."""

    cursor: Cursor
    resend: Question | None
    malformed: int


class GrpcPush:
    """`transports.EventTransport` of publishers that call us.

    Args:
        registry: The workers.
        failed: Told of a defect of ours.
    """

    def __init__(self, registry: Registry, *, failed: Callable[[BaseException], None]) -> None:
        self._registry = registry
        self._failed = failed
        self._feeds: dict[tuple[str, WorkerRank], PushFeed] = {}

    def feed(self, spec: WorkerSpec, rank: WorkerRank, index: BlockIndex) -> Feed | None:
        """See `EventTransport.feed`."""
        return PushFeed(self._feeds, spec, rank, index)

    def tasks(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """None."""
        return {}

    def drain(self) -> None:
        """Ends every stream: publishers find another indexer sooner than this one would let them go."""
        for feed in self._feeds.values():
            feed.end_stream(Draining("the indexer shuts down"))

    async def close(self) -> None:
        """Nothing is held: streams end with their server."""

    async def publish(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[Answer, None]:
        """Serves one stream: takes its messages and yields answers until it ends.

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
        """The feed that a stream is for.

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
        self.broken = ""
        self.name = f"{rank.worker_id}/{rank.dp_rank}"
        self.identity = (rank, spec.pool)
        """What its messages name."""
        self._feeds = feeds
        self._spec = spec
        self._rank = rank
        self._index = index
        self._source: SourceInput | None = None
        self._stream: Stream | None = None
        self._healing = Healing()

    @property
    def outage(self) -> str:
        """See `Feed.outage`."""
        return "" if self._stream is not None else "no publisher is connected"

    @property
    def source(self) -> SourceInput:
        """Where it delivers to; it is open."""
        assert self._source is not None
        return self._source

    def open(self, source: SourceInput) -> None:
        """See `Feed.open`."""
        self._source = source
        self._feeds[self._spec.tenant, self._rank] = self

    def close(self) -> None:
        """See `Feed.close`."""
        if self._feeds.get((self._spec.tenant, self._rank)) is self:
            del self._feeds[self._spec.tenant, self._rank]
        self.end_stream(FailedPrecondition(f"worker {self.name} was removed, or its registration replaced"))

    def end_stream(self, error: KvscoutError) -> None:
        """Ends the stream that there is, if there is one; its publisher is told why."""
        if self._stream is not None:
            self._stream.end(error)
            self._stream = None

    def tick(self, now: float) -> None:
        """See `Feed.tick`."""
        self._healing.tick(self.source, now, possible=self._stream is not None)

    def reader(self) -> PublishedReader:
        """Reads one stream's messages."""
        return PublishedReader(self._index, self._rank, self._spec.pool)

    def attach(self, stream: Stream) -> None:
        """A stream came; one that was there ends."""
        older, self._stream = self._stream, stream
        if older is not None:
            log.warning("a second publisher pushes events of worker %s: the first one's stream is ended", self.name)
            older.end(FailedPrecondition("another stream of this source took over"))
        source = self.source
        known = source.cursor.last_event_id is not None
        if source.replaying or (known and not source.cursor.epoch):
            # What was asked of the former stream is asked of this one. And without epochs only the last batch, sent
            # again, tells whether the source is still the same.
            source.on_reconnect()
        elif source.incomplete:
            # A publisher that comes back may have its whole state by now.
            source.heal()

    def detach(self, stream: Stream) -> None:
        """A stream is over."""
        if self._stream is stream:
            self._stream = None

    async def history(self, first_id: int) -> AsyncGenerator[Item, None]:
        """See `Feed.history`."""
        stream = self._stream
        if stream is None:
            raise HistoryBroken("no publisher is connected")
        resend = stream.ask(first_id)
        try:
            while True:
                try:
                    async with asyncio.timeout(RESEND_SECONDS):
                        item = await resend.get()
                except TimeoutError as error:
                    raise HistoryBroken(f"nothing was sent again within {RESEND_SECONDS:g} s") from error
                if item is None:
                    return
                if isinstance(item, HistoryBroken):
                    raise item
                yield item
        finally:
            stream.stop_asking(resend)


async def _until_broken_off(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The messages; a call that is over is no error of ours."""
    try:
        async for message in messages:
            yield message
    except grpc.aio.BaseError as error:
        log.info("a publisher's stream broke off: %s", error)


class Stream:
    """One publisher's stream.

    Args:
        feed: What it brings the events of.
    """

    def __init__(self, feed: PushFeed) -> None:
        self.feed = feed
        self._reader = feed.reader()
        self._malformed = 0
        self._live = Cursor(0, None)
        """What came live last."""
        self._resend: Resend | None = None
        self._last_resend: Resend | None = None
        self._questions = 0
        """Asked on this stream."""
        self._open: Question | None = None
        """What the publisher was asked for and has not begun to send."""
        self._to_tell: Question | None = None
        """What it is still to be asked for."""
        self._unanswered = 0
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._ended: KvscoutError | None = None
        self._finished = False

    async def read(self, first: bytes, messages: AsyncIterator[bytes]) -> None:
        """Takes messages until there are no more."""
        try:
            await self._take(first, opening=True)
            self._due.set()
            async for message in messages:
                await self._take(message)
            if self._resend is not None:
                await self._resend.put(HistoryBroken("the publisher ended its stream"))
            if self._last_resend is not None:
                # The last answer tells of all that came.
                await self._last_resend.over.wait()
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
        """Yields what the publisher is to be told, as it comes due, until the stream ends.

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
        """Ends it; the publisher is told why."""
        self._ended = self._ended or error
        if self._resend is not None:
            self._resend.over.set()
        self._due.set()

    def ask(self, first_id: int) -> Resend:
        """Asks the publisher to go back; what it then sends is in the answer."""
        if self._open is None or self._open.first_id != first_id:
            self._questions += 1
            self._open = self._to_tell = Question(self._questions, first_id)
            self._due.set()
        self._resend = self._last_resend = Resend(self._open)
        return self._resend

    def stop_asking(self, resend: Resend) -> None:
        """Nobody waits for an answer any more."""
        resend.over.set()
        if self._resend is resend:
            self._resend = None
        self._answer_soon()

    async def _take(self, message: bytes, *, opening: bool = False) -> None:
        if self._ended is not None:
            raise self._ended
        try:
            item = self._reader.read(message)
        except InvalidArgument:
            greeting = parse_batch(message)
            if not self._is_greeting(greeting):
                raise
            if not opening:  # else it may not know yet what it is asked for
                await self._on_greeting(greeting.resend_id)
        else:
            if isinstance(item, SequencedBatch):
                self._malformed += item.malformed or bool(item.content.faults)
            if item is not None:
                await self._take_item(item)
        self._answer_soon()

    async def _take_item(self, item: Item) -> None:
        resend = self._resend
        if resend is not None and (resend.begun or resend.turns_back(item)):
            resend.begun = True
            self._open = None
            epoch = self.feed.source.cursor.epoch
            await resend.put(item)
            if resend.caught_up(item, self._live, epoch):
                await self._end_resend()
        elif isinstance(item, SourceState):
            self.feed.source.on_state(item)
        else:
            self._live = Cursor(item.epoch, item.event_id)
            self.feed.source.on_batch(item)

    async def _on_greeting(self, resend_id: int) -> None:
        """All that can be sent again was, of what the publisher means."""
        resend = self._resend
        if resend is None or resend_id not in (0, resend.question.number):
            return
        if not (resend_id or resend.begun) and self._questions > 1:
            # It may mean a former question, whose end came late; to ask again costs less than what is there to be had.
            await self._end_resend(HistoryBroken("the publisher says that it has nothing, and not of which request"))
        else:
            await self._end_resend()

    async def _end_resend(self, broken: HistoryBroken | None = None) -> None:
        """Nothing more is sent again."""
        resend, self._resend, self._open = self._resend, None, None
        if resend is not None:
            await resend.put(broken)

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
        question, self._to_tell = self._to_tell, None
        return Answer(self.feed.source.cursor, question, self._malformed)
