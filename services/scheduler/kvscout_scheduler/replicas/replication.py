"""The replicas of the scheduler: messages in, messages out, and what is due when.

::

    ours: Ownership.log ──events──▶ all            all ──events──▶ View of each other incarnation
                        ──heartbeats──▶ all        heartbeat: sequence, count, digest; how far others are followed
                        ──snapshot──▶ requester    a gap, a new epoch, another digest → a snapshot is requested

Nothing is resent and nothing acknowledged: events are lost or come, and what a replica owns can be had at any time as a
snapshot, consistent with a sequence. Of a replica that is gone, the one that followed it furthest sends the snapshot.

Pure: clocks are passed in, messages are bytes, and whoever carries them may lose, repeat and reorder them.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.message import DecodeError

from kvscout.v1 import replication_pb2, scheduler_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.observability.telemetry import RateLimitedLog
from kvscout_scheduler.replicas.claim import Claim, Incarnation, claim_to_proto
from kvscout_scheduler.replicas.log import end_of_batch
from kvscout_scheduler.replicas.ownership import Ownership
from kvscout_scheduler.replicas.queues import PRIORITIES_SECONDS, highest_priority, priorities_of, priorities_to_proto
from kvscout_scheduler.replicas.view import SILENT_SECONDS, View
from kvscout_scheduler.values.reservation import MICROSECONDS, PoolId, RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

log = logging.getLogger("kvscout.replicas")

VERSION = 1
TICK_SECONDS = 0.02
HEARTBEAT_SECONDS = (0.05, 0.2, 0.5)
"""After the last event, ours or another's."""
IDLE_HEARTBEAT_SECONDS = 2.0
AWAY_SECONDS = 1.0
"""Between two ticks: the process was stopped, and requests a heartbeat of every replica."""
UPKEEP_SECONDS = 0.5
FORGET_SECONDS = 60.0
"""Seconds after which a silent incarnation that owns nothing is forgotten."""
MAX_VIEWS = 64
MAX_FORGOTTEN = 1_024
"""Incarnations that are not learnt again from others who forget them a little later."""
OVER = object()
ALL = ""
"""The target of what goes to everyone."""


class OutgoingMessage(NamedTuple):
    """A message to be carried."""

    to: str
    """Replica id, or `ALL`."""
    payload: bytes


