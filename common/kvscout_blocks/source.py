"""One source: the batches of one worker rank, in order, into its index, whatever brings them.

::

    Feed ──batch, state──▶ SourceSequence ──decisions──▶ index
      ▲                         │   ▲
      └──── history ◀───────────┘   │ replies
                └───────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Protocol

from kvscout_blocks.events import DecodedBatch
from kvscout_blocks.feed import Feed, HistoryBroken, SourceState
from kvscout_blocks.index import BlockIndex
from kvscout_blocks.native_index import apply_decoded, load_state
from kvscout_blocks.sequence import (
    Apply,
    Decision,
    Demote,
    RequestReplay,
    Reset,
    SequencedBatch,
    SourceSequence,
)
from kvscout_common.errors import KvscoutError
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.worker import WorkerRank, WorkerSpec

log = logging.getLogger("kvscout.events")

YIELD_EVERY = 32
"""Replayed batches between two turns of the event loop."""
RECOVERY_INTERVAL_SECONDS = 600.0
"""A worker whose counts are impossible is recovered at most this often."""


class SourceObserver(Protocol):
    """Hears what became of a source's batches, in order, after the index did; must not block or raise."""

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """A batch was applied."""

    def reset(self) -> None:
        """The rank starts anew: all that was known of it is dropped."""

    def demoted(self, missing: str) -> None:
        """History is lost; `missing` says what, for people."""

    def loaded(self) -> None:
        """A state replaced what was known."""


