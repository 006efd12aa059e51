"""One source: the batches of one worker rank, in order, into its index, whatever brings them.

::

    Feed ──batch, state──▶ SourceSequence ──decisions──▶ index
     │▲                      │  │   ▲                      ▲
     │└──── history ◀────────│──┘   │ replies              │
     │          └────────────│──────┘                      │
     └──▶ Bypass ◀─ position ┘ ── what is next, and usual ─┘

While a replay waits for its turn or is being answered, what comes live stays in its socket where a native thread reads
it: the engine's own queue holds it, instead of this process.

While a state is loaded, blocks are demoted or a cut is taken, of a rank with many blocks, the `Gate` is closed: what
comes meanwhile waits there, in order, and nothing else does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NamedTuple, Protocol

from kvscout_blocks.bytes.acceptance import Ignored
from kvscout_blocks.bytes.events import DecodedBatch
from kvscout_blocks.index.backend import loading_state
from kvscout_blocks.index.block_index import Applied, BlockIndex, Loading
from kvscout_blocks.source.decisions import Apply, Decision, Demote, DropReason, RequestReplay, Reset, SequencedBatch
from kvscout_blocks.source.feed import Bypass, Cursor, Feed, HistoryBroken, NoHistory, SourceCut, SourceState
from kvscout_blocks.source.gate import Gate
from kvscout_blocks.source.held import HeldBudget
from kvscout_blocks.source.peer_search import PeerLookup, PeerSearch
from kvscout_blocks.source.sequence import SourceSequence
from kvscout_common.errors import KvscoutError
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_common.process.endings import INTENDED, guarded
from kvscout_common.worker import WorkerRank, WorkerSpec

log = logging.getLogger("kvscout.events")

TIMER_SECONDS = 0.001
"""Resolution of the loop's timers, which may come so much early."""
YIELD_EVERY = 32
"""Replayed batches between two iterations of the event loop."""
RECOVERY_INTERVAL_SECONDS = 600.0
"""A worker whose counts are impossible is recovered at most this often, and one without its blocks is fenced."""
UNANSWERED_SECONDS = 0.1
"""What comes live is read again where a replay whose turn came is not answered for so long."""
SMALL_STATE_BYTES = 16 * 1024
"""Size up to which a state is loaded in one step: about 1,000 blocks."""