class Replication:
    """One replica.

    Args:
        scheduler: The core that is replicated.
        replica_id: Unique among replicas, best kept over restarts.
    """

    def __init__(self, scheduler: Scheduler, replica_id: str) -> None:
        self.me = Incarnation(replica_id, int(scheduler.wall_clock() * MICROSECONDS))
        self.ownership = Ownership(scheduler, self.me)
        self.views = self.ownership.views
        """Views of the other incarnations."""
        self.refused = 0
        """Messages that could not be read."""
        self.transit_seconds = 0.0
        """From sending to applying, of the last batch that came, as far as clocks agree."""
        self.ended: Counter[str] = Counter()
        """Divergences, gaps and snapshots of views that are forgotten."""
        self._clock = scheduler.clock
        self._wall_clock = scheduler.wall_clock
        self._outbox: list[OutgoingMessage] = []
        self._replies: dict[tuple[str, Incarnation], Iterator[bytes]] = {}
        """Snapshots under way, by requester and subject."""
        self._conflict_at = -math.inf
        """Time of the last message of another process with our replica id."""
        self._ending: Iterator[None] | None = None
        """Ends what silent replicas leave behind, a slice at a time."""
        self._leaving = False
        self._scheduler = scheduler
        self._priorities: dict[PoolId, int] = {}
        """As others know them."""
        self._forgotten: dict[Incarnation, None] = {}
        self._lease_seconds = scheduler.settings.lease_seconds
        self._requests = itertools.count(1)
        now = self._clock()
        self._ticked_at = self._upkeep_at = self._heartbeat_at = now
        self._event_at = now
        self._heartbeats = 0
        """Sent since the last event."""
        self._warnings = RateLimitedLog(log)
        scheduler.remote_queues.highest = lambda pool: highest_priority(pool, self.views.values(), self._clock())
        self.query()

    @property
    def conflict(self) -> str:
        """Return why our replica id is not ours alone; "" = it is, as far as messages show."""
        if self._clock() - self._conflict_at >= SILENT_SECONDS:
            return ""
        return f"a later process has the replica id {self.me.replica_id!r} too, or this clock was set back"

    def receive(self, payload: bytes) -> None:
        """Take a message. One that cannot be read is counted, reported and left."""
        try:
            message = replication_pb2.ReplicaMessage.FromString(payload)
            if message.version != VERSION:
                self._refuse(f"replica {message.replica_id!r} speaks version {message.version}, this is {VERSION}")
                return
            self._take(message)
        except (DecodeError, KvscoutError) as error:
            self._refuse(f"a message of another replica cannot be read: {error}")
        self.ownership.settle()

    def tick(self) -> None:
        """Do what is due; to be called every `TICK_SECONDS`."""
        now = self._clock()
        self.ownership.settle()
        if now - self._ticked_at > AWAY_SECONDS:
            self.query()
        self._ticked_at = now
        due = (
            self._event_at + HEARTBEAT_SECONDS[self._heartbeats]
            if self._heartbeats < len(HEARTBEAT_SECONDS)
            else self._heartbeat_at + IDLE_HEARTBEAT_SECONDS
        )
        if now >= min(due, self._heartbeat_at + IDLE_HEARTBEAT_SECONDS):
            self._heartbeats += now >= due
            self._beat()
        elif (priorities := priorities_of(self._scheduler.waiting)) != self._priorities or (
            priorities and now >= self._heartbeat_at + PRIORITIES_SECONDS
        ):
            self._beat()
        self._scheduler.resume()
        for view in self.views.values():
            self._ask(view, now)
        if now - self._upkeep_at >= UPKEEP_SECONDS:
            self._upkeep_at = now
            self._upkeep(now)
        if self._ending is not None and next(self._ending, OVER) is OVER:
            self._ending = None

    def query(self) -> None:
        """Request a heartbeat of every replica: this one is new, or was away."""
        self._event_at, self._heartbeats = self._clock(), 0
        self._beat(query=True)

    def leave(self) -> None:
        """Announce that this replica stops now."""
        self._leaving = True
        self._beat()

    def take(self) -> list[OutgoingMessage]:
        """Return the messages to be sent now, in order; the rest of a snapshot comes one message a call, and the rest
        of another's takes effect a slice a call."""
        replacing = next((view for view in self.views.values() if view.replacing), None)
        if replacing is not None and replacing.proceed(self._clock()):
            self._event_at, self._heartbeats = self._clock(), 0
        self.ownership.settle()
        self._flush()
        outbox, self._outbox = self._outbox, []
        for requested, reply in list(self._replies.items()):
            payload = next(reply, None)
            if payload is None:
                del self._replies[requested]
            else:
                outbox.append(OutgoingMessage(requested[0], payload))
        return outbox

    @property
    def busy(self) -> bool:
        """Return whether there is something to `take`."""
        replacing = any(view.replacing for view in self.views.values())
        return bool(replacing or self._replies or self._outbox or len(self.ownership.log))

    def live(self, replica_id: str) -> bool:
        """Return whether another replica can be expected to answer."""
        now = self._clock()
        return any(of.replica_id == replica_id and view.live(now) for of, view in self.views.items())

    def status(self) -> list[scheduler_pb2.Replica]:
        """Return every incarnation that is not forgotten, this one first."""
        now, own = self._clock(), self.ownership.log
        return [
            scheduler_pb2.Replica(
                **self.me._asdict(), self=True, sequence=own.sequence, owned_requests=_active(own.claims), live=True
            ),
            *(
                scheduler_pb2.Replica(
                    **of._asdict(),
                    sequence=view.sequence,
                    owned_requests=_active(view.claims),
                    silent_seconds=now - view.received_at,
                    live=view.live(now),
                    diverged=view.diverged,
                    gaps=view.gaps,
                    lag_events=view.lag_events,
                    lag_seconds=view.lag_seconds(now),
                    divergences=view.divergences,
                    snapshots=view.snapshots,
                )
                for of, view in sorted(self.views.items())
            ),
        ]

    def _take(self, message: replication_pb2.ReplicaMessage) -> None:
        of, now = Incarnation(message.replica_id, message.epoch), self._clock()
        if of.replica_id == self.me.replica_id:
            if of.epoch > self.me.epoch:
                # The others listen to that one, for as long as its messages come.
                self._conflict_at = now
                self._warnings.warning("conflict", "%s", self.conflict)
            return
        view = self._view(of, now)
        if view is None:
            return
        view.received_at, view.received = now, True
        if view.replaced:
            self._choose_incarnation(of.replica_id, now)
            if view.replaced:
                return
        match message.WhichOneof("body"):
            case "events":
                wall_now = self._wall_clock()
                if view.take_batch(message.events, now, wall_now):
                    self._event_at, self._heartbeats = now, 0
                    self.transit_seconds = max(0.0, wall_now - message.events.sent_at / MICROSECONDS)
            case "heartbeat":
                self._take_heartbeat(of, view, message.heartbeat, now)
            case "snapshot_request":
                self._reply(of.replica_id, message.snapshot_request)
            case "snapshot_chunk":
                chunk = message.snapshot_chunk
                subject = self.views.get(Incarnation(chunk.of_replica_id, chunk.of_epoch))
                if subject is not None and subject.take_chunk(chunk, now):
                    self._event_at, self._heartbeats = now, 0
            case other:
                self._refuse(f"replica {of.replica_id!r} sent {other or 'nothing'}, which is not known here")

    def _take_heartbeat(
        self, of: Incarnation, view: View, heartbeat: replication_pb2.ReplicaHeartbeat, now: float
    ) -> None:
        view.take_heartbeat(heartbeat, now)
        for position in heartbeat.positions:
            third = Incarnation(position.replica_id, position.epoch)
            if third == self.me or third in self._forgotten:
                continue
            followed = self._view(third, now)
            if followed is not None:
                followed.take_position(of.replica_id, position.sequence, now)
        if heartbeat.query:
            self._event_at, self._heartbeats = now, 0
            self._beat()

    def _view(self, of: Incarnation, now: float) -> View | None:
        """Return the view of an incarnation, made if it is new; None = there is no room."""
        view = self.views.get(of)
        if view is not None:
            return view
        if len(self.views) >= MAX_VIEWS:
            oldest = min(self.views.values(), key=lambda each: each.received_at)
            if oldest.live(now):
                self._refuse(f"replica {of.replica_id!r} is one too many: {MAX_VIEWS} are known")
                return None
            self._forget(oldest.of)
        view = self.views[of] = View(of, self.ownership, now)
        self._choose_incarnation(of.replica_id, now)
        self._event_at, self._heartbeats = now, 0
        return view

    def _choose_incarnation(self, replica_id: str, now: float) -> None:
        """Decide which incarnation of a replica is the one that is: the latest of those whose messages come. One that
        was started with its clock set back is earlier than the one before it, whose messages have stopped."""
        same = [each for each in self.views.values() if each.of.replica_id == replica_id]
        received = [each for each in same if now - each.received_at < SILENT_SECONDS]
        chosen = max(received or same, key=lambda each: each.of)
        for each in same:
            each.replaced = each is not chosen or replica_id == self.me.replica_id

    def _ask(self, view: View, now: float) -> None:
        """Request a snapshot, if one is wanted."""
        request_id = next(self._requests)
        target = view.snapshot_source(now, self.live, request_id)
        if target:
            request = replication_pb2.ReplicaSnapshotRequest(
                request_id=request_id,
                of_replica_id=view.of.replica_id,
                of_epoch=view.of.epoch,
                known_sequence=view.known_sequence,
            )
            self._send(target, snapshot_request=request)

    def _reply(self, to: str, request: replication_pb2.ReplicaSnapshotRequest) -> None:
        of = Incarnation(request.of_replica_id, request.of_epoch)
        if of == self.me:
            claims, sequence = self.ownership.log.claims, self.ownership.log.sequence
        elif of in self.views and not self.views[of].replacing:
            claims, sequence = self.views[of].claims, self.views[of].sequence
        else:
            return
        # A new request of the same replica replaces the one under way: that one was given up.
        sent_sequence, known = claims.sent_sequence, request.known_sequence
        claims_known = [
            (claim, bool(claim.reservation.block_hashes) and sent_sequence[key] <= known)
            for key, claim in claims.items()
        ]
        self._replies[to, of] = self._chunks(request, claims_known, sequence)

    def _chunks(
        self, request: replication_pb2.ReplicaSnapshotRequest, claims: list[tuple[Claim, bool]], sequence: int
    ) -> Iterator[bytes]:
        """Return the messages of a snapshot; made one at a time, so that a large one holds nothing up.

        Args:
            request: The request.
            claims: Each with whether the requester has its hashes.
            sequence: The event after which these are the claims.
        """
        registers = self.ownership.registers
        thresholds, cool_downs = list(registers.thresholds.values()), registers.cool_down_events()
        start = 0
        for index in itertools.count():
            end = end_of_batch(claims, lambda each: each[0].size(known=each[1]), start)
            chunk = replication_pb2.ReplicaSnapshotChunk(
                request_id=request.request_id,
                of_replica_id=request.of_replica_id,
                of_epoch=request.of_epoch,
                sequence=sequence,
                index=index,
                last=end == len(claims),
                claims=(claim_to_proto(claim, known=known) for claim, known in claims[start:end]),
                thresholds=thresholds if index == 0 else (),
                cool_downs=cool_downs if index == 0 else (),
            )
            yield self.message(snapshot_chunk=chunk)
            if chunk.last:
                return
            start = end

    def _beat(self, *, query: bool = False) -> None:
        self._flush()
        own, self._priorities = self.ownership.log, priorities_of(self._scheduler.waiting)
        heartbeat = replication_pb2.ReplicaHeartbeat(
            sequence=own.sequence,
            claims=len(own.claims),
            digest=own.claims.digest,
            positions=[
                replication_pb2.ReplicaPosition(
                    replica_id=of.replica_id, epoch=of.epoch, sequence=self.views[of].sequence
                )
                for of in self.views
            ],
            query=query,
            leaving=self._leaving,
            reads_known_blocks=True,
            lines=priorities_to_proto(self._priorities),
        )
        self._heartbeat_at = self._clock()
        self._send(ALL, heartbeat=heartbeat)

    def _flush(self) -> None:
        """Put the pending events into messages."""
        if len(self.ownership.log):
            self._event_at, self._heartbeats = self._clock(), 0
            for batch in self.ownership.log.take(int(self._wall_clock() * MICROSECONDS)):
                self._send(ALL, events=batch)

    def _upkeep(self, now: float) -> None:
        ownership = self.ownership
        ownership.registers.expire()
        ownership.collect(now)
        if self._ending is None:
            alive = [of.replica_id for of, view in self.views.items() if view.live(now)]
            self._ending = ownership.end_overdue(first=all(self.me.replica_id < other for other in alive))
        for of, view in list(self.views.items()):
            # One that may come back must still find here what was taken from it.
            keep = FORGET_SECONDS + (self._lease_seconds if view.claims and not view.replaced else 0.0)
            if now - view.received_at > keep and not ownership.holds(of):
                self._forget(of)

    def _forget(self, of: Incarnation) -> None:
        view = self.views[of]
        self._forgotten[of] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        self.ended.update(divergences=view.divergences, gaps=view.gaps, snapshots=view.snapshots)
        self.ownership.forget(of)

    def message(self, **body: Any) -> bytes:
        """Return a message of this replica.

        Args:
            body: One, by the name of its field in `ReplicaMessage`.
        """
        return replication_pb2.ReplicaMessage(version=VERSION, **self.me._asdict(), **body).SerializeToString()

    def _send(self, to: str, **body: Any) -> None:
        self._outbox.append(OutgoingMessage(to, self.message(**body)))

    def _refuse(self, reason: str) -> None:
        self.refused += 1
        self._warnings.warning("refused", "%s", reason)


def _active(claims: Mapping[RequestKey, Claim]) -> int:
    return sum(claim.active for claim in claims.values())
