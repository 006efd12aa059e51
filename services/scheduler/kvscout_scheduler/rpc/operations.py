"""Operations of one caller: those that wait in the queue or that another replica carries out have their outcome later.

::

    message ──codec──▶ Operation ──▶ Operations ──▶ Outcome ──codec──▶ result
                                        └── waits in the queue, is another replica's ──later──▲

A stream is many operations of one owner, a unary call one operation without an owner. Those on one request take effect
in the order in which they came: one that another replica carries out holds up the later ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvscout_common.errors import KvscoutError
from kvscout_scheduler.queue.waiting import Waiter
from kvscout_scheduler.rpc.traces import record, traced
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.operations import Operation, Outcome, Renew, Reserve, Select
from kvscout_scheduler.values.reservation import OwnerName, RequestKey

if TYPE_CHECKING:
    from kvscout_scheduler.scheduler import Scheduler

Later: TypeAlias = Callable[[int, Operation, Outcome], None]


class RemoteOperations(Protocol):
    """Operations on bookings of other replicas."""

    def concerns(self, operation: Operation) -> bool:
        """Return whether an operation is on a booking of another replica."""

    async def carry_out(self, operation: Operation) -> Outcome:
        """Carry out such an operation at the owner of the booking, else here."""


class Operations:
    """Carries out the operations of one caller.

    Args:
        scheduler: Decides.
        owner: Whose bookings these are; None = those of unary callers.
        later: Receives the outcomes of operations that waited.
        remote: Operations on bookings of other replicas; None = there are none.
    """

    def __init__(
        self, scheduler: Scheduler, owner: OwnerName | None, later: Later, remote: RemoteOperations | None = None
    ) -> None:
        self._scheduler = scheduler
        self._owner = owner
        self._later = later
        self._remote = remote
        self._forwarded: dict[RequestKey | int, asyncio.Task[None]] = {}
        """The last operation under way on each request; those on several by number."""
        self._waiting: dict[int, Waiter] = {}
        """By number."""
        self._closed = False

    def carry_out(self, number: int, operation: Operation) -> Outcome | None:
        """Carry an operation out.

        Args:
            number: The caller's name for it.
            operation: The operation.

        Returns:
            Its outcome; None = it waits, and `later` receives the outcome.
        """
        if self._remote is not None:
            request = _request_of(operation, number) if self._forwarded else number
            before = self._forwarded.get(request)
            if before is not None or self._remote.concerns(operation):
                self._forward(self._remote, before, number, operation)
                return None
        # As `_carry_out_here`: three operations a request need no call more.
        if isinstance(operation, Select):
            return self._select(number, operation)
        return self._scheduler.apply(operation, self._owner)

    async def answered(self) -> None:
        """Wait until every operation that was forwarded is answered."""
        while self._forwarded:
            await asyncio.wait(self._forwarded.values())

    def close(self) -> None:
        """Take operations that wait out of the queue: their caller has gone."""
        self._closed = True
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            # One that another call replaced stays.
            self._scheduler.waiting.leave(waiter)

    def _carry_out_here(self, number: int, operation: Operation) -> Outcome | None:
        if isinstance(operation, Select):
            return self._select(number, operation)
        return self._scheduler.apply(operation, self._owner)

    def _forward(
        self, remote: RemoteOperations, before: asyncio.Task[None] | None, number: int, operation: Operation
    ) -> None:
        """Carry an operation out at another replica, or here behind one that is under way to another replica."""
        request = _request_of(operation, number)
        forwarding = asyncio.create_task(self._forwarding(remote, before, number, operation))
        self._forwarded[request] = forwarding

        def forget(done: asyncio.Task[None]) -> None:
            if self._forwarded.get(request) is done:
                del self._forwarded[request]

        forwarding.add_done_callback(forget)

    async def _forwarding(
        self, remote: RemoteOperations, before: asyncio.Task[None] | None, number: int, operation: Operation
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        outcome: Outcome | None
        if remote.concerns(operation):
            outcome = await remote.carry_out(operation)
        elif self._closed and isinstance(operation, Select | Reserve):
            return
        else:
            outcome = self._carry_out_here(number, operation)
        if outcome is not None:
            self._later(number, operation, outcome)

    def _select(self, number: int, operation: Select) -> Outcome | None:
        request, books, lease_seconds, traceparent = operation
        if not traceparent and not self._scheduler.queues_requests:
            # As most are: nothing is traced, and nobody waits.
            return self._scheduler.apply(operation, self._owner)
        outcomes: list[Decision | KvscoutError] = []
        waiter: Waiter | None = None
        span = traced("SelectAndReserve" if books else "Select", traceparent).begun()

        def answer(outcome: Decision | KvscoutError) -> None:
            record(span, request, outcome)
            span.end()
            if waiter is None:
                outcomes.append(outcome)
            elif self._waiting.pop(number, None) is not None:
                self._later(number, operation, outcome)

        try:
            if books:
                waiter = self._scheduler.reserve_or_wait(
                    request, answer, owner=self._owner, lease_seconds=lease_seconds
                )
            else:
                answer(self._scheduler.select(request))
        except KvscoutError as error:
            answer(error)
        if waiter is None:
            return outcomes[0]
        span.event("waits in the queue")
        self._waiting[number] = waiter
        return None


def _request_of(operation: Operation, number: int) -> RequestKey | int:
    """Return the request that an operation is on; of one on several requests, its number."""
    if isinstance(operation, Renew):
        return number
    if isinstance(operation, Select):
        return operation.request.key
    return operation.reservation.key if isinstance(operation, Reserve) else operation.key