class SourceObserver(Protocol):
    """Receives what became of a source's batches, in order, after the index did; must not block or raise."""

    def applied(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """Record an applied batch."""

    def reset(self) -> None:
        """Note that the rank starts anew: all that was known of it is dropped."""

    def demoted(self, missing: str) -> None:
        """Note that history is lost; `missing` says which events, for people."""

    def loaded(self) -> None:
        """Note that a state replaced what was known."""


class Observed(NamedTuple):
    """Current state of a source, for observers."""

    sequence: SourceSequence[DecodedBatch]
    """Not to be changed; behind by what a bypass applied since, which the other fields have."""
    last_id: int | None
    """Last batch applied; None = none."""
    applied: int
    """Batches applied since start."""
    received_at: float | None
    """Time of the last batch, on the clock; None = none yet."""


class Source:
    """The events of one worker rank. Everything runs on one event loop.

    Args:
        spec: The worker.
        rank: Which of its ranks.
        feed: What brings its batches.
        index: Where its blocks go; knows the rank already.
        recoveries: Bounds the replays that run at once.
        budget: Bounds the live batches that wait for replays, of all sources; None = there is no other.
        clock: Monotonic seconds.
        ttl_seconds: How long blocks stay predicted whose history was lost.
        warnings: Where what is wrong with an engine is logged.
        incomplete: Called when the source's history becomes incomplete, and when it is complete again.
        failed: Called with a defect of this program; the process then ends.
        observer: Observes what was applied; None = nobody does.
        peer_lookup: Requests a state from peers before the source sends its history; None = there are none.
    """

    def __init__(  # noqa: PLR0913  # what all sources share, and what is its own
        self,
        spec: WorkerSpec,
        rank: WorkerRank,
        feed: Feed,
        index: BlockIndex,
        *,
        recoveries: asyncio.Semaphore,
        budget: HeldBudget | None = None,
        clock: Callable[[], float],
        ttl_seconds: float,
        warnings: RateLimitedLog,
        incomplete: Callable[[bool], None],
        failed: Callable[[BaseException], None],
        observer: SourceObserver | None = None,
        peer_lookup: PeerLookup | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.feed = feed
        self.index = index
        self._sequence: SourceSequence[DecodedBatch] = SourceSequence(
            dp_rank=rank.dp_rank, can_replay=feed.can_replay, rewinds=feed.rewinds, budget=budget
        )
        self._bypass: Bypass | None = None
        self._lent: Bypass | None = None
        """Bypass that has the position of the sequence; None = the sequence has it."""
        self._lent_replay = False
        """It was lent for replies."""
        self.malformed_frames = 0
        self.faulty_events = 0
        self.resets = 0
        self._unknown_before = 0
        """Removals of unknown blocks before the present publisher came."""
        self.served = 0
        """Requests that its worker is said to have served, each of which should have brought events."""
        self.opened_at = clock()
        """Time of its creation, on the clock."""
        self.received_at: float | None = None
        """Time of the last batch, on the clock, as of the last use of `sequence`; None = none yet."""
        self._recoveries = recoveries
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._warnings = warnings
        self._report_incomplete = incomplete
        self._incomplete = False
        self._failed = failed
        self._observer = observer
        self._peer_lookup = peer_lookup
        self.peers = PeerSearch()
        self._gate = Gate(f"work on {rank.worker_id}/{rank.dp_rank}", failed=failed)
        self._replay: asyncio.Task[None] | None = None
        self._over_capacity = False
        self._incompatible = False
        self._recovered_at: float | None = None
        self._fenced_at: float | None = None
        self._retry_timer: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin to read."""
        if self._peer_lookup is None:
            self.peers.over.set()
        else:
            self.peers.start(self._peer_lookup, self.spec, self.rank)
            self._carry_out(self.sequence.expect_state())
        self._bypass = self.feed.open(self)

    def close(self) -> asyncio.Task[None] | None:
        """End reading and a running replay; return the task to wait for, which closes its socket as it ends."""
        self._set_incomplete(False)
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self.feed.close()
        self._sequence.drop_held()
        begun = (self.peers.end(), self._replay, self._gate.end())
        # A cancelled task keeps where it was, which is here: the index would live until the garbage collector comes.
        self._replay = None
        tasks = [task for task in begun if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        return asyncio.get_running_loop().create_task(_ended(tasks)) if tasks else None

    @property
    def sequence(self) -> SourceSequence[DecodedBatch]:
        """Return the state machine. Nothing is applied from here on until the event loop runs."""
        if self._lent is not None:
            self._take_back(self._lent)
        return self._sequence

    @property
    def dropped(self) -> int:
        """Return the number of batches that were not applied, since start."""
        return sum(self._sequence.counters[reason] for reason in DropReason)

    @property
    def malformed(self) -> int:
        """Return the number of frames, batches and events that could not be read, since start."""
        return self._sequence.counters["malformed"] + self.malformed_frames + self.faulty_events

    @property
    def observed(self) -> Observed:
        """Return what it is like now; unlike `sequence` this leaves to a bypass what was lent to it."""
        sequence, received_at = self._sequence, self.received_at
        last_id, applied = sequence.last_id, sequence.counters["applied"]
        lent = self._lent.peek() if self._lent is not None and not self._lent_replay else None
        if lent is not None and lent.applied:
            last_id, applied = lent.last_id, applied + lent.applied
            received_at = self._clock() - (lent.age_seconds or 0.0)
        return Observed(sequence, last_id, applied, received_at)

    @property
    def cursor(self) -> Cursor:
        """See `SourceInput.cursor`."""
        return Cursor(self.sequence.epoch, self.sequence.last_id)

    @property
    def replaying(self) -> bool:
        """See `SourceInput.replaying`."""
        return self._sequence.replaying or not self._gate.is_open

    @property
    def incomplete(self) -> bool:
        """See `SourceInput.incomplete`."""
        return self._sequence.history_incomplete

    @property
    def fenced(self) -> bool:
        """Return whether only events after a fence count."""
        return self._sequence.fenced

    def tick(self) -> None:
        """Do what is due at a time; to be called every second or so. Retries of replays have a timer of their own."""
        now = self._clock()
        # Of the sequence itself: while it is lent nothing is to be tried again.
        due = (self._sequence.retry_at, self._sequence.quarantined_until)
        if self._gate.is_open and any(at is not None and at <= now for at in due):
            self._carry_out(self.sequence.on_tick(now))
        if self._gate.is_open and self._sequence.unproven_start and self._lacks_its_start():
            self.sequence.on_missing_start()
            self._carry_out([])
        self.feed.tick(now)

    def _lacks_its_start(self) -> bool:
        """Return whether what came refers to blocks that did not: their batch was lost."""
        stats = self.index.worker_stats(self.rank)
        return stats is not None and (stats.orphans > 0 or self._unknown_removed() > self._unknown_before)

    def _unknown_removed(self) -> int:
        """Return the number of removals of unknown blocks, over all incarnations."""
        stats = self.index.worker_stats(self.rank)
        return stats.ignored.get(Ignored.UNKNOWN_REMOVED, 0) if stats is not None else 0

    def recover(self, *, any_epoch: bool = False) -> None:
        """Drop what is known of the rank and fetch it again, as far as it can still be had.

        Args:
            any_epoch: Go on with the epoch that comes next, even if it is lower than the present one.
        """
        self._gate.do(lambda: self._recover(any_epoch=any_epoch))

    def _recover(self, *, any_epoch: bool = False) -> None:
        sequence = self.sequence
        self._reset()
        if self.feed.can_replay or (any_epoch and sequence.epoch):
            sequence.restore(epoch=0 if any_epoch else sequence.epoch, last_id=None)
        # Without a replay the cursor stays: live batches go on from it, and what is dropped here stays missing.
        self._carry_out(sequence.on_reconnect())

    def fence(self, event_id: int | None) -> bool:
        """Let only later events count, since the engine's cache was emptied without an event; see `on_fence`.

        Returns:
            False if nothing was done: a replay runs, or the rank was fenced less than ten minutes ago.
        """
        now = self._clock()
        lately = self._fenced_at is not None and now - self._fenced_at < RECOVERY_INTERVAL_SECONDS
        if lately or self.replaying or self.sequence.last_id is None:
            return False
        self._fenced_at = now
        self._carry_out(self.sequence.on_fence(event_id))
        return True

    def end_fence(self) -> None:
        """Take the rank for complete: since it was fenced, its engine had nothing that is not known."""
        self._gate.do(self._end_fence)

    def _end_fence(self) -> None:
        self.sequence.end_fence()
        self._carry_out([])

    def on_batch(self, batch: SequencedBatch[DecodedBatch]) -> None:
        """See `SourceInput.on_batch`."""
        now = self._clock()
        self.received_at = now
        self.peers.connected.set()
        self._gate.do(lambda: self._carry_out(self.sequence.on_batch(batch, now)), batch.size_bytes)

    def on_state(self, state: SourceState) -> None:
        """See `SourceInput.on_state`."""
        self.received_at = self._clock()
        self.peers.connected.set()
        self._gate.do(lambda: self._load_live(state), state.size_bytes)

    def on_reconnect(self, *, new_publisher: bool = False) -> None:
        """See `SourceInput.on_reconnect`."""
        self.peers.connected.set()
        if new_publisher:
            self._unknown_before = self._unknown_removed()
        self._gate.do(lambda: self._carry_out(self.sequence.on_reconnect(new_publisher=new_publisher)))

    def heal(self) -> None:
        """See `SourceInput.heal`."""
        self._gate.do(lambda: self._carry_out(self.sequence.on_heal()))

    def on_malformed(self, reason: str) -> None:
        """See `SourceInput.on_malformed`."""
        self.malformed_frames += 1
        self._gate.do(lambda: self.sequence.on_malformed(self._clock()))
        self._warnings.warning((self.rank, "frame"), "worker %s/%d sent a malformed frame: %s", *self.rank, reason)

    async def caught_up(self) -> None:
        """See `SourceInput.caught_up`."""
        await self._gate.opened()

    async def cut(self) -> SourceCut | None:
        """See `SourceInput.cut`."""
        await self._gate.opened()
        sequence = self.sequence
        cut = self.index.cut(self.rank)
        if cut is None:
            return None
        taken = SourceCut(cut, sequence.epoch, sequence.history_incomplete, sequence.last_digest)
        # A batch that comes before all is copied would have the rest copied immediately.
        if cut.step():
            self._gate.close_for(cut, lambda _: self._lend())
            await self._gate.opened()
        else:
            self._lend()
        return taken

    def _take_back(self, bypass: Bypass) -> None:
        """Stop the bypass and note what it applied."""
        self._lent = None
        progress = bypass.take()
        if progress is None:
            return
        advance = self._sequence.advance_replay if self._lent_replay else self._sequence.advance
        advance(last_id=progress.last_id, digests=progress.digests, applied=progress.applied)
        if progress.applied:
            if not self._lent_replay:
                self.received_at = self._clock() - (progress.age_seconds or 0.0)
            self._judge(Applied(0, 0, progress.over_capacity, progress.incompatible))

    def _lend(self) -> None:
        """Leave usual batches to the bypass, unless an observer or a faulty worker needs every batch here."""
        if self._bypass is None or self._observer is not None or self._over_capacity or self._incompatible:
            return
        sequence = self.sequence
        self._lent_replay = sequence.replays_quietly
        lent = False
        if sequence.last_id is not None and self._lent_replay:
            lent = self._bypass.lend_replay(sequence.last_id, sequence.first_held, self._on_stopped)
        elif sequence.last_id is not None and sequence.quiet:
            lent = self._bypass.lend(sequence.last_id, sequence.digests, self._on_stopped)
            if lent:
                sequence.lend_digests()
        self._lent = self._bypass if lent else None

    def _on_stopped(self) -> None:
        self._gate.do(lambda: self._carry_out([]))

    def _pause(self, *, paused: bool) -> None:
        if self._bypass is not None:
            self._bypass.pause(paused=paused)

    def _set_incomplete(self, incomplete: bool) -> None:
        if incomplete != self._incomplete:
            self._incomplete = incomplete
            self._report_incomplete(incomplete)

    def _reset(self) -> None:
        self.index.reset(self.rank)
        self.resets += 1
        self._over_capacity = self._incompatible = False
        if self._observer is not None:
            self._observer.reset()

    def _restart(self) -> None:
        """Begin anew."""
        # What peers have is of the incarnation that has just ended.
        self.peers.end()
        self._reset()

    def _carry_out(self, decisions: list[Decision[DecodedBatch]]) -> None:
        for done, decision in enumerate(decisions, 1):
            if isinstance(decision, Apply):
                self._apply(decision.batch)
            elif isinstance(decision, Reset):
                self._warnings.warning(
                    (self.rank, "restart"), "worker %s/%d: %s, its blocks are dropped", *self.rank, decision.reason
                )
                self._restart()
            elif isinstance(decision, Demote):
                self._warnings.warning(
                    (self.rank, "lost"), "worker %s/%d: events %s are lost", *self.rank, decision.missing
                )
                demotion = self.index.demotion(self.rank, ttl_seconds=self._ttl_seconds, now=self._clock())
                # Of a rank with few blocks the second slice is the end.
                if demotion.step() and demotion.step():
                    self._set_incomplete(self._sequence.history_incomplete)
                    self._gate.close_for(demotion, partial(self._carry_on, decision, decisions[done:]))
                    return
                self._demoted(decision)
            elif isinstance(decision, RequestReplay):
                if self._replay is not None:
                    self._replay.cancel()
                name = f"replay {self.rank.worker_id}/{self.rank.dp_rank}"
                self._replay = asyncio.get_running_loop().create_task(self._run_replay(decision), name=name)
        self._set_incomplete(self.sequence.history_incomplete)
        if self._sequence.retry_at is not None and self._retry_timer is None:
            seconds = max(0.0, self._sequence.retry_at - self._clock()) + TIMER_SECONDS
            retry = guarded(self._retry, self._failed)
            self._retry_timer = asyncio.get_running_loop().call_later(seconds, retry)
        wrong = self._sequence.misconfigured
        if wrong:
            self._warnings.warning((self.rank, "misconfigured"), "worker %s/%d is misconfigured: %s", *self.rank, wrong)
        # Only now: a recovery in the midst of decisions would have the rest of them applied twice.
        if self._over_capacity and not self.sequence.replaying and self._may_recover():
            log.warning("worker %s/%d has more blocks than its cache: removals were lost, recovering", *self.rank)
            self.recover()
            return
        self._lend()

    def _retry(self) -> None:
        self._retry_timer = None
        self.tick()

    def _carry_on(self, demote: Demote, decisions: list[Decision[DecodedBatch]], _: KvscoutError | None) -> None:
        """Carry out the remaining decisions after a demotion."""
        self._demoted(demote)
        self._carry_out(decisions)

    def _demoted(self, demote: Demote) -> None:
        self._over_capacity = False
        if self._observer is not None:
            self._observer.demoted(demote.missing)

    def _apply(self, batch: SequencedBatch[DecodedBatch]) -> None:
        if batch.reset:
            self._restart()
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
        applied = self.index.apply(self.rank, batch.content, epoch=batch.epoch, event_id=batch.event_id)
        self._judge(applied)
        if self._observer is not None:
            self._observer.applied(batch)

    def _judge(self, applied: Applied) -> None:
        """Note what the index said of a batch."""
        self._incompatible = bool(applied.incompatible)
        if self._incompatible:
            self._warnings.warning(
                (self.rank, "incompatible"), "worker %s/%d is not indexed: %s", *self.rank, applied.incompatible
            )
        self._over_capacity = applied.over_capacity

    def _load_live(self, state: SourceState) -> None:
        """Load a state that came by itself, if the sequence wants it; one that cannot be loaded costs itself."""
        if not self._wants(None, state):
            return
        try:
            loading = loading_state(self.index, self.rank, self.spec.pool, state.messages)
            if state.size_bytes > SMALL_STATE_BYTES:
                then = partial(self._load_ended, state, loading)
                self._gate.close_for(loading, then, given_up=loading.abandon)
                return
            loading.finish()
        except KvscoutError as error:
            self._refuse(error)
            return
        self._put_in_place(None, state, loading)

    def _load_ended(self, state: SourceState, loading: Loading, error: KvscoutError | None) -> None:
        if error is None:
            self._put_in_place(None, state, loading)
        else:
            loading.abandon()
            self._refuse(error)

    async def _load(self, attempt: int, state: SourceState, *, second_hand: bool = False) -> bool:
        """Load a replayed state if the sequence wants it; return False if it cannot be loaded."""
        await self._gate.opened()
        if not self._wants(attempt, state):
            return True
        try:
            loading = loading_state(self.index, self.rank, self.spec.pool, state.messages)
            try:
                await loading.run()
            except BaseException:
                loading.abandon()
                raise
        except KvscoutError as error:
            self._refuse(error)
            return False
        # What came live meanwhile may have made it useless.
        await self._gate.opened()
        if self._wants(attempt, state):
            self._put_in_place(attempt, state, loading, second_hand=second_hand)
        else:
            loading.abandon()
        return True

    def _wants(self, attempt: int | None, state: SourceState) -> bool:
        return self.sequence.wants_state(attempt, epoch=state.epoch, last_id=state.last_event_id)

    def _refuse(self, error: KvscoutError) -> None:
        self.on_malformed(f"a state cannot be loaded: {error}")

    def _put_in_place(
        self, attempt: int | None, state: SourceState, loading: Loading, *, second_hand: bool = False
    ) -> None:
        """Replace the rank's blocks by a state that was loaded."""
        if not loading.commit():
            # Not all of it was, since too much came meanwhile, or the rank is another by now: the next batch shows it.
            return
        self._over_capacity = False
        if self._observer is not None:
            self._observer.loaded()
        self._carry_out(
            self.sequence.on_state(
                attempt,
                epoch=state.epoch,
                last_id=state.last_event_id,
                history_incomplete=state.history_incomplete,
                second_hand=second_hand,
                last_digest=state.last_digest,
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
            await self._load_from_peers(request)
            broken = None
            if self.feed.can_replay:
                try:
                    broken = await self._read_replay_in_turn(request)
                finally:
                    if self._replay is asyncio.current_task():  # else a later one decides
                        self._pause(paused=False)
            await self._gate.opened()
            if broken is None:
                self._carry_out(self.sequence.on_replay_end(request.attempt, self._clock()))
                return
            log.info("replay of worker %s/%d failed: %s", *self.rank, broken)
            if isinstance(broken, NoHistory):
                self._carry_out(self.sequence.on_no_history(request.attempt, str(broken)))
            else:
                self._carry_out(self.sequence.on_replay_failed(request.attempt, self._clock()))
        except INTENDED:
            raise
        except BaseException as error:
            self._failed(error)

    async def _load_from_peers(self, request: RequestReplay) -> None:
        """Load a peer's state as the first part of the first replay; a later request waits for the same search."""
        state = await self.peers.result()
        # A source that has a replay may know better than those who know that something is missing.
        if state is not None and not (state.history_incomplete and self.feed.can_replay):
            await self._load(request.attempt, state, second_hand=True)
        self.peers.over.set()

    async def _read_replay_in_turn(self, request: RequestReplay) -> HistoryBroken | None:
        if not self._recoveries.locked():
            async with self._recoveries:
                return await self._read_replay(request)
        self._pause(paused=True)
        async with self._recoveries:
            # An engine may answer live only: that may be all that is needed.
            loop = asyncio.get_running_loop()
            unanswered = loop.call_later(UNANSWERED_SECONDS, partial(self._pause, paused=False))
            try:
                return await self._read_replay(request, unanswered)
            finally:
                unanswered.cancel()

    async def _read_replay(
        self, request: RequestReplay, unanswered: asyncio.TimerHandle | None = None
    ) -> HistoryBroken | None:
        """Read a replay to its end, or to where it broke, or until a later request has taken over."""
        count = 0
        first_id = request.first_id
        if self.sequence.last_id is not None and not self.sequence.history_incomplete:
            # A state from a peer was loaded since it was requested.
            first_id = self.sequence.last_id
        try:
            async with aclosing(self.feed.history(first_id)) as replies:
                async for reply in replies:
                    if not count:
                        if unanswered is not None:
                            unanswered.cancel()
                        self._pause(paused=True)
                    await self._gate.opened()
                    if isinstance(reply, SourceState):
                        if not await self._load(request.attempt, reply):
                            return HistoryBroken("its state cannot be loaded")
                    else:
                        self._carry_out(self.sequence.on_replay(request.attempt, reply, self._clock()))
                    # Of the sequence itself: its position is lent for the replies that follow.
                    if self._sequence.attempt != request.attempt:
                        return None
                    count += 1
                    if count % YIELD_EVERY == 0:
                        await asyncio.sleep(0)
        except HistoryBroken as broken:
            return broken
        return None


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait for tasks that were cancelled."""
    await asyncio.gather(*tasks, return_exceptions=True)
