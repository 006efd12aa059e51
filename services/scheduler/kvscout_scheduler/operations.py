"""What callers ask of the scheduler, as values, and who carries it out: for streams, unary calls and replicas alike.

::

    message ──codec──▶ Operation ──▶ Operations ──▶ Outcome ──codec──▶ result
                                        └── waits in line, is another replica's ──later──▲

A stream is many operations of one owner, a unary call one of nobody's. Codecs: `operation_messages` for protobuf,
`packed_operations` for bytes that never become protobuf objects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvscout_common.errors import KvscoutError
from kvscout_scheduler.bookings.booking import FreeOutcome
from kvscout_scheduler.queue.waiting import Waiter
from kvscout_scheduler.rpc.traces import tell, traced
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.request import OwnerName, RequestKey, SelectionRequest
from kvscout_scheduler.values.reservation import Facts

if TYPE_CHECKING:
    from kvscout_scheduler.replicas.forwarding import Forwarding


class Select(NamedTuple):
    """Picks a worker, and books it or not."""

    wanted: SelectionRequest
    books: bool
    lease_seconds: int = 0
    traceparent: str = ""

    def carry_out(self, scheduler: Scheduler, owner: OwnerName | None) -> Decision:
        """The worker, booked if there is room now."""
        if not self.books:
            return scheduler.select(self.wanted)
        return scheduler.select_and_reserve(self.wanted, owner=owner, lease_seconds=self.lease_seconds)


class Reserve(NamedTuple):
    """Books a given worker."""

    wanted: Facts
    lease_seconds: int = 0

    def carry_out(self, scheduler: Scheduler, owner: OwnerName | None) -> int:
        """Prompt tokens charged as uncached."""
        return scheduler.reserve(self.wanted, owner=owner, lease_seconds=self.lease_seconds)


class CompletePrefill(NamedTuple):
    """The first token is out."""

    key: RequestKey
    attempt_id: int

    def carry_out(self, scheduler: Scheduler, owner: OwnerName | None) -> bool:
        """False: it was out before."""
        return scheduler.mark_prefill_complete(self.key, self.attempt_id)


class AddOutput(NamedTuple):
    """There are more generated blocks."""

    key: RequestKey
    attempt_id: int
    blocks: int

    def carry_out(self, scheduler: Scheduler, owner: OwnerName | None) -> int:
        """Output blocks in all."""
        return scheduler.add_output(self.key, self.blocks, self.attempt_id)


class Free(NamedTuple):
    """A request is over."""

    key: RequestKey
    attempt_id: int
    output_tokens: int = 0

    def carry_out(self, scheduler: Scheduler, owner: OwnerName | None) -> FreeOutcome:
        """What it did."""
        return scheduler.free(self.key, self.attempt_id, output_tokens=self.output_tokens)


class Renew(NamedTuple):
    """Leases go on."""

    attempts: tuple[tuple[RequestKey, int], ...]
    lease_seconds: int = 0

    def carry_out(self, scheduler: Scheduler, owner: OwnerName | None) -> list[int]:
        """Places of those that are not active."""
        renewed = [scheduler.renew(*attempt, lease_seconds=self.lease_seconds) for attempt in self.attempts]
        return [place for place, active in enumerate(renewed) if not active]


Operation: TypeAlias = Select | Reserve | CompletePrefill | AddOutput | Free | Renew
Outcome: TypeAlias = Decision | FreeOutcome | int | list[int] | KvscoutError
Later: TypeAlias = Callable[[int, Operation, Outcome], None]


class Operations:
    """Carries out the operations of one caller.

    Args:
        scheduler: Decides.
        owner: Whose bookings these are; None = those of unary callers.
        later: Told what came of operations that waited.
        elsewhere: Knows of other replicas; None = there are none.
    """

    def __init__(
        self, scheduler: Scheduler, owner: OwnerName | None, later: Later, elsewhere: Forwarding | None = None
    ) -> None:
        self._scheduler = scheduler
        self._owner = owner
        self._later = later
        self._elsewhere = elsewhere
        self._asking: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, Waiter] = {}
        """By number."""

    def carry_out(self, number: int, operation: Operation) -> Outcome | None:
        """Carries an operation out.

        Args:
            number: The caller's name for it.
            operation: What is asked.

        Returns:
            What came of it; None = it waits, and `later` is told.
        """
        if isinstance(operation, Select):
            return self._select(number, operation)
        if self._elsewhere is not None and self._elsewhere.concerns(operation):
            asking = asyncio.create_task(self._ask(self._elsewhere, number, operation))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            return None
        return carry_out(operation, self._scheduler, self._owner)

    async def answered(self) -> None:
        """Waits until every operation that others carry out is answered."""
        while self._asking:
            await asyncio.wait(self._asking)

    def close(self) -> None:
        """The caller has gone: nobody waits for what is still in line."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            # One that another call replaced stays.
            self._scheduler.waiting.leave(waiter)

    async def _ask(self, elsewhere: Forwarding, number: int, operation: Operation) -> None:
        self._later(number, operation, await elsewhere.carry_out(operation))

    def _select(self, number: int, operation: Select) -> Outcome | None:
        wanted, books, lease_seconds, traceparent = operation
        if not traceparent and not self._scheduler.keeps_line:
            # As most are: nothing is traced, and nobody waits.
            return carry_out(operation, self._scheduler, self._owner)
        told: list[Decision | KvscoutError] = []
        waiter: Waiter | None = None
        span = traced("SelectAndReserve" if books else "Select", traceparent).begun()

        def answer(outcome: Decision | KvscoutError) -> None:
            tell(span, wanted, outcome)
            span.end()
            if waiter is None:
                told.append(outcome)
            elif self._waiting.pop(number, None) is not None:
                self._later(number, operation, outcome)

        try:
            if books:
                waiter = self._scheduler.reserve_or_wait(wanted, answer, owner=self._owner, lease_seconds=lease_seconds)
            else:
                answer(self._scheduler.select(wanted))
        except KvscoutError as error:
            answer(error)
        if waiter is None:
            return told[0]
        span.event("waits in line")
        self._waiting[number] = waiter
        return None


def carry_out(operation: Operation, scheduler: Scheduler, owner: OwnerName | None = None) -> Outcome:
    """Carries out an operation that does not wait; its error is what comes of it."""
    try:
        return operation.carry_out(scheduler, owner)
    except KvscoutError as error:
        return error
