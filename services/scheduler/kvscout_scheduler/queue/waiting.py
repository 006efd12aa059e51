"""Requests that wait because every worker that could take them has prefill work enough.

::

    arrive ──▶ any worker:  [prio 5: a d] [prio 0: b c e] ──┐
               pinned to x: [prio 0: f g]                   ├──admission.py──▶ booked, the first of all first
               adapter l:   [prio 9: h]                     ──┘

Rules
1. A request waits while *all* workers that could take it have more than `threshold · max_num_batched_tokens` active
   prefill tokens. A worker that did not register `max_num_batched_tokens` never makes anyone wait. Who need not wait,
   or has waited, goes to one that has room.
2. Higher priorities first, then fair shares (`fair_shares`), then in the order of arrival. Those that want the same of
   their worker (`WorkerConstraints`: pin, lists, labels, adapter) are a group, and go one after the other; one group
   holds up no other. A lower priority that has waited for `QueueOrder.aged_seconds` gets a share of the estimated
   seconds all the same (`QueueOrder.aged_share`), the one that has waited longest first: nobody starves.
3. Who comes while its group waits, waits behind it, also while every worker is over a busy threshold: nobody overtakes
   by asking again at the right moment. Without such a group, busy is a refusal, as it is without a queue.
4. The queue of a pool is bounded. What does not fit, and what else is refused for want of capacity while anyone waits
   in the pool, is refused with a time to try again.
5. A repeated call of the same attempt takes over the place of the first, with its own overlaps: that is how a gateway
   refreshes them. The first call ends with `Cancelled`.
6. Nothing is booked before a waiter is answered; one whose caller has gone is taken out, leaves nothing, and is not
   charged to its fair share. One whose deadline passes is refused.

Pure: the clock is passed in, whoever waits is answered through a callback.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from operator import attrgetter
from typing import Final

from kvscout_common.errors import AlreadyExists, Cancelled, KvscoutError, ResourceExhausted
from kvscout_common.worker import WorkerRank, WorkerSpec
from kvscout_scheduler.policies.eligibility import Fits, constraints_of
from kvscout_scheduler.queue.fair_shares import FairShares, Flow
from kvscout_scheduler.queue.turns import Rank, Turn
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import SelectionRequest, WorkerConstraints
from kvscout_scheduler.values.reservation import OwnerName, PoolId, RequestKey
from kvscout_scheduler.values.settings import QueueOrder

RETRY_SECONDS = 1.0
"""Seconds after which refused callers should try again: a full queue of prefills takes a few seconds."""
_STALE: Final = 64
"""Entries of an order that may be of no use any more, besides as many as are of use."""

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
    seconds: float = 1.0
    """Estimated seconds that the request takes: its cost in its fair share."""
    deadline: float = inf
    """Time when its time in the queue is over, on the scheduler's clock."""
    sheds: bool = False
    """It is shed then: the time is that of its target, not of its deadline."""
    joined: float = field(init=False)
    """Arrival of this call; `since` is the arrival of the first."""
    place: int = field(default=0, init=False)
    """Orders those of one priority and fair share: by arrival."""
    flow: Flow = field(default=Flow(), init=False)
    """Fair share that it is charged to."""

    def __post_init__(self) -> None:
        self.joined = self.since


_PLACE = attrgetter("place")


