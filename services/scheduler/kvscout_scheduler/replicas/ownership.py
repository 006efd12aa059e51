"""Ownership of requests: the claims of all replicas, and what follows from them for our bookings.

::

    our bookings ──journal──▶ our log ───┐
                                         ├──▶ the claim that holds ──▶ ours: a booking
    views of others ─────────────────────┘                             another's: a mirror, a load without a lease

Invariants, between two messages
1. Our log has an active claim to a name exactly if the booking of that name is ours.
2. Where the claim that holds is another's, there is its mirror, or its worker is not here: then the name is in
   `unplaced`.
3. A claim of ours that is beaten is given up immediately, unless the request's owner came to us last: then we claim it
   again, higher. One that is over stays while it has others to cancel.

Pure: the clock is passed in. Not thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvscout_common.worker import WorkerSpec
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.bookings.journal import Journal
from kvscout_scheduler.replicas import mirrors
from kvscout_scheduler.replicas.blocks import KnownBlocks, RecentBlocks, UnknownBlocks
from kvscout_scheduler.replicas.claim import Claim, ClaimState, Incarnation
from kvscout_scheduler.replicas.log import ReplicaLog
from kvscout_scheduler.replicas.mirrors import claim_of
from kvscout_scheduler.replicas.registers import Registers
from kvscout_scheduler.replicas.view import SILENT_SECONDS, View
from kvscout_scheduler.values.reservation import MICROSECONDS, EndReason, OwnerName, RequestKey, Reservation

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

log = logging.getLogger("kvscout.replicas")

END_WORK = 15
SLICE_WORK = 2_048
"""Claims of silent replicas that are looked at in one go; one that ends costs `END_WORK` more."""
SECOND_TO_END_SECONDS = 2.0
"""Seconds that other replicas leave overdue requests of a silent one to the first replica."""


class HeldClaim(NamedTuple):
    """The claim that holds, and its replica."""

    by: Incarnation
    claim: Claim


class Ownership(Journal):
    """Claims of all replicas. Receives our bookings (`Journal`), and from each `View` the claims of another replica.

    Args:
        scheduler: Its bookings are claimed from now on; it must have none yet.
        me: This incarnation.
    """

    replicated = True

    def __init__(self, scheduler: Scheduler, me: Incarnation) -> None:
        self.me = me
        self.log = ReplicaLog()
        self.views: dict[Incarnation, View] = {}
        self.registers = Registers(
            scheduler.thresholds, scheduler.cool_downs, scheduler.wall_clock, self.log, me.replica_id
        )
        self.taken_over_count = 0
        self._scheduler = scheduler
        self._bookings = scheduler.bookings
        self._owners = scheduler.bookings.owners
        self._clock = scheduler.clock
        self._over: dict[RequestKey, float] = {}
        """Our claims that are over, and since when."""
        self._unplaced: dict[tuple[str, str], dict[RequestKey, None]] = {}
        """By tenant and worker id."""
        self._unplaced_at: dict[RequestKey, tuple[str, str]] = {}
        self._dirty: dict[RequestKey, bool] = {}
        """Names whose claims changed, and whether what they say of them is late."""
        self._began_at = scheduler.clock()
        self._recent_blocks = RecentBlocks()
        self._yielding = False
        self._bookings.journal = self

    def holder(self, key: RequestKey) -> HeldClaim | None:
        """Return the claim that holds a name, whoever has it."""
        claims = list(self._claims(key))
        over = [held.claim for held in claims if not held.claim.active]
        active = [held for held in claims if held.claim.active and not any(each.cancels(held.claim) for each in over)]
        return max(active, key=lambda held: (held.claim.term, held.by), default=None)

    def remote_owner(self, key: RequestKey) -> Incarnation | None:
        """Return the other replica that owns a request; None = we do, or nobody."""
        booking = self._bookings.find(key)
        if booking is not None and not booking.mirror:
            return None
        held = self.holder(key)
        return held.by if held is not None and held.by != self.me else None

    def settle(self) -> None:
        """Put into effect what followed from a message."""
        if not self._dirty:
            return
        while self._dirty:
            key = next(iter(self._dirty))
            self._resolve(key, late=self._dirty.pop(key))
        self._scheduler.pump()

    def holds(self, of: Incarnation) -> bool:
        """Return whether any claim of another incarnation holds."""
        return any(
            claim.active and (held := self.holder(key)) is not None and held.by == of
            for key, claim in self.views[of].claims.items()
        )

    def forget(self, of: Incarnation) -> None:
        """Drop a view with all its claims."""
        view, now = self.views.pop(of), self._clock()
        for key in view.claims:
            self._dirty[key] = True
            if self._over.pop(key, None) is not None:
                # Others forget it a little later: until then it must be cancelled for them.
                self._over[key] = now
        self.settle()

    def end_overdue(self, *, first: bool) -> Iterator[None]:
        """End requests of silent replicas, some at a time: those of unary callers when their lease is over, those of
        owners when the owner is connected here and left them, or has been gone for its grace time. A silent replica
        may have lost its owners since its last message; an owner that is well lists its requests at another replica.

        Args:
            first: Whether it is ours to do; others only do what the first one does not.
        """
        work = 0
        for of, view in list(self.views.items()):
            connected: dict[OwnerName, float] = {}
            for key in list(view.claims):
                now = self._clock()
                if view.live(now) or of not in self.views:
                    break
                claim = view.claims.get(key)
                reason = self._overdue(claim, view, connected, now, first=first) if claim is not None else None
                work += 1
                if reason is not None:
                    work += END_WORK
                    held = self.holder(key)
                    if held is not None and held.by == of:
                        self._end_remote(held, reason, now)
                if work >= SLICE_WORK:
                    self.settle()
                    yield
                    work, connected = 0, {}
        self.settle()

    def _overdue(
        self, claim: Claim, view: View, connected: dict[OwnerName, float], now: float, *, first: bool
    ) -> EndReason | None:
        """Return why a claim of a silent replica is over; None = it is not.

        Args:
            claim: The claim.
            view: Of its replica.
            connected: For how long owners have had a stream here; those that are not in it are looked up.
            now: On the clock.
            first: As `end_overdue`.
        """
        if not claim.active:
            return None
        grace = self._scheduler.settings.owner_grace_seconds
        later = 0.0 if first else SECOND_TO_END_SECONDS
        reason, left, timeout_seconds = EndReason.LEASE, now - view.received_at, claim.lease_seconds + later
        if (owner := claim.owner) is not None:
            if owner not in connected:
                connected[owner] = self._owners.connected(owner, now)
            if connected[owner] and claim.owner_since <= self._owner_since(owner):
                reason, left, timeout_seconds = EndReason.OWNER_FORGOT, connected[owner], grace
            else:
                reason, timeout_seconds = EndReason.OWNER_GONE, grace + later
        return None if left < timeout_seconds else reason

    def collect(self, now: float) -> None:
        """Drop claims that are over, are old enough, and cancel nothing any more; and hashes that are old."""
        self._recent_blocks.expire(now)
        settings = self._scheduler.settings
        for key, since in list(self._over.items()):
            if since + settings.tombstone_seconds > now and len(self._over) <= settings.max_tombstones:
                break
            if len(self._over) > settings.max_tombstones or all(key not in view.claims for view in self.views.values()):
                del self._over[key]
                self.log.drop(key)

    # Journal: what happened to our bookings.

    def booked(self, booking: Booking) -> None:
        self._claim_booking(booking)

    def changed(self, booking: Booking) -> None:
        claim = self.log.claims[booking.key]
        # With the owner's stream, which others must know of; the same term: nobody else has claimed it.
        since = claim.owner_since if claim.owner == booking.owner else self._owner_since(booking.owner)
        ours = claim_of(booking, claim.term, since)
        if ours != claim:
            self._record(ours)

    def ended(self, booking: Booking, *, by_caller: bool) -> None:
        key, claim = booking.key, self.log.claims[booking.key]
        if self._yielding or (claim.term == 1 and all(key not in view.claims for view in self.views.values())):
            self.log.drop(key, by_caller=by_caller)
        else:
            # Others may still hold it to be theirs, and some of them may be away.
            self._claim(_over(claim, ClaimState.FREED if by_caller else ClaimState.ENDED, claim.term))

    def freed_unknown(self, key: RequestKey, attempt_id: int) -> None:
        held = self.holder(key)
        if held is not None:
            if held.claim.attempt_id == attempt_id and held.by != self.me:
                self._claim(_over(held.claim, ClaimState.FREED, held.claim.term))
        elif attempt_id:
            term = max((each.claim.term for each in self._claims(key)), default=1)
            self._claim(Claim(Reservation(key, attempt_id), term, ClaimState.FREED))

    def taken_over(self, mirror: Booking) -> None:
        self.taken_over_count += 1
        self._claim_booking(mirror)

    def displaced(self, mirror: Booking) -> None:
        self._unplace(mirror.key, (mirror.key.tenant, mirror.reservation.rank.worker_id))

    # What others say, from their views.

    def claim_changed(self, key: RequestKey, *, late: bool = False) -> None:
        """Note that a view's claim came, changed or went; late = longer ago than a message takes."""
        self._dirty[key] = self._dirty.get(key, False) or late

    def claim_dropped(self, claim: Claim, *, late: bool = False) -> None:
        """Note that a view's claim went; a takeover of the request may be received later."""
        self._recent_blocks.keep(claim.key, claim.attempt_id, claim.reservation.block_hashes, self._clock())
        self.claim_changed(claim.key, late=late)

    def blocks_of(self, key: RequestKey, attempt_id: int, known: KnownBlocks) -> bytes:
        """Return hashes of an attempt that were received before, from any replica.

        Raises:
            UnknownBlocks: They are not here.
        """
        claims = (held.claim for held in self._claims(key))
        for hashes in (claim.reservation.block_hashes for claim in claims if claim.attempt_id == attempt_id):
            if known.fit(hashes):
                return hashes
        if known.fit(hashes := self._recent_blocks.get(key, attempt_id)):
            return hashes
        raise UnknownBlocks(key)

    def freed_by_caller(self, key: RequestKey, attempt_id: int) -> None:
        """End an attempt that its caller freed at another replica."""
        self._bookings.freed_remotely(key, attempt_id, self._clock())
        self.claim_changed(key)

    # Registry listener; comes after the scheduler's own.

    def worker_added(self, spec: WorkerSpec) -> None:
        """Place what waited for a worker."""
        self.registers.worker_added(spec)
        self._dirty.update(dict.fromkeys(self._unplaced.get((spec.tenant, spec.worker_id), {}), True))
        self.settle()

    def worker_updated(self, old: WorkerSpec, new: WorkerSpec) -> None:
        """Treat an update as an addition: the worker may serve another model now."""
        self.worker_added(new)

    def worker_removed(self, spec: WorkerSpec, reason: str) -> None:
        """Forget a worker, whose bookings have ended by now."""
        self.registers.worker_removed(spec)

    def _claims(self, key: RequestKey) -> Iterator[HeldClaim]:
        own = self.log.claims.get(key)
        if own is not None:
            yield HeldClaim(self.me, own)
        for of, view in self.views.items():
            claim = view.claims.get(key)
            if claim is not None:
                yield HeldClaim(of, claim)

    def _next_term(self, key: RequestKey) -> int:
        return 1 + max((held.claim.term for held in self._claims(key)), default=0)

    def _owner_since(self, owner: OwnerName | None) -> int:
        """Return the time at which an owner came to us, microseconds since the Unix epoch; 0 = it is not here.

        By its own clock, if it said so: a replica that was stopped reads messages that are long out of date.
        """
        if owner is None:
            return 0
        seconds = self._owners.connected(owner, self._clock())
        if not seconds:
            return 0
        return self._owners.opened_at(owner) or int((self._scheduler.wall_clock() - seconds) * MICROSECONDS)

    def _claim_booking(self, booking: Booking) -> None:
        self._claim(claim_of(booking, self._next_term(booking.key), self._owner_since(booking.owner)))

    def _insist(self, booking: Booking, held: HeldClaim | None) -> bool:
        """Claim a request of ours again that another beats or cancels, if its owner came to us last."""
        key, since = booking.key, self._owner_since(booking.owner)
        if not since or self._bookings.freed_by_caller(key, booking.reservation.attempt_id, self._clock()):
            return False
        if held is not None:
            insists = held.claim.attempt_id == booking.reservation.attempt_id and held.claim.owner_since < since
        else:
            freed = (each.claim for each in self._claims(key) if each.claim.state is ClaimState.FREED)
            insists = all(claim.attempt_id != booking.reservation.attempt_id for claim in freed)
        if insists:
            self._claim_booking(booking)
        return insists

    def _claim(self, claim: Claim) -> None:
        self._over.pop(claim.key, None)
        if claim.active:
            self._placed(claim.key)
        else:
            self._over[claim.key] = self._clock()
            self.claim_changed(claim.key)
        self._record(claim)

    def _record(self, claim: Claim) -> None:
        """Put a claim into the log, without hashes that others received with an earlier claim."""
        hashes = claim.reservation.block_hashes
        known = bool(hashes) and any(
            held.claim.attempt_id == claim.attempt_id and held.claim.reservation.block_hashes == hashes
            for held in self._claims(claim.key)
        )
        self.log.put(claim, known=known and self._may_leave_out())

    def _may_leave_out(self) -> bool:
        """Return whether all who follow us read claims without hashes; they are known soon after our start."""
        now = self._clock()
        return now - self._began_at >= SILENT_SECONDS and not any(v.needs_blocks(now) for v in self.views.values())

    def _end_remote(self, held: HeldClaim, reason: EndReason, now: float) -> None:
        claim = held.claim
        self._scheduler.stats.ended[reason] += 1
        log.warning(
            "booking of request %s (model %s, attempt %d) of silent replica %s ended: %s",
            claim.key.request_id,
            claim.key.model,
            claim.attempt_id,
            held.by.replica_id,
            reason,
        )
        self._claim(_over(claim, ClaimState.ENDED, claim.term + 1))

    def _resolve(self, key: RequestKey, *, late: bool) -> None:
        """Make our bookings what the claims say."""
        held, booking = self.holder(key), self._bookings.find(key)
        if booking is not None and not booking.mirror:
            if held is not None and held.by == self.me:
                return
            if self._insist(booking, held):
                return
            self._give_up(booking, held)
            booking = self._bookings.find(key)
        if held is None or held.by == self.me:
            self._placed(key)
            if booking is not None:
                self._bookings.remove_mirror(booking, self._clock())
            return
        claim = held.claim
        if self._bookings.freed_by_caller(key, claim.attempt_id, self._clock()):
            # Its caller freed it, and the replica that books it has not received that.
            self._claim(_over(claim, ClaimState.FREED, claim.term))
            return
        if booking is not None:
            if mirrors.adjust(booking, claim, self._bookings, self._clock(), late=late):
                return
            self._bookings.remove_mirror(booking, self._clock())
        mirror = mirrors.place(claim, self._scheduler.workers, self._clock(), late=late)
        if mirror is not None:
            self._bookings.add_mirror(mirror)
            self._placed(key)
        else:
            self._unplace(key, (key.tenant, claim.reservation.rank.worker_id))

    def _give_up(self, booking: Booking, held: HeldClaim | None) -> None:
        """Give up a claim of ours that is beaten."""
        key = booking.key
        if held is not None and (held.claim.attempt_id, held.claim.reservation.rank) == (
            booking.reservation.attempt_id,
            booking.reservation.rank,
        ):
            self._bookings.give_up(booking)
            self.log.drop(key)
            return
        self._yielding = True
        try:
            self._bookings.supersede(booking, self._clock())
        finally:
            self._yielding = False

    def _unplace(self, key: RequestKey, worker: tuple[str, str]) -> None:
        self._placed(key)
        self._unplaced.setdefault(worker, {})[key] = None
        self._unplaced_at[key] = worker

    def _placed(self, key: RequestKey) -> None:
        worker = self._unplaced_at.pop(key, None)
        if worker is not None:
            keys = self._unplaced[worker]
            del keys[key]
            if not keys:
                del self._unplaced[worker]


def _over(claim: Claim, state: ClaimState, term: int) -> Claim:
    return Claim(Reservation(claim.key, claim.attempt_id), term, state)
