"""The feeds of an engine whose events are polled: each answer drains them, so that there is one poll for all ranks.

::

    EnginePoll ── POST /kv_cache_events, again and again ──▶ PolledReader ──▶ PolledFeed of each rank ──▶ source

Every event comes once: a number that was there before is another life of the engine, and a number that is left out was
dropped by its buffer, or went to somebody else who polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from typing import Final

from kvscout_blocks.bytes.events import DecodedBatch, EventBatch
from kvscout_blocks.bytes.frames import MalformedBatch
from kvscout_blocks.bytes.polled import MAX_ANSWER_BYTES, PolledEvent, PolledReader
from kvscout_blocks.index.block_index import BlockIndex
from kvscout_blocks.source.decisions import SequencedBatch, digest
from kvscout_blocks.source.feed import NoHistory, SourceInput, SourceState
from kvscout_common.errors import Unavailable
from kvscout_common.http.engine_http import NoAnswer, parsed, read_page
from kvscout_common.http.factory import http_client
from kvscout_common.http.http import HttpClient
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import INTENDED
from kvscout_common.worker import EngineKind, WorkerRank, WorkerSpec

POLL_SECONDS: Final = 0.1
"""Between an answer and the next request."""
MAX_PAUSE_SECONDS: Final = 5.0
"""Longest pause after requests that failed; it doubles up to that."""
ANSWER_SECONDS: Final = 30.0
"""An engine without events answers after two seconds; one that computes, later."""
YIELD_EVERY: Final = 32
"""Events between two iterations of the event loop."""
_METHODS: Final = ("POST", "GET")
"""Which one an engine has depends on its release."""


def is_polled(spec: WorkerSpec) -> bool:
    """Return whether a worker's events have to be fetched from its HTTP API."""
    return spec.engine is EngineKind.TRTLLM and bool(spec.http_endpoint) and not spec.event_endpoints


def poll_address(spec: WorkerSpec) -> Hashable:
    """Return what an engine's poll depends on."""
    return (spec.http_endpoint, spec.block_size, spec.dp_start_rank, spec.dp_size)