class Line:
    """Waiters of one group and priority; never empty in a group."""

    def __init__(self) -> None:
        self.waiters: list[Waiter] = []
        """By arrival."""
        self._flows: dict[str, dict[str, list[Waiter]]] = {}
        """The same, by caller and fairness id."""

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at its place."""
        caller, fairness_id = waiter.flow
        insort(self.waiters, waiter, key=_PLACE)
        insort(self._flows.setdefault(caller, {}).setdefault(fairness_id, []), waiter, key=_PLACE)

    def remove(self, waiter: Waiter) -> None:
        """Take a waiter out."""
        caller, fairness_id = waiter.flow
        ids = self._flows[caller]
        for waiters in (self.waiters, ids[fairness_id]):
            del waiters[bisect_left(waiters, waiter.place, key=_PLACE)]
        if not ids[fairness_id]:
            del ids[fairness_id]
            if not ids:
                del self._flows[caller]

    def head(self, shares: FairShares) -> Waiter:
        """Return the waiter that goes next."""
        caller = shares.next_caller(self._flows)
        ids = self._flows[caller]
        return ids[shares.next_id(caller, ids)][0]


class Group:
    """Waiters of a pool that want the same of their worker; never empty in a queue."""

    def __init__(self, constraints: WorkerConstraints) -> None:
        self.constraints = constraints
        self.lines: dict[int, Line] = {}
        """By priority."""
        self._fits: tuple[Fits, ...] = tuple(demand.fits for demand in constraints_of(constraints))

    @property
    def priority(self) -> int:
        """Return the highest priority of those that wait."""
        return max(self.lines)

    @property
    def waiters(self) -> list[Waiter]:
        """Return all of them, in no order; a copy."""
        return [waiter for line in self.lines.values() for waiter in line.waiters]

    def fits(self, rank: WorkerRank, spec: WorkerSpec) -> bool:
        """Return whether a worker is what they want."""
        return all(fits(rank, spec) for fits in self._fits)


class PoolQueue:
    """The waiters of one pool.

    Args:
        order: Weights of fair shares, and the share of lower priorities.
    """

    def __init__(self, order: QueueOrder) -> None:
        self.length = 0
        self._order = order
        self._groups: dict[str, dict[WorkerConstraints, Group]] = {}
        """By pinned worker; "" = none."""
        self.shares: dict[int, FairShares] = {}
        """By priority; of one for which nobody waits, until somebody does."""
        self.owed = 0.0
        """Seconds that lower priorities should have had, since they have waited for long; above 0, they go next."""

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
        return None if group is None else group.priority

    def groups_for(self, rank: WorkerRank, spec: WorkerSpec) -> Iterator[Group]:
        """Return the groups that a worker rank could take."""
        for pin in (rank.worker_id, ""):
            for group in self._groups.get(pin, {}).values():
                if group.fits(rank, spec):
                    yield group

    @property
    def ahead_seconds(self) -> float:
        """Return by how much the shares of callers that wait differ, at the priority where they differ most."""
        return max((shares.ahead_seconds for shares in self.shares.values()), default=0.0)

    def seconds(self, priority: int) -> float:
        """Return the estimated seconds of those that wait and have at least a priority."""
        return sum(shares.seconds for level, shares in self.shares.items() if level >= priority)

    def head(self, group: Group) -> tuple[Rank, Waiter]:
        """Return the waiter of a group that goes next, and its rank among those of other groups."""
        priority = group.priority
        shares = self.shares[priority]
        waiter = group.lines[priority].head(shares)
        return (-priority, *shares.had(waiter.flow), waiter.place), waiter

    def is_aged(self, line: Line, now: float) -> bool:
        """Return whether the first of a line has waited for so long that it goes before higher priorities at times."""
        return now - line.waiters[0].since >= self._order.aged_seconds

    def charge(self, turn: Turn, now: float) -> None:
        """Charge the fair share of one that was served."""
        waiter, share = turn.waiter, self._order.aged_share
        shares = self.shares.get(waiter.request.priority)
        if shares is not None:
            shares.charge(waiter.flow, waiter.seconds)
        if turn.aged:
            self.owed -= (1.0 - share) * waiter.seconds
        elif len(self.shares) > 1 and any(
            priority < waiter.request.priority and self.is_aged(line, now)
            for group in self.groups
            for priority, line in group.lines.items()
        ):
            self.owed += share * waiter.seconds

    def add(self, waiter: Waiter) -> None:
        """Add a waiter at its place."""
        constraints, priority = waiter.request.constraints, waiter.request.priority
        groups = self._groups.setdefault(constraints.pinned_worker_id, {})
        group = groups.get(constraints)
        if group is None:
            group = groups[constraints] = Group(constraints)
        shares = self.shares.get(priority)
        if shares is None or not shares.waiting:
            # Nobody waited here: nothing is owed to anyone.
            self.shares = {level: shares for level, shares in self.shares.items() if shares.waiting}
            shares = self.shares[priority] = FairShares(self._order.weights)
        waiter.flow = shares.enter(Flow(waiter.request.caller, waiter.request.fairness_id), waiter.seconds)
        group.lines.setdefault(priority, Line()).add(waiter)
        self.length += 1

    def remove(self, waiter: Waiter) -> None:
        """Take a waiter out."""
        constraints, priority = waiter.request.constraints, waiter.request.priority
        groups = self._groups[constraints.pinned_worker_id]
        group = groups[constraints]
        line = group.lines[priority]
        line.remove(waiter)
        self.shares[priority].leave(waiter.flow, waiter.seconds)
        self.length -= 1
        if not line.waiters:
            del group.lines[priority]
            if not group.lines:
                del groups[constraints]
                if not groups:
                    del self._groups[constraints.pinned_worker_id]


class WaitingQueues:
    """Queues of all pools.

    Args:
        limit: Waiters in one pool.
        order: Weights of fair shares, and the share of lower priorities.
    """

    def __init__(self, limit: int, order: QueueOrder) -> None:
        self._limit = limit
        self._order = order
        self._queues: dict[PoolId, PoolQueue] = {}
        self._by_key: dict[RequestKey, Waiter] = {}
        self._arrivals = 0
        self._numbers = 0
        """Orders deadlines at one time."""
        self._deadlines: list[tuple[float, int, Waiter]] = []
        """Deadlines of waiters, and of some that have left; a heap."""

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

    def by_sign(self, pool: PoolId) -> dict[str, int]:
        """Return waiters in one pool by their priorities: "below_zero", "zero" and "above_zero"."""
        counts = {"below_zero": 0, "zero": 0, "above_zero": 0}
        queue = self._queues.get(pool)
        for priority, shares in queue.shares.items() if queue is not None else ():
            counts["below_zero" if priority < 0 else "above_zero" if priority else "zero"] += shares.waiting
        return counts

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
            if waiter.sheds:
                waiter.deadline -= waiter.joined - waiter.since
            self.leave(earlier)
        else:
            waiting = self.length(key.pool)
            if waiting >= self._limit:
                raise ResourceExhausted(
                    f"{waiting} requests wait (limit)", retry_after_seconds=RETRY_SECONDS, cause="queue"
                )
            self._arrivals += 1
            waiter.place = self._arrivals
        queue = self._queues.get(key.pool)
        if queue is None:
            queue = self._queues[key.pool] = PoolQueue(self._order)
        queue.add(waiter)
        self._by_key[key] = waiter
        if waiter.deadline < inf:
            self._await_deadline(waiter)
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

    def expired(self, now: float) -> list[Waiter]:
        """Take those whose deadline has passed out of the queue, and return them, for whoever answers them."""
        found = []
        while self._deadlines and self._deadlines[0][0] <= now:
            waiter = heappop(self._deadlines)[2]
            if self.leave(waiter):
                found.append(waiter)
        return found

    def _await_deadline(self, waiter: Waiter) -> None:
        if len(self._deadlines) > 2 * len(self._by_key) + _STALE:
            self._deadlines = [entry for entry in self._deadlines if self._by_key.get(entry[2].request.key) is entry[2]]
            heapify(self._deadlines)
        # Whoever takes over a place has it twice here; the waiters themselves have no order.
        self._numbers += 1
        heappush(self._deadlines, (waiter.deadline, self._numbers, waiter))
