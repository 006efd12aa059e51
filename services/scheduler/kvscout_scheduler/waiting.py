"""Requests that wait because every worker that could take them has prefill work enough.

::

    arrive ──▶ [prio 5: a d] [prio 0: b c e] ──pump──▶ booked, in this order
                    a pump follows whatever may have made room: prefill complete, Free, expiry, a worker that came

Rules
1. A request waits while *all* workers that could take it have more than `threshold · max_num_batched_tokens` active
   prefill tokens. A worker that did not register `max_num_batched_tokens` never makes anyone wait.
2. Higher priorities first, then in the order of arrival. One that waits for particular workers (pin, labels, adapter)
   holds up nobody who can go elsewhere.
3. The line of a pool is bounded; what does not fit is refused with the time after which to try again.
4. A repeated call of the same attempt takes over the place of the first, with its own overlaps: that is how a gateway
   refreshes them. The first call ends with `Cancelled`.
5. Nothing is booked before a waiter is told of it; one whose caller has gone is taken out and leaves nothing.

Pure: the clock is passed in, whoever waits is told through a callback.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvscout_common.errors import AlreadyExists, Cancelled, KvscoutError, ResourceExhausted
from kvscout_common.worker import WorkerRank
from kvscout_scheduler.booking import ActiveRequest, Phase
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.request import OwnerName, PoolId, RequestKey, SelectionRequest

RETRY_SECONDS = 1.0
"""What refused callers are told: prefills take fractions of a second, a full line of them a few."""

Answer = Callable[[Decision | KvscoutError], None]


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in line."""

    request: SelectionRequest
    answer: Answer
    """Told of the decision, or why there is none; must not raise."""
    owner: OwnerName | None
    lease_seconds: float
    since: float
    place: tuple[int, int] = field(default=(0, 0))
    """Orders the line: priority, highest first, then arrival."""


def queued_listing(waiter: Waiter, now: float) -> ActiveRequest:
    """What is shown of a waiter: no worker, no blocks."""
    request = waiter.request
    return ActiveRequest(
        key=request.key,
        attempt_id=request.attempt_id,
        rank=WorkerRank("", 0),
        phase=Phase.QUEUED,
        prompt_blocks=0,
        output_blocks=0,
        uncached_tokens=0,
        expected_output_tokens=request.expected_output_tokens,
        owner=waiter.owner,
        age_seconds=now - waiter.since,
        lease_remaining_seconds=None,
    )


class WaitingLine:
    """The lines of all pools.

    Args:
        limit: Waiters in one pool.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[PoolId, list[Waiter]] = {}
        self._by_key: dict[RequestKey, Waiter] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._by_key.values())

    def length(self, pool: PoolId) -> int:
        """Waiters in one pool."""
        return len(self._lines.get(pool, ()))

    def line(self, pool: PoolId) -> list[Waiter]:
        """Waiters of a pool, in the order in which they go; a copy."""
        return list(self._lines.get(pool, ()))

    @property
    def pools(self) -> list[PoolId]:
        """Pools in which anyone waits; a copy."""
        return list(self._lines)

    def join(self, waiter: Waiter) -> None:
        """Puts a request in line, or in the place of an earlier call of the same attempt.

        Raises:
            AlreadyExists: Another attempt of the request waits.
            ResourceExhausted: The line is full.
        """
        key = waiter.request.key
        earlier = self._by_key.get(key)
        if earlier is not None:
            if earlier.request.attempt_id != waiter.request.attempt_id:
                raise AlreadyExists(f"request {key.request_id!r} waits under attempt {earlier.request.attempt_id}")
            waiter.since = earlier.since
            waiter.place = earlier.place
            line = self._lines[waiter.request.pool]
            line[line.index(earlier)] = waiter
            self._by_key[key] = waiter
            earlier.answer(Cancelled("a repeated call of the same attempt waits in its place"))
            return
        line = self._lines.setdefault(waiter.request.pool, [])
        if len(line) >= self._limit:
            raise ResourceExhausted(f"{len(line)} requests wait (limit)", retry_after_seconds=RETRY_SECONDS)
        self._arrivals += 1
        waiter.place = (-waiter.request.priority, self._arrivals)
        insort(line, waiter, key=lambda each: each.place)
        self._by_key[key] = waiter

    def find(self, key: RequestKey, attempt_id: int) -> Waiter | None:
        """The waiter of an attempt."""
        waiter = self._by_key.get(key)
        return waiter if waiter is not None and waiter.request.attempt_id == attempt_id else None

    def leave(self, waiter: Waiter) -> bool:
        """Takes a waiter out; False if it is not in line any more."""
        if self._by_key.get(waiter.request.key) is not waiter:
            return False
        del self._by_key[waiter.request.key]
        line = self._lines[waiter.request.pool]
        line.remove(waiter)
        if not line:
            del self._lines[waiter.request.pool]
        return True
