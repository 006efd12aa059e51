"""The feeds of an engine that is served over gRPC: one `SubscribeKvEvents` stream carries the events of all its ranks.

::

    engine ══SubscribeKvEvents══▶ EngineStream ── SubscribedReader ──▶ SubscribedFeed of each rank ──▶ source

Each stream begins without a position: servers refuse others (OUT_OF_RANGE), or send from there on what may be of
another life of the engine. A server that keeps the engine's batches or its state sends all of it then, and the rank
starts anew with that; after any other, what came before is missing. A stream that ends is a reconnect of every rank.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from dataclasses import replace
from typing import Any, Final, NamedTuple

import grpc

from kvscout.smg import kv_events_pb2
from kvscout_blocks.bytes.events import DecodedBatch, EventBatch
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_blocks.bytes.subscribed import MAX_MESSAGE_BYTES, StreamBroken, SubscribedBatch, SubscribedReader
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.decisions import SequencedBatch, digest
from kvscout_blocks.source.feed import NoHistory, SourceInput, SourceState
from kvscout_common.errors import ConfigError
from kvscout_common.identity.client_security import PLAINTEXT, ClientSecurity
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.plain_text import printable
from kvscout_common.process.endings import INTENDED
from kvscout_common.rpc.channel import open_channel
from kvscout_common.transport.keepalive import ENGINE_TIME_MS
from kvscout_common.worker import EngineKind, WorkerRank, WorkerSpec

FIRST_PAUSE_SECONDS: Final = 0.1
UNREACHABLE_PAUSE_SECONDS: Final = 2.0
"""Longest pause before the next stream while the server cannot be reached; pauses double up to it."""
REFUSED_PAUSE_SECONDS: Final = 30.0
"""Longest pause after streams that the server ended, and the first one where it has none."""
STEADY_SECONDS: Final = 30.0
"""After a stream of this length, pauses begin with the first one again."""
ANSWER_SECONDS: Final = 5.0
"""Time after which a server is reported that has not answered the call."""
SILENCE_SECONDS: Final = 20.0
"""Silence that ends the stream of a server that reports its load: it does so every five seconds at least."""
NEW_AFTER_SECONDS: Final = 3.0
"""Whoever publishes where nobody was for so long is new."""
INLINE_BYTES: Final = 64 * 1024
"""Larger messages are read in a thread, one at a time: 16 MiB may take half a GiB meanwhile."""
YIELD_EVERY: Final = 32
"""Messages between two iterations of the event loop."""

_METHODS: Final = {
    EngineKind.VLLM: "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
    EngineKind.SGLANG: "/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents",
    EngineKind.TRTLLM: "/trtllm.TrtllmService/SubscribeKvEvents",
    EngineKind.MOCK: "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
}
_REASON_CHARS: Final = 300


def stream_address(spec: WorkerSpec) -> Hashable:
    """Return what an engine's stream depends on."""
    endpoint = spec.event_endpoints[0].endpoint
    return (endpoint, spec.engine, spec.block_size, spec.eagle, spec.dp_start_rank, spec.dp_size)


class _End(NamedTuple):
    """Why a stream ended."""

    reason: str
    max_pause_seconds: float = REFUSED_PAUSE_SECONDS
    is_unimplemented: bool = False


