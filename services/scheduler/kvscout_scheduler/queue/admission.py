"""Admission of requests that wait, looked at where something has changed and nowhere else.

::

    Free, prefill complete, expiry ──▶ pool.relieved: has the worker room? ──▶ the groups that it could take
    registry, cool-down, thresholds ──▶ pool.changed ────────────────────────▶ all groups

Invariant, between two calls: no worker that a waiting group could take has room, or it is in `relieved`, or the pool is
`changed`. So a worker whose load fell and that has no room yet is the concern of nobody; and of a group, the first one
that must wait speaks for all. A vacancy that is left to another replica (`remote_queues`) counts as none, until
`resume`.

Pure: the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from kvscout_common.errors import KvscoutError, ResourceExhausted
from kvscout_scheduler.load.pool import Pool
from kvscout_scheduler.load.workers import Workers
from kvscout_scheduler.policies.eligibility import eligible, with_room
from kvscout_scheduler.queue.remote_queues import RemoteQueues
from kvscout_scheduler.queue.turns import Turns
from kvscout_scheduler.queue.waiting import Group, PoolQueue, Waiter, WaitingQueues
from kvscout_scheduler.values.request import UNCONSTRAINED, SelectionRequest
from kvscout_scheduler.values.reservation import PoolId
from kvscout_scheduler.values.slot_sets import slot_set, slots_in
from kvscout_scheduler.values.thresholds import ThresholdTable


class Admission:
    """Admission of requests that wait.

    Args:
        workers: Whom they wait for.
        thresholds: When those are busy.
        waiting: Those that wait.
        book: Books a request that may go, and answers it; False = it was refused. Must not raise.
        remote: Requests that wait at other replicas.
        refuse_late: Refuses one whose time in the queue is over; must not raise.
    """

    def __init__(
        self,
        workers: Workers,
        thresholds: ThresholdTable,
        waiting: WaitingQueues,
        book: Callable[[Waiter, float], bool],
        remote: RemoteQueues,
        refuse_late: Callable[[Waiter, float], None],
    ) -> None:
        self._workers = workers
        self._thresholds = thresholds
        self._waiting = waiting
        self._book = book
        self._remote = remote
        self._refuse_one = refuse_late

    def must_wait(self, request: SelectionRequest, now: float) -> bool:
        """Return whether a request that comes has to wait; `admit_waiting` must have been called.

        Raises:
            KvscoutError: No worker could take it at all; as `eligible`, and busy only where nobody waits for the same.
        """
        pool = self._workers.pool(request.pool)
        queue = self._waiting.queue(pool.id)
        if queue is not None and queue.group(request.constraints) is not None:
            return True
        must_wait = not self._has_vacancy(pool, request, now)
        if must_wait and queue is None:
            # Nobody has looked at this pool for long: what is known of it is what was seen just now.
            pool.take_changes()
        return must_wait

    def admit_waiting(self, pool_id: PoolId, now: float) -> None:
        """Book the requests of a pool that wait and have room now, in order; refuse those whose time is over."""
        self.refuse_late(now)
        queue = self._waiting.queue(pool_id)
        if queue is None:
            return
        try:
            pool = self._workers.pool(pool_id)
        except KvscoutError as error:
            for group in queue.groups:
                self._refuse(group.waiters, error)
            return
        pool.judge(self._thresholds.get(pool_id.tenant, pool_id.model))
        pool.recover(now)
        slots, changed = pool.take_changes()
        if changed:
            groups, relieved = queue.groups, 0
        elif relieved := slot_set(slots) & ~pool.load.full():
            groups = _groups_for(pool, queue, relieved)
        else:
            return
        turns = Turns(queue, groups, now)
        while (turn := turns.next()) is not None:
            waiter, group = turn.waiter, turn.group
            try:
                if not self._has_vacancy(pool, waiter.request, now, yields=not turn.aged):
                    turns.drop(group)
                    continue
            except ResourceExhausted:
                # Busy is what it waits for to end.
                turns.drop(group)
                continue
            except KvscoutError as error:
                self._refuse(group.waiters, error)
                continue
            self._waiting.leave(waiter)
            if self._book(waiter, now):
                queue.charge(turn, now)
            if relieved and not relieved & ~pool.load.full():
                return

    def refuse_late(self, now: float) -> None:
        """Refuse those whose time in the queue is over."""
        for waiter in self._waiting.expired(now):
            self._refuse_one(waiter, now)

    def resume(self, now: float) -> None:
        """Take up vacancies that were left to other replicas for long enough; to be called every few milliseconds."""
        for pool_id in self._remote.take_over(now):
            try:
                self._workers.pool(pool_id).changed = True
            except KvscoutError:
                continue
            self.admit_waiting(pool_id, now)

    def _has_vacancy(self, pool: Pool, request: SelectionRequest, now: float, *, yields: bool = True) -> bool:
        """Return whether a worker has room for a request, and it is not left to another replica."""
        if self._has_room(pool, request, now):
            return not (yields and self._remote.come_first(request, now))
        if request.constraints == UNCONSTRAINED:
            self._remote.filled(pool.id)
        return False

    def _has_room(self, pool: Pool, request: SelectionRequest, now: float) -> bool:
        pool.judge(self._thresholds.get(request.tenant, request.model))
        return bool(with_room(pool, eligible(pool, request, now)))

    def _refuse(self, waiters: list[Waiter], error: KvscoutError) -> None:
        for waiter in list(waiters):
            self._waiting.leave(waiter)
            # Each is raised somewhere else.
            waiter.answer(copy(error))


def _groups_for(pool: Pool, queue: PoolQueue, slots: int) -> list[Group]:
    members = slots_in(slots)
    found = {
        group.constraints: group for slot in members for group in queue.groups_for(pool.ranks[slot], pool.specs[slot])
    }
    return list(found.values())
