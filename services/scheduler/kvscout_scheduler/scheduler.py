"""The scheduler: one atomic decision after the other, over workers, load and bookings.

No method awaits, so that on one event loop every call sees the state that the one before it left: two clients never
decide on the same load. The clock and the random generator are passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import nsmallest
from operator import itemgetter
from random import Random
from typing import NamedTuple

from kvscout_common.errors import (
    AlreadyExists,
    Cancelled,
    Draining,
    InternalError,
    InvalidArgument,
    KvscoutError,
    ResourceExhausted,
    Unavailable,
)
from kvscout_common.tenant_limits import TenantLimits
from kvscout_common.warned import TenantWarning
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.active_load import MakeLoad
from kvscout_scheduler.booking import ActiveRequest, Booking, FreeOutcome, ListPlace
from kvscout_scheduler.bookings import END_AT_ONCE, Bookings
from kvscout_scheduler.candidates import Candidates
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.engine_metrics import EngineMetrics
from kvscout_scheduler.facts import Choice, Facts
from kvscout_scheduler.journal import MAX_HASHED_BLOCKS
from kvscout_scheduler.policies import PolicyRegistry, installed_policies
from kvscout_scheduler.pool import Pool
from kvscout_scheduler.request import (
    EMPTY_PROMPT,
    HASH_BYTES,
    MAX_LEASE_SECONDS,
    OwnerName,
    PoolId,
    Prompt,
    RequestKey,
    SelectionRequest,
)
from kvscout_scheduler.selection import Selected, Selector
from kvscout_scheduler.settings import SchedulerSettings
from kvscout_scheduler.stats import SchedulerStats
from kvscout_scheduler.thresholds import BusyThresholds, ThresholdTable
from kvscout_scheduler.turns import Turns
from kvscout_scheduler.waiting import RETRY_SECONDS, Answer, Waiter, WaitingLine, queued_listing
from kvscout_scheduler.watching import Watchers
from kvscout_scheduler.workers import Workers

DEFAULT_SETTINGS = SchedulerSettings()
NAMED_RANKS = 5
"""Worker ranks that a warning names."""


class WorkerLoad(NamedTuple):
    """Load of one worker rank, now and with a prompt added."""

    rank: WorkerRank
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    active_prefill_tokens: int
    active_decode_blocks: int
    busy: bool
    cooldown_seconds: float
    draining: bool
    total_kv_blocks: int
    metrics_age_seconds: float | None
    """Of what its engine says of itself; None = nothing that counts."""


class Scheduler:
    """Picks workers, books requests on them, and knows what is active.

    Args:
        settings: Checked here.
        clock: Monotonic seconds.
        rng: For ties and temperatures.
        policies: None = this package's and those of installed packages.
        wall_clock: Seconds since the Unix epoch, for those who watch.
        limits: What tenants may have.
        make_load: Which twin keeps the load; None = the native one where the extension is built and not switched off.

    Raises:
        ConfigError: A setting is out of range.
        InvalidArgument: The policy in the settings is unknown.
    """

    def __init__(
        self,
        settings: SchedulerSettings = DEFAULT_SETTINGS,
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
        self.waiting = WaitingLine(settings.queue_limit)
        if make_load is None:
            # Whoever chooses a twin need not load the extension.
            from kvscout_scheduler import native_load

            make_load = native_load.make_load
        self._make_load = make_load
        self._selector = Selector(settings, self.policies, rng)
        self.workers = Workers(settings, self.bookings, clock, self._make_pool)
        """Give it to the registry as a listener."""
        self._turns = Turns(self.workers, self.thresholds, self.waiting, self._book_waiter)
        self.draining = False
        self.watchers = Watchers(wall_clock)
        self.on_cool_down: Callable[[str, WorkerRank, float | None], None] | None = None
        """Told tenant, rank and end of each cool-down that was reported here; None = it was ended before its time."""
        self._clock = clock
        self._wall_clock = wall_clock

    def select(self, request: SelectionRequest) -> Decision:
        """Picks a worker and books nothing.

        Raises:
            InvalidArgument: A field of the request is wrong; it is named.
            NotFound: The model was never seen, or the pinned worker does not exist.
            Unavailable: No worker can take the request now, or the scheduler drains.
            FailedPrecondition: No worker has the labels or the adapter, or the hashes are of another block size.
            ResourceExhausted: All that could take it are busy.
        """
        self._selector.check(request)
        return self._select(request, self._clock(), books=False).decision

    def select_and_reserve(
        self, request: SelectionRequest, *, owner: OwnerName | None = None, lease_seconds: float = 0.0
    ) -> Decision:
        """Picks a worker and books the request on it, in one step.

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
        self._selector.check(request)
        _check_booking(request.request_id, request.attempt_id, lease_seconds)
        now = self._clock()
        key = request.key
        active = self.bookings.admit(key, request.attempt_id, now)
        if active is not None:
            answer = active.answer
            if answer is None:
                active.answers -= 1
                raise AlreadyExists(f"request {key.request_id!r} was reserved without choosing")
            return answer
        decision, pool, slot, block_hashes = self._select(request, now, books=True)
        facts = Facts(
            key,
            request.attempt_id,
            decision.rank,
            request.isl_tokens,
            decision.uncached_tokens,
            request.expected_output_tokens,
            b"",
            Choice(decision.policy, decision.overlap_blocks, decision.effective_overlap_blocks, decision.cost),
        )
        self._book(facts, block_hashes, pool, slot, owner=owner, lease_seconds=lease_seconds, now=now)
        if request.charge_prefill:
            self._count_hits(pool, slot, facts)
        return decision

    def reserve_or_wait(
        self, request: SelectionRequest, answer: Answer, *, owner: OwnerName | None = None, lease_seconds: float = 0.0
    ) -> None:
        """`select_and_reserve`, or a place in line while all workers have prefill work enough.

        Args:
            request: With a request id.
            answer: Told of the decision or of the error, now or later, once. Whoever is told later of a decision that
                nobody wants any more calls `undelivered`.
            owner: As of `select_and_reserve`.
            lease_seconds: As of `select_and_reserve`.

        Raises:
            KvscoutError: As `select_and_reserve`, if it is decided now; and ResourceExhausted: the line is full.
        """
        if self.settings.queue_threshold is None:
            answer(self.select_and_reserve(request, owner=owner, lease_seconds=lease_seconds))
            return
        self._selector.check(request)
        _check_booking(request.request_id, request.attempt_id, lease_seconds)
        key, now = request.key, self._clock()
        try:
            if key in self.bookings or not self._must_wait(request, now):
                answer(self.select_and_reserve(request, owner=owner, lease_seconds=lease_seconds))
                return
            # Who was freed already must not wait for nothing.
            self.bookings.admit(key, request.attempt_id, now)
            self.waiting.join(Waiter(request, answer, owner, lease_seconds, now))
        except ResourceExhausted as error:
            if error.retry_after_seconds is None and self.waiting.length(request.pool):
                error.retry_after_seconds = RETRY_SECONDS
            raise
        self.stats.queued += 1

    def abandon(self, key: RequestKey, attempt_id: int, answer: Answer) -> None:
        """Takes a waiting call out of line whose caller has gone; one that another call replaced stays."""
        waiter = self.waiting.find(key, attempt_id)
        if waiter is not None and waiter.answer is answer:
            self.waiting.leave(waiter)

    def reserve(self, facts: Facts, *, owner: OwnerName | None = None, lease_seconds: float = 0.0) -> int:
        """Books a request on a given worker, whatever its load.

        Args:
            facts: What to book, and where.
            owner: Whose it is; None = a unary caller, who has a lease.
            lease_seconds: Length of the lease; 0 = the default.

        Returns:
            Prompt tokens charged as uncached.

        Raises:
            InvalidArgument: A field is wrong; it is named.
            NotFound: Unknown model or worker.
            Unavailable: The model has no worker of the role now, or the scheduler drains.
            AlreadyExists: The id is active under another attempt, or on another worker.
            Cancelled: This attempt was freed already.
        """
        facts.validate()
        key, rank = facts.key, facts.rank
        _check_booking(key.request_id, facts.attempt_id, lease_seconds)
        now = self._clock()
        active = self.bookings.admit(key, facts.attempt_id, now)
        if active is not None:
            if active.facts.rank != rank:
                active.answers -= 1
                raise AlreadyExists(f"request {key.request_id!r} is active on {active.facts.rank.worker_id!r}")
            return active.facts.uncached_tokens
        self._require_open()
        pool = self.workers.pool(key.pool)
        home, slot = self.workers.slot(key.tenant, rank)
        if home is not pool:
            raise InvalidArgument(f"{rank.worker_id!r} is not a worker of this model and role", field="worker")
        Prompt(facts.block_hashes).validate(facts.isl_tokens, pool.lane_of[slot].block_size)
        kept = facts._replace(block_hashes=b"")
        self._book(kept, facts.block_hashes, pool, slot, owner=owner, lease_seconds=lease_seconds, now=now)
        self._count_hits(pool, slot, facts)
        return facts.uncached_tokens

    def mark_prefill_complete(self, key: RequestKey, attempt_id: int = 0) -> bool:
        """The first token is out; False = it was marked before.

        Raises:
            InvalidArgument: No request id.
            NotFound: This attempt is not active.
        """
        _check_booking(key.request_id, attempt_id, 0.0)
        now = self._clock()
        changed = self.bookings.complete_prefill(key, attempt_id, now)
        self._relieved(key, now)
        return changed

    def add_output(self, key: RequestKey, blocks: int, attempt_id: int = 0) -> int:
        """Adds generated blocks to a request's load; returns its output blocks in all.

        Raises:
            InvalidArgument: No request id, or blocks below 1.
            NotFound: This attempt is not active.
            FailedPrecondition: Output is not tracked.
        """
        _check_booking(key.request_id, attempt_id, 0.0)
        if blocks < 1:
            raise InvalidArgument("must be at least 1", field="blocks")
        return self.bookings.add_output(key, attempt_id, blocks, self._clock())

    def free(self, key: RequestKey, attempt_id: int = 0, *, output_tokens: int = 0) -> FreeOutcome:
        """Releases all that an attempt holds; implies prefill complete. Unknown or repeated: a no-op that says so.

        Args:
            key: The request.
            attempt_id: Its attempt.
            output_tokens: That it had, for policies that learn; 0 = unknown.

        Raises:
            InvalidArgument: No request id.
        """
        _check_booking(key.request_id, attempt_id, 0.0)
        now = self._clock()
        waiter = self.waiting.find(key, attempt_id)
        if waiter is not None:
            self.waiting.leave(waiter)
            self.bookings.cancel(key, attempt_id, now)
            waiter.answer(Cancelled(f"request {key.request_id!r} was freed while it waited"))
            return FreeOutcome.DEQUEUED
        outcome = self.bookings.free(key, attempt_id, now, output_tokens)
        self._relieved(key, now)
        return outcome

    def renew(self, key: RequestKey, attempt_id: int = 0, *, lease_seconds: float = 0.0) -> bool:
        """Renews a lease; False = this attempt is not active.

        Raises:
            InvalidArgument: No request id, or a lease out of range.
        """
        _check_booking(key.request_id, attempt_id, lease_seconds)
        return self.bookings.renew(key, attempt_id, self._clock(), lease_seconds)

    def undelivered(self, key: RequestKey, attempt_id: int = 0) -> bool:
        """Takes back a booking whose answer the caller did not get, unless a repeated call got it."""
        now = self._clock()
        ended = self.bookings.undelivered(key, attempt_id, now)
        self._relieved(key, now)
        return ended

    def connect_owner(
        self, owner: OwnerName, in_flight: Iterable[tuple[RequestKey, int]], opened_at: int = 0
    ) -> tuple[int, list[tuple[RequestKey, int]]]:
        """Opens an owner's stream; see `Bookings.connect_owner`.

        Raises:
            FailedPrecondition: A stream that it opened later is open.
        """
        now = self._clock()
        connected = self.bookings.connect_owner(owner, in_flight, now, opened_at, self._wall_clock())
        self.pump()
        return connected

    def disconnect_owner(self, owner: OwnerName, session: int, *, silent_seconds: float = 0.0) -> None:
        """Ends an owner's stream; its bookings end after the grace time unless it comes back.

        Args:
            owner: Whose.
            session: Of the stream.
            silent_seconds: For how long it has not been heard of: that much of the grace time is over.
        """
        self.bookings.disconnect_owner(owner, session, self._clock() - silent_seconds)

    def expire(self) -> int:
        """Ends what is overdue, `END_AT_ONCE` bookings at most; to be called every second or so, and soon again if it
        ended as many. Returns bookings that ended."""
        now = self._clock()
        for pool in self.workers:
            pool.recover(now)
            pool.forget_metrics(now - self.settings.engine_metrics_seconds)
        ended = self.bookings.expire(now, END_AT_ONCE)
        ended += self.workers.expire(now, END_AT_ONCE - ended)
        if ended < END_AT_ONCE:
            self.bookings.tell_ends()
        self.pump()
        return ended

    def drain(self) -> None:
        """Takes no more selections and bookings; what is active goes on, what waits is refused."""
        self.draining = True
        for waiter in list(self.waiting):
            self.waiting.leave(waiter)
            waiter.answer(Draining("the scheduler is draining"))

    def pump(self) -> None:
        """Books whoever can go, after load went away by another way than a call."""
        now = self._clock()
        for pool in self.waiting.pools:
            self._turns.give(pool, now)

    def report_failure(self, tenant: str, rank: WorkerRank, cooldown_seconds: float = 0.0) -> float:
        """Leaves a worker rank out of selections for a while (`Pool.left_out`); never shortens a cool-down.

        Args:
            tenant: Of the worker.
            rank: The rank that failed a request.
            cooldown_seconds: 0 = the default; above the longest one it is that.

        Returns:
            Seconds until its cool-down ends.

        Raises:
            InvalidArgument: The length is negative.
            NotFound: Unknown worker.
        """
        if not cooldown_seconds >= 0:
            raise InvalidArgument(f"must be at least 0, not {cooldown_seconds}", field="cooldown_seconds")
        pool, slot = self.workers.slot(tenant, rank)
        now = self._clock()
        seconds = min(cooldown_seconds or self.settings.cooldown_seconds, self.settings.longest_cooldown_seconds)
        until = max(now + seconds, pool.cooldown_until.get(slot, now))
        pool.cool_down(slot, until)
        self.stats.failures_reported += 1
        if self.on_cool_down is not None:
            self.on_cool_down(tenant, rank, until)
        return until - now

    def clear_cool_downs(self, tenant: str, *, worker_id: str = "", model: str = "") -> list[WorkerRank]:
        """Ends cool-downs before their time.

        Args:
            tenant: Of the workers.
            worker_id: "" = all.
            model: "" = all.

        Returns:
            The ranks that cooled down.

        Raises:
            NotFound: Unknown worker.
        """
        if worker_id:
            self.workers.require_worker(tenant, worker_id)
        now, cleared = self._clock(), []
        for pool in self.workers:
            if pool.id.tenant != tenant or model not in ("", pool.id.model):
                continue
            for slot, until in list(pool.cooldown_until.items()):
                rank = pool.ranks[slot]
                if until > now and worker_id in ("", rank.worker_id):
                    cleared.append(rank)
                    pool.cool_down(slot, now)
                    if self.on_cool_down is not None:
                        self.on_cool_down(tenant, rank, None)
            self._turns.give(pool.id, now)
        return sorted(cleared)

    def set_cool_down(self, tenant: str, rank: WorkerRank, until: float) -> None:
        """Makes the cool-down of a worker rank end at a time on the clock: what replicas agree on.

        Raises:
            NotFound: Unknown worker.
        """
        pool, slot = self.workers.slot(tenant, rank)
        pool.cool_down(slot, until)

    def report_metrics(self, tenant: str, rank: WorkerRank, metrics: EngineMetrics) -> None:
        """Takes what an engine says of itself; replaces what it said before.

        Raises:
            InvalidArgument: A value is out of range; it is named.
            NotFound: Unknown worker.
        """
        pool, slot = self.workers.slot(tenant, rank)
        now = self._clock()
        pool.report(slot, metrics.validate(), now)
        self._turns.give(pool.id, now)

    def warnings(self) -> list[TenantWarning]:
        """What an operator should know of the workers."""
        seconds = self.settings.engine_metrics_seconds
        found = []
        for pool in self.workers:
            if pool.silent:
                ranks = [pool.ranks[slot] for slot in pool.order if slot in pool.silent]
                names = ", ".join(f"{rank.worker_id}/{rank.dp_rank}" for rank in ranks[:NAMED_RANKS])
                more = ", …" if len(ranks) > NAMED_RANKS else ""
                text = f"model {pool.id.model}: engine metrics older than {seconds:g} s count no more: {names}{more}"
                found.append(TenantWarning(pool.id.tenant, text))
        return found

    def busy_thresholds(self, tenant: str) -> dict[str, BusyThresholds]:
        """Thresholds of every model of a tenant that has any, by model."""
        models = sorted(self.workers.models(tenant).union(self.thresholds.models(tenant)))
        found = {model: self.thresholds.get(tenant, model) for model in models}
        return {model: thresholds for model, thresholds in found.items() if not thresholds.off}

    def potential_loads(
        self,
        pool_id: PoolId,
        *,
        isl_tokens: int = 0,
        prompt: Prompt = EMPTY_PROMPT,
        other_prompts: tuple[Prompt, ...] = (),
    ) -> list[WorkerLoad]:
        """Load of each worker rank, by rank, now and with a prompt added.

        Args:
            pool_id: Whose loads.
            isl_tokens: Length of the prompt; 0 = none.
            prompt: Its hashes and overlaps.
            other_prompts: The same for workers of other block sizes.

        Raises:
            InvalidArgument: Naming the field.
            NotFound: The model was never seen.
        """
        if not pool_id.model:
            raise InvalidArgument("must not be empty", field="model")
        try:
            pool = self.workers.pool(pool_id)
        except Unavailable:
            return []
        prompts = pool.prompts(prompt, other_prompts, isl_tokens)
        request = SelectionRequest(pool_id.model, isl_tokens, prompt, tenant=pool_id.tenant, role=pool_id.role)
        # What is cached is shown where it is worth nothing to a policy, too.
        settings = replace(self.settings, overlap_score_weight=1.0)
        now = self._clock()
        candidates = Candidates(pool, request, pool.order, prompts, settings, now=now)
        pool.judge(self.thresholds.get(pool_id.tenant, pool_id.model))
        return [
            WorkerLoad(
                rank=pool.ranks[slot],
                potential_prefill_tokens=load.prefill_tokens
                + candidates.uncached_tokens(index, candidates.overlap(index)[1]),
                potential_decode_blocks=candidates.decode_blocks[index],
                active_requests=load.requests,
                active_prefill_tokens=load.prefill_tokens,
                active_decode_blocks=load.decode_blocks,
                busy=pool.load.busy(slot),
                cooldown_seconds=max(0.0, pool.cooldown_until.get(slot, now) - now),
                draining=slot in pool.draining,
                total_kv_blocks=pool.specs[slot].total_kv_blocks,
                metrics_age_seconds=now - pool.reported_at[slot] if slot in pool.reported_at else None,
            )
            for index, (slot, load) in enumerate((slot, pool.load.at(slot)) for slot in pool.order)
        ]

    def list_active_requests(
        self,
        tenant: str,
        *,
        model: str = "",
        worker_id: str = "",
        limit: int = 1000,
        after: ListPlace | None = None,
    ) -> tuple[list[ActiveRequest], int, ListPlace | None]:
        """Active requests, oldest first; those that wait come last.

        Args:
            tenant: Whose.
            model: "" = all.
            worker_id: "" = all.
            limit: How many at most.
            after: Where an earlier list ended; None = from the beginning.

        Returns:
            The first `limit` of them, how many there are, and where to go on if there are more behind these.
        """
        found = [
            booking
            for booking in self.bookings
            if booking.key.tenant == tenant
            and model in ("", booking.key.model)
            and worker_id in ("", booking.facts.rank.worker_id)
        ]
        queued = (
            []
            if worker_id
            else [w for w in self.waiting if w.request.tenant == tenant and model in ("", w.request.model)]
        )
        places: list[tuple[ListPlace, Booking | Waiter]] = [
            *((ListPlace(False, booking.booked_at, booking.key), booking) for booking in found),
            *((ListPlace(True, waiter.since, waiter.request.key), waiter) for waiter in queued),
        ]
        if after is not None:
            places = [each for each in places if each[0] > after]
        # What was booked in one moment is in the order of the names: a place must tell it from its neighbours.
        page = nsmallest(limit, places, key=itemgetter(0))
        now = self._clock()
        listed = [
            self.bookings.listing(one, now) if isinstance(one, Booking) else queued_listing(one, now) for _, one in page
        ]
        return listed, len(found) + len(queued), page[-1][0] if page and len(page) < len(places) else None

    def check_invariants(self) -> None:
        """Raises AssertionError if any structure contradicts another."""
        self.bookings.check_invariants()
        for pool in self.workers:
            allocations = [booking.allocation for booking in self.bookings if booking.pool is pool]
            pool.load.check_invariants(allocations)

    def _make_pool(self, pool_id: PoolId) -> Pool:
        settings = self.settings
        pool = Pool(
            pool_id,
            self._make_load,
            track_blocks=settings.tracks_blocks(pool_id.role),
            queue_threshold=settings.queue_threshold,
        )
        self._selector.begin(pool)
        return pool

    def _select(self, request: SelectionRequest, now: float, *, books: bool) -> Selected:
        try:
            self._require_open()
            pool = self.workers.pool(request.pool)
            pool.judge(self.thresholds.get(request.tenant, request.model))
            watched = self.watchers.explain(request)
            selected = self._selector.select(pool, request, now, books=books, explains=watched)
        except KvscoutError as error:
            self._refused(request, error)
            raise
        self.watchers.tell(request, selected.decision)
        if watched and not request.explain:
            selected = selected._replace(decision=replace(selected.decision, explanation=None))
        self.stats.decisions[selected.decision.policy] += 1
        pool.decisions += 1
        return selected

    def _must_wait(self, request: SelectionRequest, now: float) -> bool:
        """Whether a request has to wait; one that need not takes the place of an earlier call of it.

        Raises:
            KvscoutError: No worker could take it at all; as `select`.
        """
        try:
            self._require_open()
            self._turns.give(request.pool, now)
            if self._turns.must_wait(request, now):
                return True
        except KvscoutError as error:
            self._refused(request, error)
            raise
        earlier = self.waiting.find(request.key, request.attempt_id)
        if earlier is not None and self.waiting.leave(earlier):
            earlier.answer(Cancelled("a repeated call of the same attempt went in its place"))
        return request.key in self.waiting

    def _book_waiter(self, waiter: Waiter, now: float) -> None:
        """Books one whose turn it is, and tells it."""
        try:
            decision = self.select_and_reserve(waiter.request, owner=waiter.owner, lease_seconds=waiter.lease_seconds)
        except KvscoutError as error:
            waiter.answer(error)
        except Exception:
            # It is out of line: without this it would wait for ever.
            waiter.answer(InternalError("the scheduler failed to book it"))
            raise
        else:
            self.stats.queue_waits.observe(now - waiter.since)
            waiter.answer(decision)

    def _relieved(self, key: RequestKey, now: float) -> None:
        """Lets those go who waited for what a request has given back."""
        if len(self.waiting):
            self._turns.give(key.pool, now)

    def _refused(self, request: SelectionRequest, error: KvscoutError) -> None:
        self.stats.refusals[type(error).__name__] += 1
        self.watchers.tell(request, error)

    def _require_open(self) -> None:
        if self.draining:
            raise Draining("the scheduler is draining")

    def _book(
        self,
        facts: Facts,
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
                facts = facts._replace(block_hashes=block_hashes)
        booking = Booking(facts, pool, pool.place(slot, facts, block_hashes), now)
        self.bookings.add(booking, owner=owner, lease_seconds=lease_seconds)

    def _count_hits(self, pool: Pool, slot: int, facts: Facts) -> None:
        cached = facts.isl_tokens - facts.uncached_tokens
        for counts in (self.stats, pool.hits[slot]):
            counts.isl_tokens += facts.isl_tokens
            counts.cached_tokens += cached


def _check_booking(request_id: str, attempt_id: int, lease_seconds: float) -> None:
    if not request_id:
        raise InvalidArgument("must not be empty", field="request_id")
    if attempt_id < 0:
        raise InvalidArgument("must not be negative", field="attempt_id")
    if not 0 <= lease_seconds <= MAX_LEASE_SECONDS:
        raise InvalidArgument(f"must be between 0 and {MAX_LEASE_SECONDS}", field="lease_seconds")