class EngineStream:
    """Reads one engine's stream for as long as a feed of it is open.

    Args:
        spec: The worker; its engine, endpoint, ranks and block size.
        security: TLS files for `grpcs://`; its token is for services of ours, and no engine gets it.
        large: Held while a large message is read; shared by all streams.
        warnings: Where what is wrong with the engine is logged.
        failed: Called with a defect of this program.
        ended: Called when its last feed was closed.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        security: ClientSecurity,
        large: asyncio.Semaphore,
        warnings: RateLimitedLog,
        failed: Callable[[BaseException], None],
        ended: Callable[[EngineStream], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = stream_address(spec)
        self.task: asyncio.Task[None] | None = None
        """What reads; None = nothing was begun."""
        self._endpoint = spec.event_endpoints[0].endpoint
        scheme, _, self._target = self._endpoint.partition("://")
        self._security = replace(security, token_file=None) if scheme == "grpcs" else PLAINTEXT
        self._method = _METHODS[spec.engine]
        self._worker_id = spec.worker_id
        self._ranks = {rank.dp_rank for rank in spec.ranks}
        self._reader = SubscribedReader(spec.block_size, spec.dp_start_rank, trtllm=spec.engine is EngineKind.TRTLLM)
        self._large = large
        self._warnings = warnings
        self._failed = failed
        self._ended = ended
        self._clock = clock
        self._feeds: dict[int, SubscribedFeed] = {}
        self._away_since: float | None = None
        """Since when there is no stream, on the clock; None = there is one, or the first was not tried."""
        self._streams = 0
        """Streams begun."""
        self._unusable = ""
        """Why no stream is begun."""
        if spec.eagle:
            self._unusable = "SubscribeKvEvents leaves out the token after each block, on which EAGLE's blocks depend"
        elif scheme == "grpcs" and security.ca is None:
            self._unusable = f"{self._endpoint} needs --tls-ca"

    def feed(self, rank: WorkerRank, index: BlockIndex) -> SubscribedFeed:
        """Return the feed of a rank."""
        return SubscribedFeed(rank, index, self)

    def add(self, feed: SubscribedFeed) -> None:
        """Deliver to a feed; begins to read with the first."""
        self._feeds[feed.rank.dp_rank] = feed
        feed.broken = self._unusable
        if self.task is None and not self._unusable:
            # Once all ranks' feeds are there.
            self.task = asyncio.get_running_loop().create_task(self._run(), name=f"events of {self._worker_id}")

    def remove(self, feed: SubscribedFeed) -> None:
        """End delivery to a feed; ends reading with the last."""
        if self._feeds.get(feed.rank.dp_rank) is feed:
            del self._feeds[feed.rank.dp_rank]
        if not self._feeds:
            if self.task is not None:
                self.task.cancel()
            self._ended(self)

    async def _run(self) -> None:
        try:
            pause = FIRST_PAUSE_SECONDS
            while True:
                began = self._clock()
                end = await self._connect()
                self._report(end)
                if end.is_unimplemented:
                    pause = REFUSED_PAUSE_SECONDS
                elif self._clock() - began >= STEADY_SECONDS:
                    pause = FIRST_PAUSE_SECONDS
                # Not all at once, where many have lost the same server.
                await asyncio.sleep(pause * random.uniform(1.0, 1.25))
                pause = min(2 * pause, end.max_pause_seconds)
        except INTENDED:
            raise
        except BaseException as error:
            self._failed(error)

    async def _connect(self) -> _End:
        """Read streams over one connection, until it is of no use; return why."""
        try:
            channel = open_channel(
                self._target, self._security, max_message_bytes=MAX_MESSAGE_BYTES, keepalive_ms=ENGINE_TIME_MS
            )
        except ConfigError as error:
            return _End(f"{self._endpoint}: {error}")
        try:
            return await self._follow(channel)
        except grpc.aio.AioRpcError as error:
            return self._end(error)
        except StreamBroken as error:
            return _End(f"{self._endpoint}: {error}")
        except TimeoutError:
            return _End(f"{self._endpoint} has fallen silent for {SILENCE_SECONDS:g} s")
        finally:
            await channel.close()

    async def _follow(self, channel: grpc.aio.Channel) -> _End:
        """Read one stream to its end."""
        subscribe: Any = channel.unary_stream(self._method)
        call = subscribe(kv_events_pb2.SubscribeKvEventsRequest().SerializeToString())
        loop = asyncio.get_running_loop()
        unanswered = loop.call_later(ANSWER_SECONDS, self._report, _End(f"{self._endpoint} does not answer"))
        try:
            await call.initial_metadata()
            unanswered.cancel()
            if not call.done():
                self._begin()
            limit: float | None = None
            count = 0
            while True:
                async with asyncio.timeout(limit):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return _End(f"{self._endpoint} ended the stream")
                limit = SILENCE_SECONDS if await self._take(message) else limit
                count += 1
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
        finally:
            unanswered.cancel()
            call.cancel()

    def _begin(self) -> None:
        away = self._away_since is not None and self._clock() - self._away_since >= NEW_AFTER_SECONDS
        self._away_since = None
        self._streams += 1
        self._reader.begin()
        for feed in list(self._feeds.values()):
            feed.begin(new_publisher=away)

    async def _take(self, message: bytes) -> bool:
        """Deliver a message; return whether it reports the engine's load.

        Raises:
            StreamBroken: Nothing that follows it can be used.
        """
        try:
            if len(message) <= INLINE_BYTES:
                read = self._reader.read(message)
            else:
                async with self._large:
                    read = await asyncio.to_thread(self._reader.read, message)
        except StreamBroken:
            raise
        except MalformedBatch as error:
            # Whose it was, nobody knows.
            for feed in list(self._feeds.values()):
                feed.malformed(str(error))
            return False
        if read.batch is not None:
            await self._deliver(read.batch)
        return read.has_load

    async def _deliver(self, batch: SubscribedBatch) -> None:
        feed = self._feeds.get(batch.dp_rank)
        if feed is not None:
            await feed.deliver(batch, self._streams)
        elif batch.dp_rank not in self._ranks:
            for each in self._feeds.values():
                each.broken = f"the engine has events of rank {batch.dp_rank}, which is not registered"

    def _end(self, error: grpc.aio.AioRpcError) -> _End:
        code, details = error.code(), printable(error.details() or "")[:_REASON_CHARS]
        text = f"{self._endpoint}: {details or code.name}"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return _End(f"{text} (it has no SubscribeKvEvents, or KV events are off)", is_unimplemented=True)
        if code is grpc.StatusCode.UNAVAILABLE:
            return _End(text, UNREACHABLE_PAUSE_SECONDS)
        return _End(f"{text} ({code.name})")

    def _report(self, end: _End) -> None:
        if self._away_since is None:
            self._away_since = self._clock()
        self._warnings.warning(("stream", self._worker_id), "worker %s: %s", self._worker_id, end.reason)
        for feed in self._feeds.values():
            feed.outage = end.reason
            feed.broken = end.reason if end.is_unimplemented else feed.broken


class SubscribedFeed:
    """`feed.Feed` of one rank."""

    def __init__(self, rank: WorkerRank, index: BlockIndex, stream: EngineStream) -> None:
        self.rank = rank
        self.address = stream.address
        self.can_replay = False
        self.rewinds = False
        self.broken = ""
        self.outage = "the engine has not been called yet"
        self._index = index
        self._stream = stream
        self._source: SourceInput | None = None

    def open(self, source: SourceInput) -> None:
        """See `Feed.open`."""
        self._source = source
        self._stream.add(self)

    def close(self) -> None:
        """See `Feed.close`."""
        self._source = None
        self._stream.remove(self)

    def tick(self, now: float) -> None:
        """Do nothing: the stream has its own times."""

    async def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        """Refuse: what a server has of the past comes when a stream begins."""
        for _ in ():
            yield _
        raise NoHistory("streams are not repeated")

    def begin(self, *, new_publisher: bool) -> None:
        """Note that a stream has begun."""
        self.broken = self.outage = ""
        if self._source is not None:
            self._source.on_reconnect(new_publisher=new_publisher)

    async def deliver(self, batch: SubscribedBatch, stream: int) -> None:
        """Deliver one batch of a stream, which is numbered; wait while the source is at work on the whole rank."""
        source = self._source
        if source is None:
            return
        content: DecodedBatch = EventBatch(())
        malformed = batch.malformed
        if not malformed:
            try:
                content = self._index.decode(batch.payload)
            except MalformedBatch:
                malformed = True
        source.on_batch(
            SequencedBatch(
                batch.event_id,
                # The same number on another stream is of another life, or of a history that is sent from its beginning.
                digest(batch.payload + stream.to_bytes(8, "big")),
                content,
                len(batch.payload),
                cleared=content.cleared,
                missing=batch.missing,
                malformed=malformed,
            )
        )
        await source.caught_up()

    def malformed(self, reason: str) -> None:
        """Note a message that has no place in the sequence."""
        if self._source is not None:
            self._source.on_malformed(reason)