class EnginePoll:
    """Polls one engine for as long as a feed of it is open.

    Args:
        spec: The worker; its ranks, block size and address.
        warnings: Where what is wrong with the engine is logged.
        failed: Called with a defect of this program.
    """

    def __init__(self, spec: WorkerSpec, *, warnings: RateLimitedLog, failed: Callable[[BaseException], None]) -> None:
        self.address = poll_address(spec)
        self._url = f"{spec.http_endpoint}/kv_cache_events"
        self._worker_id = spec.worker_id
        self._ranks = {rank.dp_rank for rank in spec.ranks}
        self._reader = PolledReader(spec.block_size, spec.dp_start_rank)
        self._warnings = warnings
        self._failed = failed
        self._feeds: dict[int, PolledFeed] = {}
        self._task: asyncio.Task[None] | None = None
        self._method = _METHODS[0]
        self._answers = 0

    def feed(self, rank: WorkerRank, index: BlockIndex) -> PolledFeed:
        """Return the feed of a rank."""
        return PolledFeed(rank, index, self)

    def add(self, feed: PolledFeed) -> None:
        """Deliver to a feed; begins to poll with the first."""
        self._feeds[feed.rank.dp_rank] = feed
        if self._task is None:
            # Once all ranks' feeds are there: what is fetched before would be lost for those that come later.
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"poll {self._worker_id}")

    def remove(self, feed: PolledFeed) -> None:
        """End delivery to a feed; ends polling with the last."""
        if self._feeds.get(feed.rank.dp_rank) is feed:
            del self._feeds[feed.rank.dp_rank]
        if not self._feeds and self._task is not None:
            self._task.cancel()

    @property
    def ended(self) -> bool:
        """Return whether its last feed was closed."""
        return self._task is not None and not self._feeds

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Return what to wait for once the last feed is closed; None = nothing was begun."""
        return self._task

    async def _run(self) -> None:
        try:
            async with http_client() as http:
                pause = POLL_SECONDS
                while True:
                    pause = POLL_SECONDS if await self._poll(http) else min(2 * pause, MAX_PAUSE_SECONDS)
                    await asyncio.sleep(pause)
        except INTENDED:
            raise
        except BaseException as error:
            self._failed(error)

    async def _poll(self, http: HttpClient) -> bool:
        """Fetch and deliver what the engine has; return whether it answered."""
        try:
            body = await self._fetch(http)
        except NoAnswer as error:
            # What it drained meanwhile, if anything, is missing in its numbers.
            self._report(error.message)
            return False
        except Unavailable as error:
            self._lose(error.message)
            return False
        try:
            events = await parsed(body, self._reader.read)
        except MalformedBatch as error:
            self._lose(f"{self._url}: {error}")
            return False
        self._answers += 1
        await self._deliver(events)
        return True

    async def _fetch(self, http: HttpClient) -> bytes:
        for method in (self._method, *(method for method in _METHODS if method != self._method)):
            body = await read_page(
                http, self._url, timeout_seconds=ANSWER_SECONDS, method=method, max_bytes=MAX_ANSWER_BYTES
            )
            if body is not None:
                self._method = method
                return body
        raise NoAnswer(f"{self._url} is not there: a release that pushes its events needs event_endpoints")

    async def _deliver(self, by_rank: dict[int, list[PolledEvent]]) -> None:
        strange = sorted(by_rank.keys() - self._ranks)
        for feed in list(self._feeds.values()):
            feed.outage = ""
            if strange:
                feed.broken = f"the engine has events of ranks {strange[:8]}, which are not registered"
        count = 0
        for rank, events in by_rank.items():
            for event in events:
                feed_of_rank = self._feeds.get(rank)
                if feed_of_rank is not None:
                    feed_of_rank.deliver(event, self._answers)
                count += 1
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)

    def _report(self, reason: str) -> None:
        self._warnings.warning(("poll", self._worker_id), "worker %s: %s", self._worker_id, reason)
        for feed in self._feeds.values():
            feed.outage = reason

    def _lose(self, reason: str) -> None:
        """Report an answer that could not be read: what was in it is gone."""
        self._report(reason)
        for feed in list(self._feeds.values()):
            feed.lose(reason)


class PolledFeed:
    """`feed.Feed` of one rank."""

    def __init__(self, rank: WorkerRank, index: BlockIndex, poll: EnginePoll) -> None:
        self.rank = rank
        self.address = poll.address
        self.can_replay = False
        self.rewinds = False
        self.broken = ""
        self.outage = ""
        self._index = index
        self._poll = poll
        self._source: SourceInput | None = None

    def open(self, source: SourceInput) -> None:
        """See `Feed.open`."""
        self._source = source
        self._poll.add(self)

    def close(self) -> None:
        """See `Feed.close`."""
        self._source = None
        self._poll.remove(self)

    def tick(self, now: float) -> None:
        """Do nothing: the poll has its own times."""

    async def history(self, first_id: int) -> AsyncGenerator[SequencedBatch[DecodedBatch] | SourceState, None]:
        """Refuse: what was fetched is gone at the engine."""
        for _ in ():
            yield _
        raise NoHistory("polled events come once")

    def deliver(self, event: PolledEvent, answer: int) -> None:
        """Deliver one event of an answer, which is numbered."""
        if self._source is None:
            return
        # The same event in another answer is of another life.
        known = digest(event.payload + answer.to_bytes(8, "big"))
        size = len(event.payload)
        try:
            batch = self._index.decode(event.payload)
        except MalformedBatch:
            self._source.on_batch(SequencedBatch(event.event_id, known, EventBatch(()), size, malformed=True))
            return
        self._source.on_batch(
            SequencedBatch(event.event_id, known, batch, size, dp_rank=batch.dp_rank, cleared=batch.cleared)
        )

    def lose(self, reason: str) -> None:
        """Note that events were fetched which nobody can read."""
        if self._source is not None:
            self._source.on_malformed(reason)
            self._source.on_reconnect()
