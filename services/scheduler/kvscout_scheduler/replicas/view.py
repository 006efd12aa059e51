"""View of one incarnation of another replica: its claims up to a sequence, and the gap to its newest event.

::

    sequence                  known
    ───┴──── missing ───────────┴──▶        a batch that fits is applied; one after a gap waits for what is missing;
     claims             [later batches]     if that does not come, a requested snapshot replaces the claims

Invariants
1. `claims` are exactly those after the event `sequence` of that incarnation: the start of a log, sequence 0, has none.
   But while it is `replacing` them by those of a snapshot: then events wait.
2. Takeovers of these are in `ownership`: the digest is that of the other's log.
3. All claims have their hashes: one that leaves out what is not here is missed, with all that comes after it.
4. Later batches are bounded by count; what does not fit is missed and comes with the snapshot.

Pure: the clock is passed in, and `Ownership` receives each change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvscout.v1 import replication_pb2
from kvscout_scheduler.messages.translate import key_from_proto
from kvscout_scheduler.replicas.blocks import KnownBlocks, UnknownBlocks
from kvscout_scheduler.replicas.claim import (
    Claim,
    ClaimSet,
    ClaimState,
    Incarnation,
    claim_from_proto,
    owner_from_proto,
)
from kvscout_scheduler.replicas.queues import priorities_from_proto
from kvscout_scheduler.values.reservation import MICROSECONDS, PoolId, RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.replicas.ownership import Ownership

SILENT_SECONDS = 5.0
"""Two heartbeats missed and a bit: nothing is forwarded any more."""
REORDER_SECONDS = 0.02
"""Seconds for which a gap may close by itself."""
RETRY_SECONDS = (0.1, 0.2, 0.25)
"""Between requests for a snapshot; the last one for ever."""
MAX_LATER_BATCHES = 256
LATE_SECONDS = 0.1
"""Longer than the quickest message lately: its content is not new."""
CHANGE_WORK = 15
SLICE_WORK = 4_096
"""Work of a slice of a snapshot, in claims that are compared; a changed claim costs `CHANGE_WORK` more.
About ten milliseconds."""
CLOCK_DRIFT = 0.01
"""Seconds a second by which the least transit time grows: a clock may have been set."""


class View:
    """One other incarnation.

    Args:
        of: Whose.
        ownership: Receives each change.
        now: Monotonic seconds.
    """

    def __init__(self, of: Incarnation, ownership: Ownership, now: float) -> None:
        self.of = of
        self.sequence = 0
        self.known = 0
        """Highest sequence that is known to exist."""
        self.received_at = now
        self.leaving = False
        """It said that it stops."""
        self.replaced = False
        """True: messages of another incarnation come, which counts."""
        self.diverged = False
        self.received = False
        """True: a message of its own came; else others only mentioned it."""
        self.reads_known_blocks = False
        """It says that it reads claims whose hashes are left out."""
        self.priorities: dict[PoolId, int] = {}
        """Highest priority that waits there, by pool, as it said last."""
        self.priorities_at = now
        """When it said that."""
        self.gaps = 0
        self.divergences = 0
        self.snapshots = 0
        self._ownership = ownership
        self.claims = ClaimSet()
        self._witnesses: dict[str, int] = {}
        """Sequences up to which other replicas follow it, beyond ours."""
        self._later: dict[int, replication_pb2.EventBatch] = {}
        self._missing_since: float | None = None
        self._requested_at = 0.0
        self._requested_itself_at = 0.0
        self._tries = 0
        self._request_id = 0
        self._wants_all = False
        """True: all hashes are wanted, as some that a snapshot left out are not here."""
        self._chunks: dict[int, list[Claim]] = {}
        """Claims of the chunks that have come, by number."""
        self._last = -1
        """Number of the last chunk; -1 = it has not come."""
        self._replacement: Iterator[int | None] | None = None
        self._least_transit = math.inf
        """Seconds from sending to applying of the quickest message, by two clocks that may differ."""
        self._sent_at = now
        """When that was updated."""

    def live(self, now: float) -> bool:
        """Return whether it can be expected to answer."""
        return not (self.leaving or self.replaced) and now - self.received_at < SILENT_SECONDS

    def needs_blocks(self, now: float) -> bool:
        """Return whether it may follow our events, and needs all hashes in them. One that is known from others only and
        sends nothing soon is gone."""
        if self.reads_known_blocks or self.leaving or self.replaced:
            return False
        return self.received or now - self.received_at < SILENT_SECONDS

    @property
    def lag_events(self) -> int:
        """Return events known to exist and not applied."""
        return self.known - self.sequence

    def lag_seconds(self, now: float) -> float:
        """Return the seconds for which events have been missing."""
        return 0.0 if self._missing_since is None else now - self._missing_since

    def take_batch(self, batch: replication_pb2.EventBatch, now: float, wall_now: float) -> int:
        """Apply what fits of a batch.

        Args:
            batch: Events in order.
            now: Monotonic seconds.
            wall_now: Seconds since the Unix epoch.

        Returns:
            Events applied, of later batches too.

        Raises:
            InvalidArgument: An event cannot be read; nothing of the batch is applied.
        """
        last = batch.first_sequence + len(batch.events) - 1
        self._learn(last, now)
        if last <= self.sequence:
            return 0
        waits = self.diverged or self.replacing
        if batch.first_sequence > self.sequence + 1 or waits:
            # What diverged stays where it is, so that the snapshot that repairs it is not older than it.
            self.gaps += not (self._later or waits)
            if len(self._later) < MAX_LATER_BATCHES:
                self._later[batch.first_sequence] = batch
            return 0
        before = self.sequence
        self._apply(batch, late=self._is_late(batch.sent_at, now, wall_now))
        self._drain(now)
        return self.sequence - before

    def take_heartbeat(self, heartbeat: replication_pb2.ReplicaHeartbeat, now: float) -> None:
        """Compare where it is with what we have."""
        self.leaving, self.reads_known_blocks = heartbeat.leaving, heartbeat.reads_known_blocks
        self.priorities, self.priorities_at = priorities_from_proto(heartbeat.lines), now
        self._learn(heartbeat.sequence, now)
        if heartbeat.sequence == self.sequence and not self.replacing:
            agrees = (heartbeat.claims, heartbeat.digest) == (len(self.claims), self.claims.digest)
            if not agrees and not self.diverged:
                self.divergences += 1
            self.diverged = not agrees
            self._settle(now)

    def take_position(self, witness: str, sequence: int, now: float) -> None:
        """Note the sequence up to which another replica follows this one."""
        if sequence > self.sequence:
            self._witnesses[witness] = sequence
            self._learn(sequence, now)

    def snapshot_source(self, now: float, alive: Callable[[str], bool], request_id: int) -> str:
        """Return the replica to request a snapshot of now.

        Args:
            now: Monotonic seconds.
            alive: Whether a replica can be expected to answer.
            request_id: Names the request, if there is one.

        Returns:
            A replica id; "" = nobody.
        """
        if self._missing_since is None or now - self._missing_since < REORDER_SECONDS or self.replacing:
            return ""
        further = [w for w, sequence in self._witnesses.items() if sequence > self.sequence and alive(w)]
        pause = RETRY_SECONDS[min(self._tries, len(RETRY_SECONDS)) - 1]
        if further and self._requested_at == self._requested_itself_at > self.received_at:
            # It is silent, and perhaps gone: who follows it is not kept waiting for it.
            pause = REORDER_SECONDS
        if self._tries and now - self._requested_at < pause:
            return ""
        targets = sorted(further, key=lambda w: (-self._witnesses[w], w))
        # Itself first, and not again if it did not answer and others can.
        if self.live(now) and (not targets or self._requested_itself_at <= self.received_at):
            targets.insert(0, self.of.replica_id)
        if not targets:
            if not self.live(now):
                # Nobody has what is missing: it is gone with its replica.
                self.known, self.diverged = self.sequence, False
                self._later.clear()
                self._settle(now)
            return ""
        self._request_id, self._requested_at, self._chunks, self._last = request_id, now, {}, -1
        target = targets[self._tries % len(targets)]
        self._tries += 1
        if target == self.of.replica_id:
            self._requested_itself_at = now
        return target

    def take_chunk(self, chunk: replication_pb2.ReplicaSnapshotChunk, now: float) -> bool:
        """Take a part of the requested snapshot; with the last one it begins to take effect, see `proceed`.

        Returns:
            Whether it is in effect now.

        Raises:
            InvalidArgument: A claim cannot be read; the snapshot takes no effect.
        """
        if not self._request_id or chunk.request_id != self._request_id:
            return False
        self._requested_at = now
        try:
            claims = [claim_from_proto(each, self._ownership.blocks_of) for each in chunk.claims]
        except UnknownBlocks:
            self._wants_all, self._requested_at, self._request_id = True, -math.inf, 0
            return False
        self._chunks[chunk.index] = claims
        if chunk.last:
            self._last = chunk.index
        for thresholds in chunk.thresholds:
            self._ownership.registers.merge_thresholds(thresholds)
        for cool_down in chunk.cool_downs:
            self._ownership.registers.merge_cool_down(cool_down)
        if not 0 <= self._last < len(self._chunks):
            return False
        chunks, self._chunks, self._request_id = self._chunks, {}, 0
        if chunk.sequence < self.sequence:
            return False
        # A chunk that came twice was read twice and counts once.
        claims = [claim for index in range(self._last + 1) for claim in chunks[index]]
        self._replacement = self._replace(claims, chunk.sequence)
        return self.proceed(now)

    @property
    def replacing(self) -> bool:
        """Return whether a snapshot takes effect, a slice at a time: the claims are those of no one event."""
        return self._replacement is not None

    def proceed(self, now: float) -> bool:
        """Put a slice of a snapshot into effect; True = that was the last one."""
        sequence = next(self._replacement) if self._replacement is not None else None
        if sequence is None:
            return False
        self._replacement = None
        self.snapshots += 1
        self.sequence = sequence
        self.diverged = self._wants_all = False
        self.known = max(self.known, self.sequence)
        self._drain(now)
        return True

    @property
    def known_sequence(self) -> int:
        """Return the sequence up to which claims are here, for a snapshot request; 0 = all hashes are wanted."""
        return 0 if self.diverged or self._wants_all else self.sequence

    def _learn(self, sequence: int, now: float) -> None:
        self.known = max(self.known, sequence)
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Note since when anything is missing."""
        if self.known > self.sequence or self.diverged:
            if self._missing_since is None:
                self._missing_since = now
        else:
            self._missing_since, self._tries, self._request_id = None, 0, 0
            self._witnesses.clear()

    def _drain(self, now: float) -> None:
        """Apply the batches that fit now."""
        while self._later:
            first = min(self._later)
            if first > self.sequence + 1:
                break
            batch = self._later.pop(first)
            if first + len(batch.events) - 1 > self.sequence and not self._apply(batch, late=True):
                break
        self._settle(now)

    def _is_late(self, sent_at: int, now: float, wall_now: float) -> bool:
        """Return whether a message took longer than others: the network, its sender or this process delayed it."""
        transit = wall_now - sent_at / MICROSECONDS
        least = min(transit, self._least_transit + CLOCK_DRIFT * (now - self._sent_at))
        self._least_transit, self._sent_at = least, now
        return transit - least > LATE_SECONDS

    def _apply(self, batch: replication_pb2.EventBatch, *, late: bool) -> bool:
        """Apply a batch; False = a claim in it leaves out hashes that are not here, and waits for a snapshot with all
        that comes after it."""
        events = batch.events[self.sequence + 1 - batch.first_sequence :]
        # All are read before any takes effect.
        added, known = self._read(events)
        if known < len(events):
            first = self.sequence + 1 + known
            self._later[first] = replication_pb2.EventBatch(first_sequence=first, events=events[known:])
        for index, event in enumerate(events[:known]):
            self.sequence += 1
            kind = event.WhichOneof("event")
            match kind:
                case "add_request":
                    self._put(added[index], late=late, sent_sequence=self.sequence)
                case "thresholds":
                    self._ownership.registers.merge_thresholds(event.thresholds)
                case "cool_down":
                    self._ownership.registers.merge_cool_down(event.cool_down)
                case None:
                    self.diverged = True
                case _:
                    self._change(kind, getattr(event, kind), late=late)
        return known == len(events)

    def _read(self, events: Sequence[replication_pb2.ReplicaEvent]) -> tuple[dict[int, Claim], int]:
        """Return the claims that events add, by place, up to one whose hashes are missing; and the number of events."""
        added: dict[int, Claim] = {}
        by_attempt: dict[tuple[RequestKey, int], Claim] = {}

        def find(key: RequestKey, attempt_id: int, known: KnownBlocks) -> bytes:
            earlier = by_attempt.get((key, attempt_id))
            if earlier is not None and known.fit(earlier.reservation.block_hashes):
                return earlier.reservation.block_hashes
            return self._ownership.blocks_of(key, attempt_id, known)

        for index, event in enumerate(events):
            if event.HasField("add_request"):
                try:
                    claim = claim_from_proto(event.add_request, find)
                except UnknownBlocks:
                    return added, index
                added[index] = by_attempt[claim.key, claim.attempt_id] = claim
        return added, len(events)

    def _change(self, kind: str, event: Any, *, late: bool) -> None:
        """Apply an event to the claim that it names."""
        key = key_from_proto(event.request)
        claim = self.claims.get(key)
        if claim is None or claim.attempt_id != event.request.attempt_id:
            # Cannot be while the log and we agree; a snapshot will repair it.
            self.diverged = True
            return
        match kind:
            case "mark_prefill_completed":
                self._put(claim._replace(state=ClaimState.DECODE), late=late)
            case "add_output":
                self._put(claim._replace(output_blocks=event.output_blocks), late=late)
            case "renew":
                owner, lease_seconds = owner_from_proto(event), event.lease_seconds
                self._put(claim._replace(owner=owner, lease_seconds=lease_seconds), late=late)
            case "free":
                self.claims.drop(key)
                if event.by_caller:
                    self._ownership.freed_by_caller(key, claim.attempt_id)
                self._ownership.claim_dropped(claim)

    def _put(self, claim: Claim, *, late: bool, sent_sequence: int | None = None) -> None:
        self.claims.put(claim, sent_sequence)
        if claim.state is ClaimState.FREED:
            self._ownership.freed_by_caller(claim.key, claim.attempt_id)
        self._ownership.claim_changed(claim.key, late=late)

    def _replace(self, claims: Sequence[Claim], sequence: int) -> Iterator[int | None]:
        """Make the claims those of a snapshot, some at a time; yields its sequence when that is done."""
        left, work = dict(self.claims), 0
        for claim in claims:
            left.pop(claim.key, None)
            work += 1
            if self.claims.get(claim.key) != claim:
                self._put(claim, late=True, sent_sequence=sequence)
                work += CHANGE_WORK
            if work >= SLICE_WORK:
                work = 0
                yield None
        for key in left:
            self._ownership.claim_dropped(self.claims.drop(key), late=True)
            work += CHANGE_WORK
            if work >= SLICE_WORK:
                work = 0
                yield None
        yield sequence
