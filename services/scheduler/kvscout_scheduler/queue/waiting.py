"""Requests that wait because every worker that could take them has prefill work enough.

::

    arrive ──▶ any worker:  [prio 5: a d] [prio 0: b c e] ──┐
               pinned to x: [prio 0: f g]                   ├──admission.py──▶ booked, the first place of all first
               adapter l:   [prio 9: h]                     ──┘

Rules
1. A request waits while *all* workers that could take it have more than `threshold · max_num_batched_tokens` active
   prefill tokens. A worker that did not register `max_num_batched_tokens` never makes anyone wait. Who need not wait,
   or has waited, goes to one that has room.
2. Higher priorities first, then in the order of arrival. Those that want the same of their worker
(`WorkerConstraints`: pin, lists, labels, adapter) are a group, and go one after the other; one group holds up no other.
3. Who comes while its group waits, waits behind it, also while every worker is over a busy threshold: nobody overtakes
   by asking again at the right moment. Without such a group, busy is a refusal, as it is without a queue.
4. The queue of a pool is bounded. What does not fit, and what else is refused for want of capacity while anyone waits
in the pool, is refused with a time to try again.
5. A repeated call of the same attempt takes over the place of the first, with its own overlaps: that is how a gateway
   refreshes them. The first call ends with `Cancelled`.
6. Nothing is booked before a waiter is answered; one whose caller has gone is taken out and leaves nothing.

Pure: the clock is passed in, whoever waits is answered through a callback.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from kvscout_common.errors import AlreadyExists, Cancelled, KvscoutError, ResourceExhausted
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.policies.eligibility import Fits, constraints_of
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import SelectionRequest, WorkerConstraints
from kvscout_scheduler.values.reservation import OwnerName, PoolId, RequestKey

RETRY_SECONDS = 1.0
"""Seconds after which refused callers should try again: a full queue of prefills takes a few seconds."""

Answer = Callable[[Decision | KvscoutError], None]


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in the queue."""

    request: SelectionRequest
    answer: Answer
    """Receives the decision, or the error; must not raise."""
    owner: OwnerName | None
    lease_seconds: float
    since: float
    place: tuple[int, int] = field(default=(0, 0))
    """Orders the queue: priority, highest first, then arrival."""


_PLACE = attrgetter("place")


class Group:
    """Waiters of a pool that want the same of their worker, in the order in which they go; never empty in a queue."""

    def __init__(self, constraints: WorkerConstraints) -> None:
        self.constraints = constraints
        self.waiters: list[Waiter] = []
        self._fits: tuple[Fits, ...] = tuple(demand.fits for demand in constraints_of(constraints))

    @property
    def head(self) -> Waiter:
        """Return the waiter that goes next."""
        return self.waiters[0]

    def fits(self, rank: WorkerRank, spec: WorkerSpec) -> bool:
        """Return whether a worker is what they want."""
        return all(fits(rank, spec) for fits in self._fits)


class PoolQueue:
    """The waiters of one pool."""

    def __init__(self) -> None:
        self.length = 0
        self._groups: dict[str, dict[WorkerConstraints, Group]] = {}
        """By pinned worker; "" = none."""

    @property
    def groups(self) -> list[Group]:
        """Return all groups, in no order."""
        return [group for groups in self._groups.values() for group in groups.values()]

    def group(self, constraints: WorkerConstraints) -> Group | None:
        """Return those that wait for the same."""
        return self._groups.get(constraints.pinned_worker_id, {}).get(constraints)

    def priority(self, constraints: WorkerConstraints) -> int | None:
        """Return the highest priority of those that wait for the same; None = nobody does."""
        group = self.group(constraints)
        return None if group is None else group.head.request.priority

    def groups_for(self, rank: WorkerRank, spec: WorkerSpec) -> Iterator[Group]:
        """Return the groups that a worker rank could take."""
        for pin in (rank.worker_id, ""):
            for group in self._groups.get(pin, {}).values():
                if group.fits(rank, spec):
                    yield group

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at its place."""
        constraints = waiter.request.constraints
        groups = self._groups.setdefault(constraints.pinned_worker_id, {})
        group = groups.get(constraints)
        if group is None:
            group = groups[constraints] = Group(constraints)
        insort(group.waiters, waiter, key=_PLACE)
        self.length += 1

    def remove(self, waiter: Waiter) -> None:
        """Take a waiter out."""
        constraints = waiter.request.constraints
        groups = self._groups[constraints.pinned_worker_id]
        waiters = groups[constraints].waiters
        del waiters[bisect_left(waiters, waiter.place, key=_PLACE)]
        self.length -= 1
        if not waiters:
            del groups[constraints]
            if not groups:
                del self._groups[constraints.pinned_worker_id]


class WaitingQueues:
    """Queues of all pools.

    Args:
        limit: Waiters in one pool.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queues: dict[PoolId, PoolQueue] = {}
        self._by_key: dict[RequestKey, Waiter] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._by_key.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def length(self, pool: PoolId) -> int:
        """Return waiters in one pool."""
        queue = self._queues.get(pool)
        return queue.length if queue is not None else 0

    def queue(self, pool: PoolId) -> PoolQueue | None:
        """Return the queue of a pool; None = nobody waits there."""
        return self._queues.get(pool)

    @property
    def pools(self) -> list[PoolId]:
        """Return pools in which anyone waits; a copy."""
        return list(self._queues)

    def join(self, waiter: Waiter) -> None:
        """Put a request in the queue, or in the place of an earlier call of the same attempt.

        Raises:
            AlreadyExists: Another attempt of the request waits.
            ResourceExhausted: The queue is full.
        """
        key = waiter.request.key
        earlier = self._by_key.get(key)
        if earlier is not None:
            if earlier.request.attempt_id != waiter.request.attempt_id:
                raise AlreadyExists(f"request {key.request_id!r} waits under attempt {earlier.request.attempt_id}")
            waiter.since, waiter.place = earlier.since, earlier.place
            self.leave(earlier)
        else:
            waiting = self.length(key.pool)
            if waiting >= self._limit:
                raise ResourceExhausted(f"{waiting} requests wait (limit)", retry_after_seconds=RETRY_SECONDS)
            self._arrivals += 1
            waiter.place = (-waiter.request.priority, self._arrivals)
        queue = self._queues.get(key.pool)
        if queue is None:
            queue = self._queues[key.pool] = PoolQueue()
        queue.add(waiter)
        self._by_key[key] = waiter
        if earlier is not None:
            earlier.answer(Cancelled("a repeated call of the same attempt waits in its place"))

    def find(self, key: RequestKey, attempt_id: int) -> Waiter | None:
        """Return the waiter of an attempt."""
        waiter = self._by_key.get(key)
        return waiter if waiter is not None and waiter.request.attempt_id == attempt_id else None

    def leave(self, waiter: Waiter) -> bool:
        """Take a waiter out; False if it is not in the queue any more."""
        key = waiter.request.key
        if self._by_key.get(key) is not waiter:
            return False
        del self._by_key[key]
        queue = self._queues[key.pool]
        queue.remove(waiter)
        if not queue.length:
            del self._queues[key.pool]
        return True
