"""The feed of one rank from its engine's own sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import zmq

from kvscout_blocks.bytes.events import DecodedBatch, EventBatch
from kvscout_blocks.bytes.frames import MalformedBatch, Message
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.decisions import SequencedBatch, digest
from kvscout_blocks.source.feed import Bypass, HistoryBroken, Lent, Progress, SourceInput, SourceState
from kvscout_blocks.source.host_names import host_name, resolved
from kvscout_blocks.source.intake import IntakeReplay
from kvscout_blocks.source.subscriber import Callbacks
from kvscout_blocks.source.zmq_reader import ZmqReader, ZmqSubscription
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import INTENDED, guarded
from kvscout_common.worker import EventEndpoint, WorkerRank

log = logging.getLogger("kvscout.events")

NEW_AFTER_SECONDS = 3.0
"""Whoever publishes where nobody was for so long is new: one that was there before would have been connected again."""
REOPEN_SECONDS = 1.0
"""Between two tries to use an endpoint: an address that is in use, such as our own of a moment ago, gets free."""
MAX_REOPEN_SECONDS = 30.0
"""Longest wait where connection after connection ends by a refused frame; the wait doubles up to it."""
LOOK_UP_SECONDS = 5.0
"""Interval of DNS look-ups of a host that does not answer: it may have moved."""


class ZmqFeed:
    """`feed.Feed` of an engine's PUB socket and, where it has one, its replay socket.

    Args:
        rank: Whose.
        endpoint: Where it publishes.
        index: Decides the form in which batches are decoded.
        reader: Reads its sockets.
        clock: Monotonic seconds.
        warnings: Where batches that cannot be read are logged.
        failed: Called with a defect of this program.
    """

    def __init__(
        self,
        rank: WorkerRank,
        endpoint: EventEndpoint,
        index: BlockIndex,
        *,
        reader: ZmqReader,
        clock: Callable[[], float],
        warnings: RateLimitedLog,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.address = endpoint
        self.can_replay = bool(endpoint.replay_endpoint)
        self.rewinds = False
        self.broken = ""
        self.outage = ""
        self._away_since: float | None = None
        """Since when nobody is connected, on the clock."""
        self._rank = rank
        self._index = index
        self._reader = reader
        self._clock = clock
        self._warnings = warnings
        self._failed = failed
        self._source: SourceInput | None = None
        """None = not open: nothing is delivered."""
        self._reopen_at: float | None = None
        self._pause = REOPEN_SECONDS
        self._refused_at: float | None = None
        self._named = not endpoint.bind and bool(host_name(endpoint.endpoint))
        """True if a host name has to be looked up."""
        self._looking_up: asyncio.Task[None] | None = None
        self._look_up_at = 0.0
        self._connects_to = ""
        self._subscription: ZmqSubscription | None = None
        self._replay: IntakeReplay | None = None
        """What is being replayed natively."""
        self._paused = False
        self._left: Progress | None = None
        """Progress of a bypass whose subscription or replay was closed meanwhile."""

    def open(self, source: SourceInput) -> Bypass | None:
        """See `Feed.open`."""
        self._source = source
        self._begin()
        # The subscription may be another one later.
        return self

    def lend(self, last_id: int, digests: bytes, stopped: Callable[[], None]) -> bool:
        """See `Bypass.lend`."""
        return self._subscription is not None and self._subscription.lend(last_id, digests, stopped)

    def lend_replay(self, last_id: int, before: int | None, stopped: Callable[[], None]) -> bool:
        """See `Bypass.lend_replay`."""
        return self._replay is not None and self._replay.lend(last_id, before, stopped)

    def pause(self, *, paused: bool) -> None:
        """See `Bypass.pause`."""
        self._paused = paused
        if self._subscription is not None:
            self._subscription.pause(paused=paused)

    def take(self) -> Progress | None:
        """See `Bypass.take`."""
        left, self._left = self._left, None
        for lent in (self._subscription, self._replay):
            if left is None and lent is not None:
                left = lent.take()
        return left

    def peek(self) -> Lent | None:
        """See `Bypass.peek`."""
        if self._left is not None:
            return Lent(self._left.last_id, self._left.applied, self._left.age_seconds)
        return self._subscription.peek() if self._subscription is not None else None

    def close(self) -> None:
        """See `Feed.close`."""
        self._reopen_at = None
        if self._looking_up is not None:
            self._looking_up.cancel()
        self._unsubscribe()
        self._end_replay()
        # Else the index, megabytes outside of Python's sight, lives until the garbage collector looks for cycles.
        self._source = None

    def tick(self, now: float) -> None:
        """See `Feed.tick`."""
        moved = self._named and bool(self.outage) and self._look_up_at <= now
        if self._reopen_at <= now if self._reopen_at is not None else moved:
            self._begin()

    async def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        """See `Feed.history`."""
        try:
            endpoint = await resolved(self.address.replay_endpoint)
        except OSError as error:
            raise HistoryBroken(f"{self.address.replay_endpoint}: {error}") from error
        native = self._reader.native_replay(endpoint, self._rank, self._index, first_id)
        self._end_replay()
        self._replay = native
        try:
            replies = native.replies() if native is not None else self._reader.replay(endpoint, first_id)
            async with aclosing(replies):
                async for message in replies:
                    yield self._sequenced(message)
        finally:
            if native is not None and self._replay is native:
                self._end_replay()

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._left = self._replay.take() or self._left
            self._replay.close()
        self._replay = None

    def _begin(self) -> None:
        """Open the socket, or begin to look up its host name."""
        self._reopen_at = None
        if not self._named:
            self._subscribe(self.address.endpoint)
        elif self._looking_up is None or self._looking_up.done():
            self._looking_up = asyncio.get_running_loop().create_task(self._look_up())

    async def _look_up(self) -> None:
        self._look_up_at = self._clock() + LOOK_UP_SECONDS
        try:
            endpoint = await resolved(self.address.endpoint)
            if endpoint != self._connects_to or self._subscription is None:
                self._subscribe(endpoint)
        except OSError as error:
            if self.outage or self._subscription is None:
                self._report_outage(f"{self.address.endpoint}: {error}")
        except INTENDED:
            raise
        except BaseException as error:
            self._failed(error)

    def _subscribe(self, endpoint: str) -> None:
        source = self._source
        if source is None:
            return
        self._unsubscribe()
        try:
            address = replace(self.address, endpoint=endpoint)
            self._subscription = self._reader.subscribe(address, self._rank, self._index, self._callbacks(source))
            self._connects_to = endpoint
            if self._paused:
                self._subscription.pause(paused=True)
        except (zmq.ZMQError, OSError) as error:
            reason = f"{self.address.endpoint}: {error}"
            if reason != self.broken:
                log.error("worker %s/%d has an unreadable event endpoint: %s", *self._rank, reason)
            self.broken = reason
            self._reopen_at = self._clock() + REOPEN_SECONDS
        else:
            self.broken = ""
            self._reopen_at = None

    def _unsubscribe(self) -> None:
        if self._subscription is not None:
            self._left = self._subscription.take() or self._left
            self._subscription.close()
        self._subscription = None

    def _on_connected(self) -> None:
        away = self._away_since is not None and self._clock() - self._away_since >= NEW_AFTER_SECONDS
        self.outage, self._away_since = "", None
        if self._source is not None:
            self._source.on_reconnect(new_publisher=away)

    def _on_unconnected(self) -> None:
        endpoint = self.address.endpoint
        if self._away_since is None:
            self._away_since = self._clock()
        if self.address.bind:
            self._report_outage(f"nothing is connected to {endpoint}, which is bound here for the engine to connect to")
        else:
            self._report_outage(f"nothing answers at {endpoint}")

    def _on_refused(self, reason: str) -> None:
        """Connect again, later, after a connection that was ended because of what it sent."""
        self._away_since = None
        reason = f"{reason}, from {self._connects_to}"
        if self._source is not None:
            self._source.on_malformed(reason)
        if self.address.bind:
            return
        now = self._clock()
        again = self._refused_at is not None and now - self._refused_at < 2 * MAX_REOPEN_SECONDS
        self._pause = min(2 * self._pause, MAX_REOPEN_SECONDS) if again else REOPEN_SECONDS
        self._refused_at = now
        self._report_outage(f"the connection was ended by {reason}; it is made again")
        self._unsubscribe()
        self._reopen_at = now + self._pause

    def _report_outage(self, reason: str) -> None:
        self.outage = reason
        self._warnings.warning((self._rank, "connection"), "worker %s/%d: %s", *self._rank, reason)

    def _callbacks(self, source: SourceInput) -> Callbacks:
        return Callbacks(
            on_message=guarded(lambda message: source.on_batch(self._sequenced(message)), self._failed),
            on_malformed=guarded(source.on_malformed, self._failed),
            on_connected=guarded(self._on_connected, self._failed),
            on_unconnected=guarded(self._on_unconnected, self._failed),
            on_refused=guarded(self._on_refused, self._failed),
        )

    def _sequenced(self, message: Message) -> SequencedBatch[DecodedBatch]:
        payload = message.payload
        try:
            batch = self._index.decode(payload)
        except MalformedBatch as error:
            self._warnings.warning(
                (self._rank, "batch"), "worker %s/%d: batch %d is malformed: %s", *self._rank, message.seq, error
            )
            return SequencedBatch(message.seq, digest(payload), EventBatch(()), len(payload), malformed=True)
        return SequencedBatch(
            message.seq, digest(payload), batch, len(payload), dp_rank=batch.dp_rank, cleared=batch.cleared
        )
