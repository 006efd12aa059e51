"""The operations of a Lifecycle stream: one message in, one result out, now or when there is room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.statuses import status_code
from kvscout_common.worker import DEFAULT_TENANT
from kvscout_scheduler import translate
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.request import OwnerName, RequestKey, SelectionRequest
from kvscout_scheduler.scheduler import Scheduler
from kvscout_scheduler.traces import tell, traced
from kvscout_scheduler.waiting import Answer

MAX_OPERATIONS = 1024
"""In one message."""

Later = Callable[[scheduler_pb2.LifecycleResult], None]


class Elsewhere(Protocol):
    """Has operations on requests of other replicas carried out by those."""

    def concerns(self, operation: scheduler_pb2.LifecycleOperation, tenant: str) -> bool:
        """Whether an operation is on a request of another replica."""

    def away(self, key: RequestKey) -> bool:
        """Whether a request is another replica's."""

    async def carry_out(
        self, operation: scheduler_pb2.LifecycleOperation, tenant: str
    ) -> scheduler_pb2.LifecycleResult:
        """Has it carried out there, else here, and never raises."""


class WaitingCall(NamedTuple):
    """A select_and_reserve of a stream that waits in line."""

    key: RequestKey
    attempt_id: int
    answer: Answer


class Operations:
    """Carries out the operations of one stream.

    Args:
        scheduler: Decides.
        owner: Whose bookings these are; None = those of unary callers.
        tenant: Of operations that name none; "" = the default one.
        later: Takes the results of operations that waited.
        elsewhere: Knows of other replicas; None = there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        owner: OwnerName | None,
        tenant: str,
        later: Later,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._owner = owner
        self._tenant = tenant or DEFAULT_TENANT
        self._later = later
        self._elsewhere = elsewhere
        self._asking: set[asyncio.Task[None]] = set()
        self.traces: Mapping[int, str] = {}
        """Traces that the operations of the message at hand are part of, by their ids."""
        self._waiting: dict[int, WaitingCall] = {}
        """By operation id."""
        self._kinds: dict[str, Callable[[Any, scheduler_pb2.LifecycleResult], None]] = {
            "select": self._select,
            "reserve": self._reserve,
            "prefill_complete": self._prefill_complete,
            "add_output": self._add_output,
            "free": self._free,
            "renew": self._renew,
        }

    def carry_out(self, operations: Any, results: Any) -> None:
        """Carries out the operations of one message, in order.

        Args:
            operations: `LifecycleOperation`s.
            results: Repeated field that takes a result for each, those that have to wait excepted.

        Raises:
            InvalidArgument: There are too many.
        """
        if len(operations) > MAX_OPERATIONS:
            raise InvalidArgument(f"{len(operations)} in one message, at most {MAX_OPERATIONS}", field="operations")
        for operation in operations:
            kind = operation.WhichOneof("operation")
            if kind == "select_and_reserve":
                result = self._select_and_reserve(operation.id, operation.select_and_reserve)
                if result is not None:
                    results.append(result)
                continue
            if self._elsewhere is not None and self._elsewhere.concerns(operation, self._tenant):
                asking = asyncio.create_task(self._ask(self._elsewhere, operation))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)
                continue
            result = results.add(id=operation.id)
            try:
                if kind is None:
                    raise InvalidArgument("names none", field="operation")
                self._kinds[kind](getattr(operation, kind), result)
            except KvscoutError as error:
                refuse(result, error)

    async def answered(self) -> None:
        """Waits until every operation that others carry out is answered."""
        while self._asking:
            await asyncio.wait(self._asking)

    async def _ask(self, elsewhere: Elsewhere, operation: scheduler_pb2.LifecycleOperation) -> None:
        self._later(await elsewhere.carry_out(operation, self._tenant))

    def close(self) -> None:
        """The stream has ended: nobody waits for what is still in line."""
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            self._scheduler.abandon(call.key, call.attempt_id, call.answer)

    def _select(self, message: scheduler_pb2.SelectRequest, result: scheduler_pb2.LifecycleResult) -> None:
        decision = self.query(result.id, translate.selection_from_proto(message, self._tenant))
        result.select.CopyFrom(translate.decision_to_proto(decision))

    def query(self, operation_id: int, wanted: SelectionRequest) -> Decision:
        """Selects and books nothing.

        Raises:
            KvscoutError: As the scheduler.
        """
        with traced("Select", self.traces.get(operation_id)) as span:
            decision = self._scheduler.select(wanted)
            tell(span, wanted, decision)
            return decision

    def book(self, operation_id: int, wanted: SelectionRequest, lease_seconds: float) -> Decision | KvscoutError | None:
        """Selects and reserves.

        Returns:
            What came of it; None = it waits, and `later` is told.
        """
        told: list[Decision | KvscoutError] = []
        waits = False
        span = traced("SelectAndReserve", self.traces.get(operation_id)).begun()

        def answer(outcome: Decision | KvscoutError) -> None:
            tell(span, wanted, outcome)
            span.end()
            if not waits:
                told.append(outcome)
            elif self._waiting.pop(operation_id, None) is not None:
                self._later(select_result(operation_id, outcome))

        try:
            self._scheduler.reserve_or_wait(wanted, answer, owner=self._owner, lease_seconds=lease_seconds)
        except KvscoutError as error:
            tell(span, wanted, error)
            span.end()
            return error
        if told:
            return told[0]
        waits = True
        span.event("waits in line")
        self._waiting[operation_id] = WaitingCall(wanted.key, wanted.attempt_id, answer)
        return None

    def _select_and_reserve(
        self, operation_id: int, message: scheduler_pb2.SelectRequest
    ) -> scheduler_pb2.LifecycleResult | None:
        try:
            wanted = translate.selection_from_proto(message, self._tenant)
        except KvscoutError as error:
            return select_result(operation_id, error)
        outcome = self.book(operation_id, wanted, message.lease_seconds)
        return select_result(operation_id, outcome) if outcome is not None else None

    def _reserve(self, message: scheduler_pb2.ReserveRequest, result: scheduler_pb2.LifecycleResult) -> None:
        wanted = translate.reserve_from_proto(message, self._tenant)
        result.reserve.uncached_tokens = self._scheduler.reserve(
            wanted, owner=self._owner, lease_seconds=message.lease_seconds
        )

    def _prefill_complete(self, message: scheduler_pb2.RequestRef, result: scheduler_pb2.LifecycleResult) -> None:
        key = translate.key_from_proto(message, self._tenant)
        result.prefill_complete.changed = self._scheduler.mark_prefill_complete(key, message.attempt_id)

    def _add_output(self, message: scheduler_pb2.AddOutputRequest, result: scheduler_pb2.LifecycleResult) -> None:
        key = translate.key_from_proto(message, self._tenant)
        result.add_output.output_blocks = self._scheduler.add_output(key, message.blocks, message.attempt_id)

    def _free(self, message: scheduler_pb2.RequestRef, result: scheduler_pb2.LifecycleResult) -> None:
        key = translate.key_from_proto(message, self._tenant)
        result.free.CopyFrom(translate.outcome_to_proto(self._scheduler.free(key, message.attempt_id)))

    def _renew(self, message: scheduler_pb2.RenewRequest, result: scheduler_pb2.LifecycleResult) -> None:
        result.renew.CopyFrom(translate.renew(self._scheduler, message, self._tenant))


def select_result(operation_id: int, outcome: Decision | KvscoutError) -> scheduler_pb2.LifecycleResult:
    """The result of a select_and_reserve."""
    result = scheduler_pb2.LifecycleResult(id=operation_id)
    if isinstance(outcome, KvscoutError):
        refuse(result, outcome)
    else:
        result.select.CopyFrom(translate.decision_to_proto(outcome))
    return result


def refuse(result: scheduler_pb2.LifecycleResult, error: KvscoutError) -> None:
    """Makes a result that of an operation that failed."""
    result.code, result.message = status_code(error).value[0], str(error)
    if error.retry_after_seconds is not None:
        result.retry_after_seconds = error.retry_after_seconds


def carry_out_here(
    scheduler: Scheduler, operation: scheduler_pb2.LifecycleOperation, tenant: str
) -> scheduler_pb2.LifecycleResult:
    """Carries one operation out that cannot wait; its errors are in the result."""
    results = scheduler_pb2.LifecycleResponse().results
    Operations(scheduler, None, tenant, lambda result: None).carry_out([operation], results)
    return results[0]
