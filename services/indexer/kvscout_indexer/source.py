"""One source: the live batches of one worker rank, in order, into its index.

::

    Subscription ──message──▶ decode ──▶ SourceSequence ──decisions──▶ index
                                             │   ▲
                                     replay  ▼   │ replies
                                         replay socket
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

import zmq

from kvscout_blocks.events import DecodedBatch, EventBatch
from kvscout_blocks.index import BlockIndex
from kvscout_blocks.native_index import apply_decoded, decode_for
from kvscout_blocks.sequence import (
    Apply,
    Decision,
    Demote,
    RequestReplay,
    Reset,
    SequencedBatch,
    SourceSequence,
    digest,
)
from kvscout_blocks.subscriber import ReplayBroken, Subscription, replay
from kvscout_blocks.wire import MalformedBatch, Message
from kvscout_common.telemetry import RateLimitedLog
from kvscout_common.worker import EventEndpoint, WorkerRank, WorkerSpec

log = logging.getLogger("kvscout.indexer")

YIELD_EVERY = 32
"""Replayed batches between two turns of the event loop."""
RECOVERY_INTERVAL_SECONDS = 600.0
"""A worker whose counts are impossible is recovered at most this often."""
REOPEN_SECONDS = 1.0
"""Between two tries to use an endpoint: an address that is in use, such as our own of a moment ago, gets free."""


class Source:
    """The events of one worker rank. Everything runs on one event loop.

    Args:
        spec: The worker.
        rank: Which of its ranks.
        endpoint: Where that rank publishes.
        index: Where its blocks go; knows the rank already.
        context: For its sockets.
        recoveries: Bounds the replays that run at once.
        clock: Monotonic seconds.
        ttl_seconds: How long blocks stay predicted whose history was lost.
        warnings: Where what is wrong with an engine is logged.
        incomplete: Told when the source's history becomes incomplete, and when it is complete again.
        failed: Told of a defect of ours; the process then ends.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: WorkerRank,
        endpoint: EventEndpoint,
        index: BlockIndex,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        recoveries: asyncio.Semaphore,
        clock: Callable[[], float],
        ttl_seconds: float,
        warnings: RateLimitedLog,
        incomplete: Callable[[bool], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.endpoint = endpoint
        self.index = index
        self.sequence: SourceSequence[DecodedBatch] = SourceSequence(
            dp_rank=rank.dp_rank, can_replay=bool(endpoint.replay_endpoint)
        )
        self.malformed_frames = 0
        self.faulty_events = 0
        self.resets = 0
        self.received_at: float | None = None
        """When the last batch came, on the clock; None = none yet."""
        self.broken = ""
        """Why its sockets cannot be used; "" = they can."""
        self._context = context
        self._recoveries = recoveries
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._warnings = warnings
        self._tell_incomplete = incomplete
        self._incomplete = False
        self._failed = failed
        self._replay: asyncio.Task[None] | None = None
        self._over_capacity = False
        self._recovered_at: float | None = None
        self._reopen_at: float | None = None
        self._subscription: Subscription | None = None

    def open(self) -> None:
        """Connects; an endpoint that cannot be used is shown in the status and tried again, not raised."""
        try:
            self._subscription = Subscription(
                self._context,
                self.endpoint,
                on_message=self._guarded(self._on_message),
                on_malformed=self._on_malformed,
                on_connected=self._guarded(lambda: self._carry_out(self.sequence.on_reconnect())),
            )
        except zmq.ZMQError as error:
            reason = f"{self.endpoint.endpoint}: {error}"
            if reason != self.broken:
                log.error("worker %s/%d publishes where nothing can be read: %s", *self.rank, reason)
            self.broken = reason
            self._reopen_at = self._clock() + REOPEN_SECONDS
        else:
            self.broken = ""
            self._reopen_at = None

    def close(self) -> asyncio.Task[None] | None:
        """Closes the sockets and ends a replay; returns its task, which closes its socket as it ends."""
        self._set_incomplete(False)
        if self._subscription is not None:
            self._subscription.close()
        if self._replay is not None:
            self._replay.cancel()
        return self._replay

    def tick(self) -> None:
        """Time passed: does what is due."""
        now = self._clock()
        if self.sequence.retry_at is not None and self.sequence.retry_at <= now:
            self._carry_out(self.sequence.on_tick(now))
        if self._reopen_at is not None and self._reopen_at <= now:
            self.open()

    def recover(self) -> None:
        """Drops what is known of the rank and fetches it again, as far as the engine still has it."""
        self._reset()
        if self.endpoint.replay_endpoint:
            self.sequence.restore(epoch=0, last_id=None)
        # Without a replay the cursor stays: live batches go on from it, and what is dropped here stays missing.
        self._carry_out(self.sequence.on_reconnect())

    def _set_incomplete(self, incomplete: bool) -> None:
        if incomplete != self._incomplete:
            self._incomplete = incomplete
            self._tell_incomplete(incomplete)

    def _reset(self) -> None:
        self.index.reset(self.rank)
        self.resets += 1
        self._over_capacity = False

    def _guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """A callback whose exceptions end the process: the loop itself would only log them and go on, blind."""

        def guarded(*arguments: object) -> None:
            try:
                function(*arguments)
            except Exception as error:
                self._failed(error)

        return guarded

    def _on_malformed(self, reason: str) -> None:
        self.malformed_frames += 1
        self._warnings.warning((self.rank, "frame"), "worker %s/%d sent a malformed frame: %s", *self.rank, reason)

    def _on_message(self, message: Message) -> None:
        now = self._clock()
        self.received_at = now
        self._carry_out(self.sequence.on_batch(self._sequenced(message), now))

    def _sequenced(self, message: Message) -> SequencedBatch[DecodedBatch]:
        payload = message.payload
        try:
            batch = decode_for(self.index, payload)
        except MalformedBatch as error:
            self._warnings.warning(
                (self.rank, "batch"), "worker %s/%d: batch %d is malformed: %s", *self.rank, message.seq, error
            )
            return SequencedBatch(message.seq, digest(payload), EventBatch(()), len(payload), malformed=True)
        if batch.faults:
            self.faulty_events += len(batch.faults)
            kind, reason = batch.faults[0]
            self._warnings.warning(
                (self.rank, kind),
                "worker %s/%d: batch %d has %d events that cannot be read, the first: %s",
                *self.rank,
                message.seq,
                len(batch.faults),
                reason,
            )
        return SequencedBatch(
            message.seq, digest(payload), batch, len(payload), dp_rank=batch.dp_rank, cleared=batch.cleared
        )

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
        applied = apply_decoded(self.index, self.rank, batch.content, epoch=batch.epoch, event_id=batch.event_id)
        if applied.incompatible:
            self._warnings.warning(
                (self.rank, "incompatible"), "worker %s/%d is not indexed: %s", *self.rank, applied.incompatible
            )
        self._over_capacity = applied.over_capacity

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

    async def _read_replay(self, request: RequestReplay) -> ReplayBroken | None:
        """Reads a replay to its end, or to where it broke, or until a later request has taken over."""
        count = 0
        try:
            async with aclosing(replay(self._context, self.endpoint.replay_endpoint, request.first_id)) as replies:
                async for message in replies:
                    self._carry_out(self.sequence.on_replay(request.attempt, self._sequenced(message)))
                    if self.sequence.attempt != request.attempt:
                        return None
                    count += 1
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
        except ReplayBroken as broken:
            return broken
        self._carry_out(self.sequence.on_replay_end(request.attempt))
        return None
