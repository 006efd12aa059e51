"""One rank of an engine: its events in, through the local index, and out to what is published."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from kvscout.v1 import bridge_pb2
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.index.backend import make_index
from kvscout_blocks.index.block_index import BlockIndex, WorkerOptions
from kvscout_blocks.publish.history import DEMOTED_SECONDS, PublishedHistory
from kvscout_blocks.publish.incarnation import Comparison, Record, Verdict, next_epoch
from kvscout_blocks.publish.publication import Confirmed, Outbox, Publication
from kvscout_blocks.source.decisions import SequencedBatch
from kvscout_blocks.source.feed import Feed
from kvscout_blocks.source.source import Source
from kvscout_common.errors import FailedPrecondition, Unavailable
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerRank, WorkerSpec

HELD_BYTES: Final = 64 * 1024 * 1024
"""Batches held until it is known which incarnation they belong to; beyond, the state stands for them."""


class BridgedRank:
    """Reads one rank and says what of it is to be published; a `SourceObserver`.

    An epoch is decided once the record of the last one was read, and used once its own record was written: until then
    nothing is published, and batches are held.

    Args:
        spec: The worker.
        rank: Which of its ranks.
        feed: Makes what brings its batches to an index.
        outbox: Where what is to be sent waits.
        recoveries: Bounds the replays that run at once.
        clock: Monotonic seconds.
        wall_clock: Seconds since the Unix epoch.
        warnings: Where what is wrong with an engine is logged.
        failed: Called with a defect of this program.
        changed: Called when a record is due.
        answers: Whether requests for lost events are answered.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: WorkerRank,
        feed: Callable[[BlockIndex], Feed],
        *,
        outbox: Outbox,
        recoveries: asyncio.Semaphore,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        warnings: RateLimitedLog,
        failed: Callable[[BaseException], None],
        changed: Callable[[], None],
        answers: bool,
    ) -> None:
        self.spec = spec
        self.rank = rank
        options = WorkerOptions.of(spec)
        self.index = make_index(spec.block_size, spec.eagle)
        self.index.add_worker(rank, options)
        self.source = Source(
            spec,
            rank,
            feed(self.index),
            self.index,
            recoveries=recoveries,
            clock=clock,
            ttl_seconds=DEMOTED_SECONDS,
            warnings=warnings,
            incomplete=self._on_incomplete,
            failed=failed,
            observer=self,
        )
        local = PublishedHistory(
            rank, spec.pool, self.index, history_incomplete=lambda: self.source.sequence.history_incomplete
        )
        self.publication = Publication(rank, spec.pool, options.adapters, local, outbox)
        self.publication.held_back = True
        self.written: Record | None = None
        """Stored record."""
        self._closed = False
        self._outbox = outbox
        self._wall_clock = wall_clock
        self._changed = changed
        self._answers = answers
        self._comparison: Comparison | None = Comparison()
        """None: the incarnation is known."""
        self._held: deque[SequencedBatch[DecodedBatch]] = deque()
        self._held_bytes = 0
        self._held_all = True
        """Every batch since the start is held."""

    def reads(self, spec: WorkerSpec, address: Hashable) -> bool:
        """Return whether what it reads, and from where, is what a registration says."""
        return self.spec.pool == spec.pool and self.source.feed.address == address

    def take(self, spec: WorkerSpec) -> None:
        """Go on with a registration that it `reads`."""
        self.spec = self.source.spec = spec
        options = WorkerOptions.of(spec)
        self.index.add_worker(self.rank, options)
        self.publication.adapters = options.adapters

    def open(self) -> None:
        """Begin to read."""
        self.source.open()

    def close(self) -> asyncio.Task[None] | None:
        """End reading, if it has not ended; return the task to wait for. Batches to be sent stay."""
        if self._closed:
            return None
        self._closed = True
        return self.source.close()

    @property
    def decided(self) -> bool:
        """Return whether the incarnation is known."""
        return self._comparison is None

    def tick(self, now: float) -> None:
        """Do what is due at a time."""
        if not self._closed:
            self.source.tick()
        self.index.maintain(now=now)

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """See `SourceObserver.applied`."""
        if self._comparison is None:
            self.publication.applied(batch)
            return
        self._comparison.applied(batch.event_id, batch.digest)
        self._held.append(batch)
        self._held_bytes += batch.size_bytes
        while self._held_bytes > HELD_BYTES:
            self._held_bytes -= self._held.popleft().size_bytes
            self._held_all = False

    def reset(self) -> None:
        """See `SourceObserver.reset`: another incarnation, or the same one learnt anew."""
        if self._comparison is None:
            self._begin(next_epoch(self.publication.local.epoch, self._wall_clock()), None)
        else:
            self._comparison.restarted()
            self._held.clear()
            self._held_bytes = 0

    def demoted(self, missing: str) -> None:
        """See `SourceObserver.demoted`."""
        self._lose()

    def loaded(self) -> None:
        """See `SourceObserver.loaded`."""
        self._lose()

    def decide(self, record: Record | None) -> bool:
        """Decide which incarnation the engine is, if possible; return whether it is decided.

        Args:
            record: What was on record when this process started.
        """
        if self._comparison is None:
            return True
        sequence = self.source.sequence
        replayed = not self.source.replaying and (
            sequence.last_id is not None or (sequence.counters["replays"] > 0 and not sequence.history_incomplete)
        )
        verdict = self._comparison.judge(record, replayed=replayed)
        if verdict is None:
            return False
        self._comparison = None
        last = self._held[-1] if self._held else None
        seen = Confirmed(last.event_id, last.digest) if last is not None else None
        if verdict is Verdict.OTHER or record is None or record.event_id is None or record.digest is None:
            self._begin(next_epoch(record.epoch if record is not None else 0, self._wall_clock()), seen)
        else:
            self.written = record
            if self._held_all:
                self.publication.resume(record.epoch, Confirmed(record.event_id, record.digest))
                for batch in self._held:
                    self.publication.applied(batch)
            else:
                self.publication.begin(record.epoch, seen)
            self._release()
        self._held.clear()
        self._held_bytes = 0
        return True

    @property
    def unwritten(self) -> Record | None:
        """Return what must be on record, or should be; None: it is."""
        epoch = self.publication.local.epoch
        if not epoch:
            return None
        confirmed = self.publication.confirmed
        record = Record(epoch, *confirmed) if confirmed is not None else Record(epoch)
        return record if record != self.written else None

    @property
    def awaits_record(self) -> bool:
        """Return whether nothing can be published before the record of the epoch is written."""
        return self.decided and self.publication.held_back

    def on_written(self, record: Record) -> None:
        """Note that a record was written."""
        self.written = record
        if record.epoch == self.publication.local.epoch:
            self._release()

    async def answer(self, request: bridge_pb2.RecoverRequest) -> Iterator[bridge_pb2.RecoverResponse]:
        """Return the parts of the answer to a request for lost events.

        Raises:
            FailedPrecondition: This bridge keeps nothing to answer from.
            Unavailable: The engine's incarnation is not known, or not on record yet.
        """
        if not self._answers:
            raise FailedPrecondition("the bridge runs without a local index")
        if not self.decided or self.awaits_record:
            raise Unavailable("the engine's incarnation is not on record yet", retry_after_seconds=0.5)
        return await self.publication.local.answer(request)

    def _begin(self, epoch: int, last: Confirmed | None) -> None:
        self.publication.held_back = True
        self.publication.begin(epoch, last)
        self._changed()

    def _release(self) -> None:
        self.publication.held_back = False
        self._outbox.report_ready()

    def _lose(self) -> None:
        if self._comparison is None:
            self.publication.lose()

    def _on_incomplete(self, incomplete: bool) -> None:
        if incomplete:
            self._lose()
