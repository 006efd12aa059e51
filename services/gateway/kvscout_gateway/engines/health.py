"""Which workers get no requests for a while, because they keep failing what others run. Pure.

::

    in ── at least 3 failures, and half of what it was given within 30 s ──▶ out: 10 s, doubled each time, up to 60 s
    ▲                                                                         │ the time is over
    └─ slow start ◀── its first token ── on probation: one request at a time ◀┘
       10 s, a growing share of requests      └── that fails: out again

Beside that, a worker that does not answer its health checks gets nothing until it does, and what waits for it then is
tried elsewhere (`health_checks`).

What is known starts with a failure, so that a worker that never fails costs nothing. No more than half of the workers
that could take a request are left out of it, whatever they did: where all fail, the cause is somewhere else. A request
that failed at all others gets the ones that are out as well, and one that runs it is back in at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from kvscout_common.rpc.service_info import TenantWarning, Warned
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_gateway.engines.worker_state import WELL, Judgement, WorkerState

WINDOW_SECONDS = 30.0
"""Failures this far apart have nothing to do with one another."""
MIN_FAILURES = 3
MIN_SHARE = 0.5
"""Lowest share of failures among a worker's requests in the window that ejects it."""
EJECTION_SECONDS = 10.0
MAX_EJECTION_SECONDS = 60.0
"""A worker that lasted this long after it was out is out for `EJECTION_SECONDS` again the next time."""
SLOW_START_SECONDS = 10.0
"""Slow start after an ejection, in which a worker gets fewer requests: its caches are cold, and all would go to it."""
SLOW_START_SHARE = 0.1
"""Share of its requests that it gets at first."""
MISSED_CHECKS = 3
"""Health checks in a row that a worker that is well may miss, less one."""
MAX_EJECTED_SHARE = 0.5
"""Share of the workers that are left out at most."""
BUSY_SECONDS = 1.0
"""Cool-down of a worker that is overloaded and does not say for how long."""
MAX_BUSY_SECONDS = 30.0


class _Reason(IntEnum):
    """Why a worker is left out; the first ones matter most."""

    OUT = 0
    BUSY = 1
    SLOW_START = 2


Key: TypeAlias = tuple[str, WorkerRank]
"""Tenant and worker rank."""


@dataclass(slots=True)
class _Counts:
    since: float
    ran: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Missed:
    """Health checks that a worker missed in a row."""

    since: float
    problem: str
    """Problem of the last one."""
    count: int = 1


@dataclass(slots=True)
class _Record:
    """Failures of one worker rank."""

    now: _Counts
    """Half a window at most, as is the one before."""
    before: _Counts
    ejected_until: float | None = None
    """None = it is in."""
    ejected_at: float = 0.0
    """Time of its first ejection since it last got requests."""
    ejection_seconds: float = 0.0
    """Length of its last ejection."""
    is_gone: bool = False
    """Its last failure was that there is no connection: what answers after that is another process."""
    back_since: float = 0.0
    probing: bool = False
    """A request is under way that was sent since it is out, and shows whether it is well again."""
    busy_until: float = 0.0

    def roll(self, now: float) -> None:
        """Forget what is too old."""
        age = now - self.now.since
        if age >= WINDOW_SECONDS / 2:
            self.before = self.now if age < WINDOW_SECONDS else _Counts(now)
            self.now = _Counts(now)

    def reason(self, now: float, draw: Callable[[], float]) -> _Reason | None:
        """Return why it should not get a request now; None = it may."""
        if self.ejected_until is not None and (now < self.ejected_until or self.probing):
            return _Reason.OUT
        if now < self.busy_until:
            return _Reason.BUSY
        if self.ejected_until is None and self.ejection_seconds:
            share = (now - self.back_since) / SLOW_START_SECONDS
            if share < 1 and draw() >= max(SLOW_START_SHARE, share):
                return _Reason.SLOW_START
        return None

    def back(self, now: float) -> None:
        """Give it requests again."""
        self.ejected_until, self.probing, self.back_since = None, False, now
        self.now, self.before = _Counts(now), _Counts(now)

    def over(self, now: float) -> bool:
        """Tell whether there is nothing to know of it any more."""
        self.roll(now)
        return (
            self.ejected_until is None
            and now >= self.busy_until
            and now >= self.back_since + (MAX_EJECTION_SECONDS if self.ejection_seconds else 0.0)
            and not (self.now.failed or self.before.failed)
        )


