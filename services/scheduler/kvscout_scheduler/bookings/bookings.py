"""All active requests, by name: who books, renews, frees, and what ends by itself.

Invariants
1. A booking is here, in its pool's load, in its slot's members, and either among the leases or with one owner, or it
   mirrors one of another replica (`journal`); or in none of them.
2. A name (tenant, model, role, request_id) has at most one booking; its attempt id says which call it answers.
3. What ended is remembered for a while (`attempts`), so that a second Free can say so and a booking call that comes
   after its own Free books nothing. Attempt 0 means that the caller does not distinguish attempts: its Frees cancel
   nothing that comes later.

Every method is atomic: it awaits nothing. Not thread-safe.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from kvscout_common.errors import AlreadyExists, Cancelled, FailedPrecondition, NotFound, ResourceExhausted
from kvscout_common.identity.tenant_limits import Limit, TenantLimits
from kvscout_scheduler.bookings.attempts import Ended, EndedAttempts
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.bookings.end_log import EndLog
from kvscout_scheduler.bookings.journal import Journal
from kvscout_scheduler.bookings.leases import Leases
from kvscout_scheduler.bookings.owners import Owners
from kvscout_scheduler.bookings.takeover import Takeover
from kvscout_scheduler.load.workers import MAX_ENDS
from kvscout_scheduler.values.reservation import End, EndReason, FreeOutcome, OwnerName, Phase, RequestKey
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.stats import SchedulerStats

if TYPE_CHECKING:
    from kvscout_scheduler.load.pool import Pool


class Bookings:
    """The active requests of a scheduler."""

    def __init__(self, settings: SchedulerSettings, stats: SchedulerStats, limits: TenantLimits | None = None) -> None:
        self._settings = settings
        self._stats = stats
        self._active: dict[RequestKey, Booking] = {}
        self._by_tenant: defaultdict[str, int] = defaultdict(int)
        self._limits = limits if limits is not None else TenantLimits()
        self._limits.use[Limit.BOOKINGS] = lambda: self._by_tenant
        self._members: dict[tuple[Pool, int], dict[Booking, None]] = {}
        self._leases = Leases()
        self.owners = Owners(settings.owner_grace_seconds)
        self._attempts = EndedAttempts(settings.tombstone_seconds, settings.max_tombstones)
        self.end_log = EndLog()
        self.tenants = 0
        """Tenants that have workers."""
        self.journal = Journal()
        """Receives every change."""

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Booking]:
        return iter(self._active.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._active

    def find(self, key: RequestKey) -> Booking | None:
        """Return the booking of a name."""
        return self._active.get(key)

    def admit(self, key: RequestKey, attempt_id: int, now: float) -> Booking | None:
        """Check that a request may be booked.

        Returns:
            The booking that this very attempt has already, its lease renewed, to be answered again; else None.

        Raises:
            AlreadyExists: Another attempt of the request is active.
            Cancelled: This attempt was freed already.
            ResourceExhausted: There are too many active requests, or too many of the tenant: by its own limit, or
                while others have workers.
        """
        active = self._active.get(key)
        if active is not None:
            if active.reservation.attempt_id != attempt_id:
                raise AlreadyExists(
                    f"request {key.request_id!r} is active under attempt {active.reservation.attempt_id}"
                )
            self._own(active, now)
            self.owners.remember(active)
            active.answers += 1
            self._renew(active, now)
            return active
        if attempt_id and self._attempts.get(key, attempt_id, now) in (Ended.BY_CALLER, Ended.BEFORE_BOOKING):
            raise Cancelled(f"attempt {attempt_id} of request {key.request_id!r} was freed before it was booked")
        if len(self._active) >= self._settings.max_active_requests:
            raise ResourceExhausted(f"{len(self._active)} requests are active (limit)", retry_after_seconds=1.0)
        booked = self._by_tenant.get(key.tenant, 0)
        self._limits.require(Limit.BOOKINGS, key.tenant, booked)
        share = max(1, int(self._settings.max_active_requests * self._settings.tenant_share))
        if self.tenants > 1 and booked >= share:
            raise ResourceExhausted(
                f"{share} requests of tenant {key.tenant!r} are active (its share of the limit)",
                retry_after_seconds=1.0,
            )
        return None

    def add(self, booking: Booking, *, owner: OwnerName | None = None, lease_seconds: float = 0.0) -> None:
        """Add a booking that `admit` let in.

        Args:
            booking: Its load is in its pool already.
            owner: Its owner; None = it has a lease instead.
            lease_seconds: 0 = the default.
        """
        self._put_in(booking)
        reservation = booking.reservation
        self._attempts.forget(reservation.key, reservation.attempt_id)
        booking.lease_seconds = float(lease_seconds or self._settings.lease_seconds)
        if owner is not None:
            self.owners.add(booking, owner, booking.booked_at)
        else:
            self._leases.set(booking, booking.booked_at + booking.lease_seconds)
        self._stats.bookings += 1
        self.journal.booked(booking)

    def complete_prefill(self, key: RequestKey, attempt_id: int, now: float, age_seconds: float = 0.0) -> bool:
        """End a request's prefill phase, which was over some seconds ago; False = that was known.

        Raises:
            NotFound: This attempt is not active.
        """
        booking = self._called(key, attempt_id, now)
        if booking.phase is Phase.DECODE:
            return False
        self.decode(booking, now, age_seconds)
        self.journal.changed(booking)
        return True

    def estimate_prefill(self, key: RequestKey, now: float) -> None:
        """End the prefill phase of one of our bookings of which nobody reports that it is over; else a no-op."""
        booking = self._active.get(key)
        if (
            booking is None
            or booking.mirror
            or booking.phase is Phase.DECODE
            or not booking.reservation.estimates_prefill
        ):
            return
        self.decode(booking, now)
        self.journal.changed(booking)

    def decode(self, booking: Booking, now: float, age_seconds: float = 0.0) -> None:
        """Begin the decode phase of a booking: its first token is out, or should be, where nobody reports it."""
        booking.phase = Phase.DECODE
        began_at = max(booking.booked_at, now - age_seconds)
        booking.first_token_at = None if booking.reservation.estimates_prefill else began_at
        booking.pool.complete_prefill(booking.allocation)
        for observer in booking.pool.observers:
            observer.prefill_completed(booking.reservation, began_at - booking.booked_at, now)

    def ran_before(self, booking: Booking) -> None:
        """Note that a booking began before it was reported here, or that its progress was not reported in time:
        nothing is to be learned from how long it takes."""
        if not booking.reservation.running:
            booking.reservation = booking.reservation._replace(running=True)

    def add_output(self, key: RequestKey, attempt_id: int, blocks: int, now: float) -> int:
        """Add generated blocks to a request; returns its output blocks in all.

        Raises:
            FailedPrecondition: Output is not tracked.
            NotFound: This attempt is not active.
        """
        if not self._settings.track_output_blocks:
            raise FailedPrecondition("output blocks are not tracked (--router-track-output-blocks)")
        booking = self._called(key, attempt_id, now)
        booking.output_blocks += blocks
        booking.pool.load.add_private(booking.allocation, blocks)
        self.journal.changed(booking)
        return booking.output_blocks

    def free(
        self, key: RequestKey, attempt_id: int, now: float, output_tokens: int = 0, age_seconds: float = 0.0
    ) -> FreeOutcome:
        """Release all that an attempt holds, whatever its phase; a no-op if it holds nothing."""
        booking = self._find(key, attempt_id)
        if booking is not None:
            self._own(booking, now)
            self._end(booking, Ended.BY_CALLER, now, output_tokens, age_seconds)
            self._stats.freed += 1
            return FreeOutcome.FREED
        ended = self._attempts.get(key, attempt_id, now)
        if ended in (None, Ended.BY_US):
            self.journal.freed_unknown(key, attempt_id)
        if ended in (Ended.BY_CALLER, Ended.BY_US):
            if ended is Ended.BY_US and attempt_id:
                self._attempts.add(key, attempt_id, Ended.BY_CALLER, now)
            return FreeOutcome.ALREADY_FREED
        if attempt_id and ended is None:
            self._attempts.add(key, attempt_id, Ended.BEFORE_BOOKING, now)
        return FreeOutcome.UNKNOWN

    def renew(self, key: RequestKey, attempt_id: int, now: float, lease_seconds: float = 0.0) -> bool:
        """Renew a lease, from now, for another time if one is given; False = this attempt is not active."""
        booking = self._find(key, attempt_id)
        if booking is None:
            return False
        self._own(booking, now)
        if lease_seconds:
            booking.lease_seconds = float(lease_seconds)
        self._renew(booking, now)
        self.journal.changed(booking)
        return True

    def undelivered(self, key: RequestKey, attempt_id: int, now: float) -> bool:
        """Take back a booking whose answer was lost, unless a repeated call got it; whether the booking ended."""
        booking = self._find(key, attempt_id)
        if booking is None or booking.mirror:
            return False
        booking.answers -= 1
        if booking.answers > 0:
            return False
        self._expire(booking, EndReason.UNDELIVERED, now)
        self.end_log.flush()
        return True

    def begin_takeover(
        self,
        owner: OwnerName,
        in_flight: Iterable[tuple[RequestKey, int]],
        *,
        now: float,
        opened_at: int,
        wall_now: float,
        on_end: Callable[[], None],
    ) -> Takeover:
        """Open a stream of an owner, who lists what it has in flight.

        Listed bookings of unary callers become its own, and those of other replicas ours. Those of the owner that it
        does not list end, after all that it lists.

        Raises:
            FailedPrecondition: A stream that the owner opened later is open, see `Owners.connect`.
        """
        session = self.owners.connect(owner, now, opened_at, wall_now)
        return Takeover(self, owner, session, in_flight, on_end)

    def take_listed(self, key: RequestKey, attempt_id: int, owner: OwnerName, now: float) -> bool:
        """Give a request to the owner that lists it; False = it is not active, or has another owner."""
        active = self._find(key, attempt_id)
        if active is None or active.owner not in (None, owner):
            return False
        if active.phase is Phase.PREFILL:
            # What was said of it while there was no stream is said again now.
            self.ran_before(active)
        self._own(active, now)
        if active.lease_bucket is not None:
            self._leases.clear(active)
            self.owners.add(active, owner, now)
            self.journal.changed(active)
        else:
            self.owners.remember(active)
        return True

    def forget_unlisted(self, owner: OwnerName, now: float) -> None:
        """End what an owner had and has not listed, `MAX_ENDS` of it now and the rest with `expire`."""
        self.owners.forget(owner)
        if self._expire_all(self.owners.forgotten(MAX_ENDS), EndReason.OWNER_FORGOT, now) < MAX_ENDS:
            self.end_log.flush()

    def expire(self, now: float, limit: int) -> int:
        """End bookings whose lease or whose owner's grace time is over, `limit` at most; forget old attempts. Returns
        bookings that ended."""
        ended = self._expire_all(self.owners.forgotten(limit), EndReason.OWNER_FORGOT, now)
        ended += self._expire_all(self._leases.expired(now, limit - ended), EndReason.LEASE, now)
        ended += self._expire_all(self.owners.expired(now, limit - ended), EndReason.OWNER_GONE, now)
        self._attempts.expire(now)
        return ended

    def drop_slot(self, pool: Pool, slot: int, reason: EndReason, now: float, limit: int) -> int:
        """End bookings on a worker rank that is gone.

        Args:
            pool: Of the worker.
            slot: Its slot.
            reason: Why.
            now: On the scheduler's clock.
            limit: How many.

        Returns:
            Bookings that ended.
        """
        members = list(islice(self._members.get((pool, slot), ()), limit))
        for booking in members:
            if booking.mirror:
                self.remove_mirror(booking, now)
                self.journal.displaced(booking)
            else:
                self._expire(booking, reason, now)
        return len(members)

    def add_mirror(self, booking: Booking) -> None:
        """Add a booking that another replica owns; its load is in its pool already."""
        booking.mirror = True
        self._put_in(booking)

    def remove_mirror(self, booking: Booking, now: float) -> None:
        """Take a mirror out, with its load."""
        self._take_out(booking, now, freed=False)

    def give_up(self, booking: Booking) -> None:
        """Make a booking of ours a mirror: another replica has taken it over."""
        self._leases.clear(booking)
        self.owners.drop(booking)
        booking.mirror = True

    def freed_remotely(self, key: RequestKey, attempt_id: int, now: float) -> None:
        """End an attempt that its caller freed at another replica; no copy of its call books any more."""
        if not attempt_id:
            return
        booking = self._find(key, attempt_id)
        if booking is not None and not booking.mirror:
            self._end(booking, Ended.BY_CALLER, now)
            self._stats.freed += 1
        self._attempts.add(key, attempt_id, Ended.BY_CALLER, now)

    def freed_by_caller(self, key: RequestKey, attempt_id: int, now: float) -> bool:
        """Return whether an attempt was freed by its caller, here or at another replica."""
        return bool(attempt_id) and self._attempts.get(key, attempt_id, now) in (Ended.BY_CALLER, Ended.BEFORE_BOOKING)

    def flush_log(self) -> None:
        """Log the bookings that ended by themselves, one line a cause."""
        self.end_log.flush()

    def supersede(self, booking: Booking, now: float) -> None:
        """End a booking of ours, for another replica has booked or ended the request."""
        self._expire(booking, EndReason.SUPERSEDED, now)
        self.end_log.flush()

    def _find(self, key: RequestKey, attempt_id: int) -> Booking | None:
        booking = self._active.get(key)
        return booking if booking is not None and booking.reservation.attempt_id == attempt_id else None

    def _called(self, key: RequestKey, attempt_id: int, now: float) -> Booking:
        """Return the booking of an attempt that its caller has news of: ours from now on, its lease renewed."""
        booking = self._active.get(key)
        if booking is None:
            raise NotFound(f"request {key.request_id!r} of model {key.model!r} is not active")
        if booking.reservation.attempt_id != attempt_id:
            raise NotFound(f"request {key.request_id!r} is active, but under attempt {booking.reservation.attempt_id}")
        self._own(booking, now)
        self._renew(booking, now)
        return booking

    def _own(self, booking: Booking, now: float) -> None:
        """Take over a mirror, before it is written to. Its owner holds it; one that is not connected here counts as
        gone from now. If it is well and connected to another replica, that one claims the request again."""
        if not booking.mirror:
            return
        booking.mirror = False
        if booking.phase is Phase.PREFILL:
            # Its caller repeats here what it has sent, or could not send, to another replica before.
            self.ran_before(booking)
        # That of the replica that booked it: what comes of a call here ends nothing that runs.
        booking.answers = 1
        if booking.owner is not None:
            self.owners.add(booking, booking.owner, now)
        else:
            self._leases.set(booking, now + booking.lease_seconds)
        self.journal.taken_over(booking)

    def _renew(self, booking: Booking, now: float) -> None:
        if booking.expires_at < inf:
            self._leases.set(booking, now + booking.lease_seconds)

    def _expire_all(self, overdue: list[Booking], reason: EndReason, now: float) -> int:
        for booking in overdue:
            self._expire(booking, reason, now)
        return len(overdue)

    def _expire(self, booking: Booking, reason: EndReason, now: float) -> None:
        self._end(booking, Ended.BY_US, now)
        self._stats.ended[reason] += 1
        self.end_log.add(booking, reason, now)

    def _end(self, booking: Booking, how: Ended, now: float, output_tokens: int = 0, age_seconds: float = 0.0) -> None:
        if booking.lease_bucket is not None:
            self._leases.clear(booking)
        if booking.owner is not None:
            self.owners.drop(booking)
        freed, reservation = how is Ended.BY_CALLER, booking.reservation
        self._take_out(booking, now, freed=freed, output_tokens=output_tokens, age_seconds=age_seconds)
        self._attempts.add(reservation.key, reservation.attempt_id, how, now)
        self.journal.ended(booking, by_caller=freed)

    def _put_in(self, booking: Booking) -> None:
        key = booking.reservation.key
        self._active[key] = booking
        self._by_tenant[key.tenant] += 1
        self._members.setdefault((booking.pool, booking.allocation.slot), {})[booking] = None
        for observer in booking.pool.observers:
            observer.booked(booking.reservation, booking.booked_at)

    def _take_out(
        self, booking: Booking, now: float, *, freed: bool, output_tokens: int = 0, age_seconds: float = 0.0
    ) -> None:
        key = booking.reservation.key
        del self._active[key]
        self._by_tenant[key.tenant] -= 1
        if not self._by_tenant[key.tenant]:
            del self._by_tenant[key.tenant]
        place = (booking.pool, booking.allocation.slot)
        members = self._members[place]
        del members[booking]
        if not members:
            del self._members[place]
        booking.pool.release(booking.allocation)
        if booking.pool.observers:
            since = None if booking.reservation.running else booking.first_token_at
            end = End(freed, output_tokens, 0.0 if since is None else max(0.0, now - age_seconds - since))
            for observer in booking.pool.observers:
                observer.ended(booking.reservation, end, now)