class Source:
    """The events of one worker rank. Everything runs on one event loop.

    Args:
        spec: The worker.
        rank: Which of its ranks.
        feed: What brings its batches.
        index: Where its blocks go; knows the rank already.
        recoveries: Bounds the replays that run at once.
        clock: Monotonic seconds.
        ttl_seconds: How long blocks stay predicted whose history was lost.
        warnings: Where what is wrong with an engine is logged.
        incomplete: Told when the source's history becomes incomplete, and when it is complete again.
        failed: Told of a defect of ours; the process then ends.
        observer: Hears what was applied; None = nobody.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: WorkerRank,
        feed: Feed,
        index: BlockIndex,
        *,
        recoveries: asyncio.Semaphore,
        clock: Callable[[], float],
        ttl_seconds: float,
        warnings: RateLimitedLog,
        incomplete: Callable[[bool], None],
        failed: Callable[[BaseException], None],
        observer: SourceObserver | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.feed = feed
        self.index = index
        self.sequence: SourceSequence[DecodedBatch] = SourceSequence(dp_rank=rank.dp_rank, can_replay=feed.can_replay)
        self.malformed_frames = 0
        self.faulty_events = 0
        self.resets = 0
        self.received_at: float | None = None
        """When the last batch came, on the clock; None = none yet."""
        self._recoveries = recoveries
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._warnings = warnings
        self._tell_incomplete = incomplete
        self._incomplete = False
        self._failed = failed
        self._observer = observer
        self._replay: asyncio.Task[None] | None = None
        self._over_capacity = False
        self._recovered_at: float | None = None

    def open(self) -> None:
        """Begins to read."""
        self.feed.open(self)

    def close(self) -> asyncio.Task[None] | None:
        """Ends reading and a running replay; returns its task, which closes its socket as it ends."""
        self._set_incomplete(False)
        self.feed.close()
        if self._replay is not None:
            self._replay.cancel()
        return self._replay

    def tick(self) -> None:
        """Time passed: does what is due."""
        now = self._clock()
        if self.sequence.retry_at is not None and self.sequence.retry_at <= now:
            self._carry_out(self.sequence.on_tick(now))
        self.feed.tick(now)

    def recover(self) -> None:
        """Drops what is known of the rank and fetches it again, as far as it can still be had."""
        self._reset()
        if self.feed.can_replay:
            self.sequence.restore(epoch=self.sequence.epoch, last_id=None)
        # Without a replay the cursor stays: live batches go on from it, and what is dropped here stays missing.
        self._carry_out(self.sequence.on_reconnect())

    def on_batch(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """See `SourceInput.on_batch`."""
        now = self._clock()
        self.received_at = now
        self._carry_out(self.sequence.on_batch(batch, now))

    def on_state(self, state: SourceState) -> None:
        """See `SourceInput.on_state`."""
        self.received_at = self._clock()
        self._load(None, state)

    def on_reconnect(self) -> None:
        """See `SourceInput.on_reconnect`."""
        self._carry_out(self.sequence.on_reconnect())

    def on_malformed(self, reason: str) -> None:
        """See `SourceInput.on_malformed`."""
        self.malformed_frames += 1
        self._warnings.warning((self.rank, "frame"), "worker %s/%d sent a malformed frame: %s", *self.rank, reason)

    def _set_incomplete(self, incomplete: bool) -> None:
        if incomplete != self._incomplete:
            self._incomplete = incomplete
            self._tell_incomplete(incomplete)

    def _reset(self) -> None:
        self.index.reset(self.rank)
        self.resets += 1
        self._over_capacity = False
        if self._observer is not None:
            self._observer.reset()

    def _carry_out(self, decisions: list[Decision[DecodedBatch]]) -> None:
        for decision in decisions:
            if isinstance(decision, Apply):
                self._apply(decision.batch)
            elif isinstance(decision, Reset):
                log.warning("worker %s/%d restarted: its blocks are forgotten", *self.rank)
                self._reset()
            elif isinstance(decision, Demote):
                log.warning("worker %s/%d: events %s are lost", *self.rank, decision.missing)
                self.index.demote(self.rank, ttl_seconds=self._ttl_seconds, now=self._clock())
                self._over_capacity = False
                if self._observer is not None:
                    self._observer.demoted(decision.missing)
            elif isinstance(decision, RequestReplay):
                if self._replay is not None:
                    self._replay.cancel()
                name = f"replay {self.rank.worker_id}/{self.rank.dp_rank}"
                self._replay = asyncio.get_running_loop().create_task(self._run_replay(decision), name=name)
        self._set_incomplete(self.sequence.history_incomplete)
        # Only now: a recovery in the midst of decisions would have the rest of them applied twice.
        if self._over_capacity and not self.sequence.replaying and self._may_recover():
            log.warning("worker %s/%d has more blocks than it can: removals were lost, recovering", *self.rank)
            self.recover()

    def _apply(self, batch: SequencedBatch[DecodedBatch]) -> None:
        if batch.reset:
            self._reset()
        faults = batch.content.faults
        if faults:
            self.faulty_events += len(faults)
            kind, reason = faults[0]
            self._warnings.warning(
                (self.rank, kind),
                "worker %s/%d: batch %d has %d events that cannot be read, the first: %s",
                *self.rank,
                batch.event_id,
                len(faults),
                reason,
            )
        applied = apply_decoded(self.index, self.rank, batch.content, epoch=batch.epoch, event_id=batch.event_id)
        if applied.incompatible:
            self._warnings.warning(
                (self.rank, "incompatible"), "worker %s/%d is not indexed: %s", *self.rank, applied.incompatible
            )
        self._over_capacity = applied.over_capacity
        if self._observer is not None:
            self._observer.applied(batch)

    def _load(self, attempt: int | None, state: SourceState) -> None:
        """Loads a state if the sequence wants it; one that cannot be loaded costs itself."""
        if not self.sequence.wants_state(attempt, epoch=state.epoch, last_id=state.last_event_id):
            return
        try:
            load_state(self.index, self.rank, self.spec.pool, state.messages)
        except KvscoutError as error:
            self.on_malformed(f"a state cannot be loaded: {error}")
            return
        self._over_capacity = False
        if self._observer is not None:
            self._observer.loaded()
        self._carry_out(
            self.sequence.on_state(
                attempt, epoch=state.epoch, last_id=state.last_event_id, history_incomplete=state.history_incomplete
            )
        )

    def _may_recover(self) -> bool:
        now = self._clock()
        if self._recovered_at is not None and now - self._recovered_at < RECOVERY_INTERVAL_SECONDS:
            return False
        self._recovered_at = now
        return True

    async def _run_replay(self, request: RequestReplay) -> None:
        try:
            async with self._recoveries:
                broken = await self._read_replay(request)
            if broken is not None:
                log.info("replay of worker %s/%d failed: %s", *self.rank, broken)
                self._carry_out(self.sequence.on_replay_failed(request.attempt, self._clock()))
        except Exception as error:
            self._failed(error)

    async def _read_replay(self, request: RequestReplay) -> HistoryBroken | None:
        """Reads a replay to its end, or to where it broke, or until a later request has taken over."""
        count = 0
        try:
            async with aclosing(self.feed.history(request.first_id)) as replies:
                async for reply in replies:
                    if isinstance(reply, SourceState):
                        self._load(request.attempt, reply)
                    else:
                        self._carry_out(self.sequence.on_replay(request.attempt, reply))
                    if self.sequence.attempt != request.attempt:
                        return None
                    count += 1
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
        except HistoryBroken as broken:
            return broken
        self._carry_out(self.sequence.on_replay_end(request.attempt))
        return None