class WorkerHealth:
    """Health of a gateway's workers, as its own requests show it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random) -> None:
        """Begin without observations.

        Args:
            clock: Seconds.
            draw: Random numbers, 0 <= x < 1.
        """
        self._clock = clock
        self._draw = draw
        self._records: dict[Key, _Record] = {}
        self._missed: dict[tuple[str, str], _Missed] = {}
        """By tenant and worker id."""

    def ejected(
        self, tenant: str, candidates: Callable[[], Sequence[WorkerSpec]], tried: Collection[str] = ()
    ) -> set[str]:
        """Return the ids of workers that should get no request now, because none of their ranks should.

        Args:
            tenant: Whose request.
            candidates: Gives the workers that could take it; not called while all are well.
            tried: Ids of those that failed it: where all others are left out, only those are that say they are busy.
        """
        if not (self._records or self._missed):
            return set()
        now, workers = self._clock(), candidates()
        reasons = [(self._reason(tenant, spec, now), spec.worker_id) for spec in workers]
        barred = sorted((reason, worker_id) for reason, worker_id in reasons if reason is not None)
        out = {worker_id: reason for reason, worker_id in barred[: int(len(workers) * MAX_EJECTED_SHARE)]}
        if tried and all(spec.worker_id in tried or spec.worker_id in out for spec in workers):
            return {worker_id for worker_id, reason in out.items() if reason is _Reason.BUSY}
        return set(out)

    def reachable(self, tenant: str, workers: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Return the workers that have an HTTP endpoint and are neither ejected nor draining."""
        out = self.ejected(tenant, lambda: workers)
        return [w for w in workers if w.http_endpoint and not w.draining and w.worker_id not in out]

    def well_first(self, tenant: str, some: Iterable[WorkerSpec], among: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Return the workers in their order, with ejected ones at the end.

        Args:
            tenant: Whose request.
            some: Those that it may go to.
            among: All that could take it, half of whom stay in.
        """
        out = self.ejected(tenant, lambda: among)
        return sorted(some, key=lambda spec: spec.worker_id in out)

    def warnings(self) -> list[Warned]:
        """Return who is left out because it failed, in sentences."""
        failing: list[Warned] = [
            TenantWarning(tenant, f"worker {rank.worker_id}/{rank.dp_rank} {sentence}")
            for (tenant, rank), sentence in self.failing().items()
        ]
        silent = [
            TenantWarning(tenant, f"worker {worker_id} does not answer its health checks: no requests")
            for tenant, worker_id in self.silent()
        ]
        return [*failing, *silent]

    def failing(self) -> dict[Key, str]:
        """Return what is wrong with the worker ranks that are left out because they failed."""
        now = self._clock()
        return {
            key: _sentence(record, now) for key, record in self._records.items() if record.ejected_until is not None
        }

    def silent(self) -> dict[tuple[str, str], str]:
        """Return the last problem of each worker that missed several health checks, by tenant and worker id."""
        return {who: missed.problem for who, missed in self._missed.items() if missed.count >= MISSED_CHECKS}

    def problem(self, tenant: str, worker_id: str) -> str:
        """Return the problem of a worker's last health check; "" = it answered."""
        missed = self._missed.get((tenant, worker_id))
        return missed.problem if missed is not None else ""

    def is_silent(self, tenant: str, worker_id: str) -> bool:
        """Tell whether a worker missed enough health checks in a row to get no requests."""
        missed = self._missed.get((tenant, worker_id))
        return missed is not None and missed.count >= MISSED_CHECKS

    def silent_seconds(self, tenant: str, worker_id: str) -> float:
        """Return the seconds since a worker missed the first of its last checks; 0 = it answered the last one."""
        missed = self._missed.get((tenant, worker_id))
        return self._clock() - missed.since if missed is not None else 0.0

    def doubtful(self) -> list[tuple[str, str]]:
        """Return the workers that missed a health check, and too few of them to get no requests."""
        return [who for who, missed in self._missed.items() if missed.count < MISSED_CHECKS]

    def judge(self, key: Key) -> Judgement:
        """Return the state of a worker rank as failures and health checks show it."""
        now = self._clock()
        record, missed = self._records.get(key), self._missed.get((key[0], key[1].worker_id))
        is_ejected = record is not None and record.ejected_until is not None
        if missed is not None and (is_ejected or missed.count >= MISSED_CHECKS):
            cause = f"does not answer its health checks: {missed.problem}"
            return Judgement(WorkerState.LEFT_OUT, cause, now - missed.since)
        if record is not None and record.ejected_until is not None:
            left = record.ejected_until - now
            then = f"is tried again in {left:.0f} s" if left > 0 else "gets one request at a time"
            return Judgement(WorkerState.LEFT_OUT, f"fails what others run; {then}", now - record.ejected_at)
        if missed is not None:
            return Judgement(
                WorkerState.SUSPECTED, f"missed its last health check: {missed.problem}", now - missed.since
            )
        if record is not None and now < record.busy_until:
            return Judgement(WorkerState.BUSY, f"says that it is overloaded, for {record.busy_until - now:.0f} s more")
        return WELL

    def checked(self, tenant: str, worker_id: str, problem: str = "") -> bool:
        """Record the result of a health check.

        Args:
            tenant: Whose worker.
            worker_id: Its id.
            problem: What was wrong; "" = nothing.

        Returns:
            Whether that changes if it gets requests.
        """
        who = (tenant, worker_id)
        missed = self._missed.get(who)
        if not problem:
            self._missed.pop(who, None)
            is_back = self._restarted(who)
            return is_back or (missed is not None and missed.count >= MISSED_CHECKS)
        if missed is None:
            self._missed[who] = _Missed(self._clock(), problem)
            return False
        missed.count, missed.problem = missed.count + 1, problem
        return missed.count == MISSED_CHECKS

    def _restarted(self, who: tuple[str, str]) -> bool:
        """Give requests again to a worker that was gone and answers; return whether it was left out for that.

        One that comes and goes waits for its time.
        """
        is_back = False
        for (tenant, rank), record in self._records.items():
            out = record.ejected_until is not None and record.ejection_seconds <= EJECTION_SECONDS
            if (tenant, rank.worker_id) == who and out and record.is_gone:
                record.back(self._clock())
                is_back = True
        return is_back

    def sent(self, key: Key) -> None:
        """Record a request to it."""
        record = self._records.get(key)
        if record is not None and record.ejected_until is not None:
            record.probing = True

    def withdrawn(self, key: Key) -> None:
        """Record the end of a request that says nothing of its health."""
        record = self._records.get(key)
        if record is not None:
            record.probing = False

    def ran(self, key: Key) -> None:
        """Record a request's first token."""
        record = self._records.get(key)
        if record is None:
            return
        now = self._clock()
        if record.ejected_until is not None and (record.probing or now >= record.ejected_until):
            record.back(now)
        record.roll(now)
        record.now.ran += 1
        if record.over(now):
            del self._records[key]

    def failed(self, key: Key, candidates: Sequence[WorkerSpec], *, is_gone: bool = False) -> float:
        """Record a failure of a request that others run, or of its connection.

        Args:
            key: Tenant and worker rank.
            candidates: The workers that could have taken it, this one included.
            is_gone: There was no connection. If it is left out for that, it is back once it answers a health check.

        Returns:
            For how many seconds it is left out from now on; 0 = it stays in, or was out already.
        """
        now = self._clock()
        ranks = [(key[0], rank) for spec in candidates for rank in spec.ranks]
        if key not in ranks or self.is_silent(key[0], key[1].worker_id):
            return 0.0  # it was removed meanwhile, or gets nothing until it answers its health checks
        record = self._of(key, now)
        record.roll(now)
        record.now.failed += 1
        record.is_gone = is_gone
        on_probation = record.ejected_until is not None and now >= record.ejected_until
        record.probing = False
        failed = record.now.failed + record.before.failed
        ran = record.now.ran + record.before.ran
        if record.ejected_until is not None and not on_probation:
            return 0.0  # what was under way when it was left out, or had nobody else
        if not on_probation and (failed < MIN_FAILURES or failed < MIN_SHARE * (failed + ran)):
            return 0.0
        out = sum(self._out(other) for other in ranks if other != key)
        if out + 1 > len(ranks) * MAX_EJECTED_SHARE:
            record.ejected_until = None
            return 0.0
        again = record.ejection_seconds and (on_probation or now < record.back_since + MAX_EJECTION_SECONDS)
        record.ejection_seconds = min(2 * record.ejection_seconds, MAX_EJECTION_SECONDS) if again else EJECTION_SECONDS
        if record.ejected_until is None:
            record.ejected_at = now
        record.ejected_until = now + record.ejection_seconds
        return record.ejection_seconds

    def overloaded(self, key: Key, seconds: float | None) -> None:
        """Record an overload.

        Args:
            key: Tenant and worker rank.
            seconds: How long, as it says; None = it does not.
        """
        now = self._clock()
        record = self._of(key, now)
        record.probing = False
        record.busy_until = now + min(BUSY_SECONDS if seconds is None else seconds, MAX_BUSY_SECONDS)

    def forget(self, tenant: str, worker_id: str) -> None:
        """Drop what is known of a removed worker."""
        self._missed.pop((tenant, worker_id), None)
        for key in [key for key in self._records if key[0] == tenant and key[1].worker_id == worker_id]:
            del self._records[key]

    def _of(self, key: Key, now: float) -> _Record:
        record = self._records.get(key)
        if record is None:
            for old in [old for old, known in self._records.items() if known.over(now)]:
                del self._records[old]
            record = self._records[key] = _Record(_Counts(now), _Counts(now))
        return record

    def _reason(self, tenant: str, spec: WorkerSpec, now: float) -> _Reason | None:
        """Return the weakest reason of its ranks: it may get what one of them may."""
        if self.is_silent(tenant, spec.worker_id):
            return _Reason.OUT
        weakest = _Reason.OUT
        for rank in spec.ranks:
            record = self._records.get((tenant, rank))
            reason = record.reason(now, self._draw) if record is not None else None
            if reason is None:
                return None
            weakest = max(weakest, reason)
        return weakest

    def _out(self, key: Key) -> bool:
        record = self._records.get(key)
        return record is not None and record.ejected_until is not None


def _sentence(record: _Record, now: float) -> str:
    left = (record.ejected_until or now) - now
    gets = f"no requests for {left:.0f} s" if left > 0 else "one request at a time"
    return f"fails what others run: {gets}"
