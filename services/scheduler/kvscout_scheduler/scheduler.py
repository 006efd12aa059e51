"""The scheduler: one atomic decision after the other, over workers, load and bookings.

No method awaits, so that on one event loop every call sees the state that the one before it left: two clients never
decide on the same load. The clock and the random generator are passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random

from kvscout_common.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidArgument,
    KvscoutError,
    ResourceExhausted,
)
from kvscout_common.identity.tenant_limits import TenantLimits
from kvscout_common.observability.warnings import TenantWarning
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.bookings.booking import Booking
from kvscout_scheduler.bookings.bookings import Bookings
from kvscout_scheduler.bookings.journal import MAX_HASHED_BLOCKS
from kvscout_scheduler.bookings.takeover import Takeover
from kvscout_scheduler.estimates.engine_metrics import EngineMetrics
from kvscout_scheduler.load.active_load import MakeLoad
from kvscout_scheduler.load.cool_downs import CoolDowns
from kvscout_scheduler.load.pool import Pool
from kvscout_scheduler.load.workers import MAX_ENDS, Workers
from kvscout_scheduler.policies import PolicyRegistry, installed_policies
from kvscout_scheduler.policies.decision_feed import DecisionFeed
from kvscout_scheduler.policies.headroom import Shed
from kvscout_scheduler.policies.selection import Selection, Selector
from kvscout_scheduler.queue.admission import Admission
from kvscout_scheduler.queue.remote_queues import RemoteQueues
from kvscout_scheduler.queue.shedding import Shedding
from kvscout_scheduler.queue.waiting import RETRY_SECONDS, Answer, Waiter, WaitingQueues
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.operations import (
    AddOutput,
    CompletePrefill,
    Free,
    Operation,
    Outcome,
    Renew,
    Reserve,
    Select,
)
from kvscout_scheduler.values.request import Prompt, SelectionRequest
from kvscout_scheduler.values.reservation import (
    HASH_BYTES,
    MAX_LEASE_SECONDS,
    Choice,
    FreeOutcome,
    OwnerName,
    Phase,
    PoolId,
    RequestKey,
    Reservation,
    lineage_of,
)
from kvscout_scheduler.values.settings import SchedulerSettings
from kvscout_scheduler.values.stats import SchedulerStats
from kvscout_scheduler.values.thresholds import ThresholdTable


class Scheduler:
    """Picks workers, books requests on them, and knows what is active.

    Args:
        settings: Checked here.
        clock: Monotonic seconds.
        rng: For ties and temperatures.
        policies: None = this package's and those of installed packages.
        wall_clock: Seconds since the Unix epoch, for those who watch, and between replicas.
        limits: What tenants may have.
        make_load: Makes the load of a pool; None = the native backend where the extension is built and not switched
        off.

    Raises:
        ConfigError: A setting is out of range.
        InvalidArgument: The policy in the settings is unknown.
    """

    def __init__(
        self,
        settings: SchedulerSettings = SchedulerSettings(),
        *,
        clock: Callable[[], float],
        rng: Random,
        policies: PolicyRegistry | None = None,
        wall_clock: Callable[[], float] = time.time,
        limits: TenantLimits | None = None,
        make_load: MakeLoad | None = None,
    ) -> None:
        self.settings = settings.validate()
        self.policies = installed_policies() if policies is None else policies
        self.stats = SchedulerStats()
        self.thresholds = ThresholdTable(settings.thresholds)
        self.bookings = Bookings(settings, self.stats, limits)
        self.waiting = WaitingQueues(settings.queue_limit, settings.queue_order)
        if make_load is None:
            # A caller that chooses a backend need not load the extension.
            from kvscout_scheduler.load import native

            make_load = native.make_load
        self._make_load = make_load
        self._selector = Selector(settings, self.policies, rng)
        self.workers = Workers(settings, self.bookings, clock, self._make_pool)
        """A registry listener."""
        self.remote_queues = RemoteQueues()
        self._shedding = Shedding(settings, self.waiting, self.workers, clock)
        self._admission = Admission(
            self.workers, self.thresholds, self.waiting, self._book_waiter, self.remote_queues, self._refuse_late
        )
        self.cool_downs = CoolDowns(settings, self.workers, clock, self.pump)
        self.draining = False
        self.queues_requests = settings.queue_threshold is not None
        """True: requests wait while no worker has room."""
        self.decision_feed = DecisionFeed(wall_clock)
        self.clock = clock
        self.wall_clock = wall_clock

    def apply(self, operation: Operation, owner: OwnerName | None = None) -> Outcome:
        """Carry out an operation that does not wait in the queue; an error is its outcome.

        Args:
            operation: An operation of a caller.
            owner: Owner of what it books; None = a unary caller, who has a lease.
        """
        try:
            match operation:
                case Select(request, books, lease_seconds):
                    if not books:
                        return self.select(request)
                    return self.select_and_reserve(request, owner=owner, lease_seconds=lease_seconds)
                case CompletePrefill(key, attempt_id, age_seconds):
                    return self.mark_prefill_complete(key, attempt_id, age_seconds=age_seconds)
                case Free(key, attempt_id, output_tokens, age_seconds):
                    return self.free(key, attempt_id, output_tokens=output_tokens, age_seconds=age_seconds)
                case Reserve(reservation, lease_seconds):
                    return self.reserve(reservation, owner=owner, lease_seconds=lease_seconds)
                case AddOutput(key, attempt_id, blocks):
                    return self.add_output(key, blocks, attempt_id)
                case Renew(attempts, lease_seconds):
                    renewed = [self.renew(*attempt, lease_seconds=lease_seconds) for attempt in attempts]
                    return [place for place, active in enumerate(renewed) if not active]
        except KvscoutError as error:
            return error

    def select(self, request: SelectionRequest) -> Decision:
        """Pick a worker and book nothing.

        Raises:
            InvalidArgument: A field of the request is wrong; it is named.
            NotFound: The model was never seen, or the pinned worker does not exist.
            Unavailable: No worker can take the request now, or the scheduler drains.
            FailedPrecondition: No worker has the labels or the adapter, or the hashes are of another block size.
            ResourceExhausted: All that could take it are busy.
        """
        self._selector.check(request)
        return self._select(request, self.clock(), books=False).decision

    def select_and_reserve(
        self, request: SelectionRequest, *, owner: OwnerName | None = None, lease_seconds: float = 0.0
    ) -> Decision:
        """Pick a worker and book the request on it, in one step.

        The same attempt called again gets its first answer, without the explanation, and nothing more is booked.

        Args:
            request: With a request id.
            owner: Whose it is; None = a unary caller, who has a lease.
            lease_seconds: Length of the lease; 0 = the default.

        Raises:
            AlreadyExists: The request id is active under another attempt, or was reserved without choosing.
            Cancelled: This attempt was freed already.
            KvscoutError: As `select`.
        """
        self._check(request, lease_seconds)
        return self._reserve(request, request.key, self.clock(), owner, lease_seconds)

    def _reserve(
        self, request: SelectionRequest, key: RequestKey, now: float, owner: OwnerName | None, lease_seconds: float
    ) -> Decision:
        """Select and reserve for a checked request."""
        active = self.bookings.admit(key, request.attempt_id, now)
        if active is not None:
            answer = active.answer
            if answer is None:
                active.answers -= 1
                raise AlreadyExists(f"request {key.request_id!r} was reserved without choosing")
            return answer
        decision, pool, slot, prompt, *_ = self._select(request, now, books=True)
        reservation = Reservation(
            key,
            request.attempt_id,
            decision.rank,
            request.isl_tokens,
            decision.uncached_tokens,
            request.expected_output_tokens,
            b"",
            Choice(decision.policy, decision.overlap_blocks, decision.effective_overlap_blocks, decision.cost),
            request.max_output_tokens,
            request.output_class,
            prompt.lineage(pool.format_of[slot].block_size),
            request.estimates_prefill,
            session=decision.session,
        )
        self._book(reservation, prompt.block_hashes, pool, slot, owner=owner, lease_seconds=lease_seconds, now=now)
        if request.charge_prefill:
            pool.hits[slot].count(reservation)
        return decision

    def reserve_or_wait(
        self, request: SelectionRequest, answer: Answer, *, owner: OwnerName | None = None, lease_seconds: float = 0.0
    ) -> Waiter | None:
        """Select and reserve as `select_and_reserve`, or queue the request while all workers have prefill work enough.

        Args:
            request: With a request id.
            answer: Receives the decision or the error, now or later, once. A receiver of a later decision that
                nobody wants any more calls `undelivered`.
            owner: As of `select_and_reserve`.
            lease_seconds: As of `select_and_reserve`.

        Returns:
            Its place in the queue, for whoever does not want to wait any more; None = `answer` was called.

        Raises:
            KvscoutError: As `select_and_reserve`, if it is decided now; and ResourceExhausted: the queue is full.
        """
        self._check(request, lease_seconds)
        key, now = request.key, self.clock()
        try:
            if not self.queues_requests or key in self.bookings or not self._must_wait(request, key, now):
                answer(self._reserve(request, key, now, owner, lease_seconds))
                return None
            # Who was freed already must not wait for nothing.
            self.bookings.admit(key, request.attempt_id, now)
            waiter = self._waiter(request, answer, owner, lease_seconds, now)
            self.waiting.join(waiter)
        except ResourceExhausted as error:
            if error.retry_after_seconds is None and self.waiting.length(request.pool):
                error.retry_after_seconds = RETRY_SECONDS
            raise
        self.stats.queued += 1
        return waiter

    def reserve(self, reservation: Reservation, *, owner: OwnerName | None = None, lease_seconds: float = 0.0) -> int:
        """Book a request on a given worker, whatever its load; one that is `prefilled` begins in its decode phase.

        Args:
            reservation: What to book, and where.
            owner: Whose it is; None = a unary caller, who has a lease.
            lease_seconds: Length of the lease; 0 = the default.

        Returns:
            Prompt tokens that were not cached.

        Raises:
            InvalidArgument: A field is wrong; it is named.
            NotFound: Unknown model or worker.
            Unavailable: The model has no worker of the role now, or the scheduler drains.
            AlreadyExists: The id is active under another attempt, or on another worker.
            Cancelled: This attempt was freed already.
        """
        reservation.validate()
        key, rank = reservation.key, reservation.rank
        _check_booking(key.request_id, reservation.attempt_id, lease_seconds)
        now = self.clock()
        active = self.bookings.admit(key, reservation.attempt_id, now)
        if active is not None:
            if active.reservation.rank != rank:
                active.answers -= 1
                raise AlreadyExists(f"request {key.request_id!r} is active on {active.reservation.rank.worker_id!r}")
            if reservation.running:
                self.bookings.ran_before(active)
            if reservation.prefilled and self.bookings.complete_prefill(key, reservation.attempt_id, now):
                self._relieved(key, now)
            return active.reservation.uncached_tokens
        self._require_open()
        pool = self.workers.pool(key.pool)
        home, slot = self.workers.slot(key.tenant, rank)
        if home is not pool:
            raise InvalidArgument(f"{rank.worker_id!r} is not a worker of this model and role", field="worker")
        Prompt(reservation.block_hashes).validate(reservation.isl_tokens, pool.format_of[slot].block_size)
        lineage = lineage_of(reservation.block_hashes, pool.format_of[slot].block_size)
        kept = reservation._replace(block_hashes=b"", lineage=lineage)
        self._book(kept, reservation.block_hashes, pool, slot, owner=owner, lease_seconds=lease_seconds, now=now)
        pool.hits[slot].count(reservation)
        return reservation.uncached_tokens

    def mark_prefill_complete(self, key: RequestKey, attempt_id: int = 0, *, age_seconds: float = 0.0) -> bool:
        """Note that the first token is out, since some seconds; return False if that was known.

        Raises:
            NotFound: This attempt is not active.
        """
        now = self.clock()
        changed = self.bookings.complete_prefill(key, attempt_id, now, age_seconds)
        self._relieved(key, now)
        return changed

    def add_output(self, key: RequestKey, blocks: int, attempt_id: int = 0) -> int:
        """Add generated blocks to a request's load; returns its output blocks in all.

        Raises:
            InvalidArgument: Blocks below 1.
            NotFound: This attempt is not active.
            FailedPrecondition: Output is not tracked.
        """
        if blocks < 1:
            raise InvalidArgument("must be at least 1", field="blocks")
        return self.bookings.add_output(key, attempt_id, blocks, self.clock())

    def free(
        self, key: RequestKey, attempt_id: int = 0, *, output_tokens: int = 0, age_seconds: float = 0.0
    ) -> FreeOutcome:
        """Release all that an attempt holds; implies prefill complete. Unknown or repeated: a no-op that says so.

        Args:
            key: The request.
            attempt_id: Its attempt.
            output_tokens: That it had, for policies that learn; 0 = unknown.
            age_seconds: Seconds since it ended.
        """
        now = self.clock()
        waiter = self.waiting.find(key, attempt_id) if self.queues_requests else None
        if waiter is not None:
            self.waiting.leave(waiter)
            # There is none, and none may come.
            self.bookings.free(key, attempt_id, now)
            waiter.answer(Cancelled(f"request {key.request_id!r} was freed while it waited"))
            return FreeOutcome.DEQUEUED
        outcome = self.bookings.free(key, attempt_id, now, output_tokens, age_seconds)
        self._relieved(key, now)
        return outcome

    def renew(self, key: RequestKey, attempt_id: int = 0, *, lease_seconds: float = 0.0) -> bool:
        """Renew a lease; False = this attempt is not active.

        Raises:
            InvalidArgument: A lease out of range.
        """
        _check_booking(key.request_id, attempt_id, lease_seconds)
        return self.bookings.renew(key, attempt_id, self.clock(), lease_seconds)

    def undelivered(self, key: RequestKey, attempt_id: int = 0) -> bool:
        """Take back a booking whose answer the caller did not get, unless a repeated call got it."""
        now = self.clock()
        ended = self.bookings.undelivered(key, attempt_id, now)
        self._relieved(key, now)
        return ended

    def begin_takeover(
        self, owner: OwnerName, in_flight: Iterable[tuple[RequestKey, int]], opened_at: int = 0
    ) -> Takeover:
        """Open an owner's stream, and begin to look at what it lists; see `Takeover`.

        Raises:
            FailedPrecondition: A stream that it opened later is open.
        """
        return self.bookings.begin_takeover(
            owner, in_flight, now=self.clock(), opened_at=opened_at, wall_now=self.wall_clock(), on_end=self.pump
        )

    def connect_owner(
        self, owner: OwnerName, in_flight: Iterable[tuple[RequestKey, int]], opened_at: int = 0
    ) -> tuple[int, list[tuple[RequestKey, int]]]:
        """Take over as `begin_takeover`, all in one go; return the session, and the listed requests that are not the
        owner's here.

        Raises:
            FailedPrecondition: A stream that it opened later is open.
        """
        takeover = self.begin_takeover(owner, in_flight, opened_at)
        while not takeover.advance(self.clock()):
            pass
        return takeover.session, takeover.unknown

    def disconnect_owner(self, owner: OwnerName, session: int, *, silent_seconds: float = 0.0) -> None:
        """End an owner's stream; its bookings end after the grace time unless it comes back.

        Args:
            owner: Whose.
            session: Of the stream.
            silent_seconds: Seconds since its last message: that much of the grace time is over.
        """
        self.bookings.owners.disconnect(owner, session, self.clock() - silent_seconds)

    def expire(self) -> int:
        """End what is overdue, `MAX_ENDS` bookings at most; to be called every second or so, and soon again if it
        ended as many. Returns bookings that ended."""
        now = self.clock()
        for pool in self.workers:
            self._estimate_prefills(pool, now)
            pool.recover(now)
            pool.forget_metrics(now - self.settings.engine_metrics_seconds)
            pool.sessions.forget_old(now)
        self._admission.refuse_late(now)
        ended = self.bookings.expire(now, MAX_ENDS)
        ended += self.workers.expire(now, MAX_ENDS - ended)
        self.pump()
        return ended

    def drain(self) -> None:
        """Take no more selections and bookings; what is active goes on, what waits is refused."""
        self.draining = True
        for waiter in list(self.waiting):
            self.waiting.leave(waiter)
            waiter.answer(Draining("the scheduler is draining"))

    def pump(self) -> None:
        """Book requests that wait and have room now, after load went away by another way than a call."""
        now = self.clock()
        for pool in self.waiting.pools:
            self._admission.admit_waiting(pool, now)

    def resume(self) -> None:
        """Book requests that left vacancies to other replicas for long enough; to be called every tick."""
        self._admission.resume(self.clock())

    def report_metrics(self, tenant: str, rank: WorkerRank, metrics: EngineMetrics) -> None:
        """Take what an engine says of itself; replaces what it said before.

        Raises:
            InvalidArgument: A value is out of range; it is named.
            NotFound: Unknown worker.
        """
        pool, slot = self.workers.slot(tenant, rank)
        now = self.clock()
        pool.report(slot, metrics.validate(), now)
        self._admission.admit_waiting(pool.id, now)

    def _make_pool(self, pool_id: PoolId) -> Pool:
        pool = Pool(pool_id, self._make_load, self.settings)
        self._selector.begin(pool)
        return pool

    def _select(self, request: SelectionRequest, now: float, *, books: bool) -> Selection:
        try:
            self._require_open()
            if request.deadline_seconds <= 0:
                raise DeadlineExceeded("its deadline has passed")
            pool = self.workers.pool(request.pool)
            self._estimate_prefills(pool, now)
            pool.judge(self.thresholds.get(request.tenant, request.model))
            watched = self.decision_feed.explain(request)
            selected = self._selector.select(pool, request, now, books=books, explains=watched)
        except KvscoutError as error:
            if isinstance(error, Shed):
                self._shedding.delay_retry(request, error)
            self._refused(request, error)
            raise
        self.decision_feed.record(request, selected.decision)
        self.stats.over_target += selected.over_target and books
        if books and selected.revision.meant is not None:
            self.stats.revisions[selected.revision.meant, selected.revision.taken] += 1
        if watched and not request.explain:
            selected = selected._replace(decision=replace(selected.decision, explanation=None))
        self.stats.decisions[selected.decision.policy] += 1
        pool.decisions += 1
        return selected

    def _must_wait(self, request: SelectionRequest, key: RequestKey, now: float) -> bool:
        """Return whether a request has to wait; one that need not takes the place of an earlier call of it.

        Raises:
            KvscoutError: No worker could take it at all; as `select`.
        """
        try:
            self._require_open()
            pool = self.workers.pool(key.pool)
            self._estimate_prefills(pool, now)
            self._admission.admit_waiting(pool.id, now)
            if self._admission.must_wait(request, now):
                return True
        except KvscoutError as error:
            self._refused(request, error)
            raise
        earlier = self.waiting.find(key, request.attempt_id)
        if earlier is not None and self.waiting.leave(earlier):
            earlier.answer(Cancelled("a repeated call of the same attempt went in its place"))
        return key in self.waiting

    def _estimate_prefills(self, pool: Pool, now: float) -> None:
        """End the prefill phase of those that should be through with it, where nobody reports it."""
        while pool.times.due_at <= now:
            for key in pool.times.over(now):
                self.bookings.estimate_prefill(key, now)

    def _waiter(
        self, request: SelectionRequest, answer: Answer, owner: OwnerName | None, lease_seconds: float, now: float
    ) -> Waiter:
        """Return a request that is to wait.

        Raises:
            Shed: It may be shed, and those before it take longer than its target.
        """
        pool = self.workers.pool(request.pool)
        block_format, prompt = next(
            iter(pool.prompts(request.prompt, request.other_prompts, request.isl_tokens).items())
        )
        seconds = pool.times.alone_seconds(request, prompt, block_format.block_size, now)
        waiter = Waiter(request, answer, owner, lease_seconds, now, seconds, now + request.deadline_seconds)
        try:
            self._shedding.limit(waiter)
        except Shed as shed:
            self._refused(request, shed)
            raise
        return waiter

    def _refuse_late(self, waiter: Waiter, now: float) -> None:
        """Refuse a request whose time in the queue is over."""
        error = self._shedding.late(waiter, now)
        self._refused(waiter.request, error)
        waiter.answer(error)

    def _book_waiter(self, waiter: Waiter, now: float) -> bool:
        """Book a request that waited, and answer it; False = it was refused."""
        request = replace(
            waiter.request,
            waited_seconds=now - waiter.since,
            deadline_seconds=waiter.request.deadline_seconds + waiter.joined - now,
        )
        try:
            decision = self._reserve(request, request.key, now, waiter.owner, waiter.lease_seconds)
        except KvscoutError as error:
            waiter.answer(error)
            return False
        except Exception:
            # It is out of the queue: without this it would wait for ever.
            waiter.answer(InternalError("the scheduler failed to book it"))
            raise
        else:
            self.stats.queue_waits.observe(now - waiter.since)
            waiter.answer(decision)
            return True

    def _relieved(self, key: RequestKey, now: float) -> None:
        """Book requests that waited for the room that a request has given back."""
        if self.queues_requests and len(self.waiting):
            self._admission.admit_waiting(key.pool, now)

    def _check(self, request: SelectionRequest, lease_seconds: float) -> None:
        self._selector.check(request)
        _check_booking(request.request_id, request.attempt_id, lease_seconds)

    def warnings(self) -> list[TenantWarning]:
        """Return warnings for operators."""
        return [*self.workers.warnings(), *self._shedding.warnings()]

    def _refused(self, request: SelectionRequest, error: KvscoutError) -> None:
        self.stats.refusals[type(error).__name__] += 1
        if isinstance(error, Shed):
            self._shedding.record(request)
        self.decision_feed.record(request, error)

    def _require_open(self) -> None:
        if self.draining:
            raise Draining("the scheduler is draining")

    def _book(
        self,
        reservation: Reservation,
        block_hashes: bytes,
        pool: Pool,
        slot: int,
        *,
        owner: OwnerName | None,
        lease_seconds: float,
        now: float,
    ) -> None:
        if self.bookings.journal.replicated:
            block_hashes = block_hashes[: MAX_HASHED_BLOCKS * HASH_BYTES]
            if pool.load.track_blocks:
                reservation = reservation._replace(block_hashes=block_hashes)
        allocation = pool.place(slot, reservation, block_hashes, now=now, prefill=not reservation.prefilled)
        booking = Booking(
            reservation, pool, allocation, now, phase=Phase.DECODE if reservation.prefilled else Phase.PREFILL
        )
        self.bookings.add(booking, owner=owner, lease_seconds=lease_seconds)


def _check_booking(request_id: str, attempt_id: int, lease_seconds: float) -> None:
    if not request_id:
        raise InvalidArgument("must not be empty", field="request_id")
    if attempt_id < 0:
        raise InvalidArgument("must not be negative", field="attempt_id")
    if not 0 <= lease_seconds <= MAX_LEASE_SECONDS:
        raise InvalidArgument(f"must be between 0 and {MAX_LEASE_SECONDS}", field="lease_seconds")
