"""Codec of lifecycle streams: messages to operations, outcomes to results.

::

    message ──extension──▶ select, booking, prefill complete, free ──▶ Operation ──▶ Outcome ──extension──▶ result
                  └─ other kinds, rare fields, errors ──▶ protobuf objects, operation_messages.py

Where the extension reads a message, hashes stay packed and overlaps stay its columns; the operations are the same as by
protobuf objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvscout.v1 import scheduler_pb2
from kvscout_common.errors import InvalidArgument, KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.registry.worker_proto import role_from_proto
from kvscout_common.rpc.raw_messages import parse_message
from kvscout_common.worker import ALL_TENANTS, DEFAULT_TENANT, Role
from kvscout_scheduler.load import native as native_load
from kvscout_scheduler.messages import translate
from kvscout_scheduler.messages.operation_messages import result_to_proto, streamed_from_proto
from kvscout_scheduler.messages.translate import deadline_of, targets_of
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.operations import CompletePrefill, Free, Operation, Outcome, Select
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, PackedOverlaps
from kvscout_scheduler.values.request import Prompt, SelectionRequest
from kvscout_scheduler.values.reservation import MICROSECONDS, FreeOutcome, RequestKey

MAX_OPERATIONS: Final = 1024
"""Operations in one message."""

Read = tuple[int, Operation | KvscoutError]
"""Number of an operation, and the operation or its error."""

_PLAIN, _SELECT, _SELECT_AND_RESERVE, _PREFILL_COMPLETE = 0, 2, 3, 5
"""Numbers of an operation's fields; 0: it is left to protobuf."""
_PREFILL_COMPLETED, _FREED = 6, 8
"""Those of a result's."""

_ROLES: tuple[Role, ...] = tuple(map(role_from_proto, range(4)))


class Codec:
    """Codec of one stream.

    Args:
        tenant: Tenant of operations that name none; "" = the default one.
        caller_tenant: Tenant that the caller is bound to; "*" = all.
        acknowledges: Ends of prefills and of requests have no result where they succeed.
        native: Whether the extension reads and writes usual messages; None = if it is built.
    """

    def __init__(
        self, tenant: str, caller_tenant: str = ALL_TENANTS, *, acknowledges: bool = False, native: bool | None = None
    ) -> None:
        self._acknowledges = acknowledges
        self.native = native_available() if native is None else native
        self._tenant = tenant or DEFAULT_TENANT
        self._caller_tenant = caller_tenant

    def read(self, message: bytes) -> Iterator[Read]:
        """Return the operations of a serialised `LifecycleRequest`, in order.

        Raises:
            InvalidArgument: It is none, says hello again, or has too many.
            PermissionDenied: The caller's token is for another tenant.
        """
        operations = native_load.lifecycle_operations(message, self._caller_tenant) if self.native else None
        if operations is not None:
            return map(self._packed_operation, operations)
        request = parse_message(scheduler_pb2.LifecycleRequest, message)
        if request.HasField("hello"):
            raise InvalidArgument("comes first, once", field="hello")
        return self.operations(request)

    def operations(self, request: scheduler_pb2.LifecycleRequest) -> Iterator[Read]:
        """Return the operations of a message.

        Raises:
            InvalidArgument: There are too many.
        """
        count = len(request.operations)
        if count > MAX_OPERATIONS:
            raise InvalidArgument(f"{count} in one message, at most {MAX_OPERATIONS}", field="operations")
        return map(self._operation, request.operations)

    def write(self, number: int, operation: Operation | KvscoutError, outcome: Outcome) -> bytes:
        """Return a serialised `LifecycleResponse` of one result; several in a row are one message. b"" = it has none: a
        later result acknowledges it."""
        if self._acknowledges and isinstance(outcome, bool | FreeOutcome):
            return b""
        if self.native:
            if isinstance(outcome, FreeOutcome):
                return native_load.number_result(number, _FREED, translate.OUTCOMES[outcome])
            if isinstance(outcome, bool):
                return native_load.number_result(number, _PREFILL_COMPLETED, outcome)
            if isinstance(outcome, Decision) and outcome.explanation is None and not outcome.policy_problem:
                return native_load.select_result(number, columns_of(outcome))
        result = result_to_proto(operation, outcome)
        result.id = number
        return scheduler_pb2.LifecycleResponse(results=[result]).SerializeToString()

    def _operation(self, message: scheduler_pb2.LifecycleOperation) -> Read:
        try:
            return message.id, streamed_from_proto(message, self._tenant)
        except KvscoutError as error:
            return message.id, error

    def _packed_operation(self, read: tuple[Any, ...]) -> Read:
        kind = read[0]
        if kind == _PLAIN:
            return self._operation(parse_message(scheduler_pb2.LifecycleOperation, read[1]))
        if kind in (_SELECT, _SELECT_AND_RESERVE):
            return read[1], select_of(read, self._tenant)
        number, (model, tenant, role, request_id, attempt_id) = read[1], read[2]
        if not model or not request_id:
            ref = scheduler_pb2.RequestRef(model=model, request_id=request_id)
            return self._operation(scheduler_pb2.LifecycleOperation(id=number, free=ref))
        key, age_seconds = RequestKey(tenant or self._tenant, model, _ROLES[role], request_id), read[3] / MICROSECONDS
        if kind == _PREFILL_COMPLETE:
            return number, CompletePrefill(key, attempt_id, age_seconds)
        return number, Free(key, attempt_id, read[4], age_seconds)


def select_of(read: tuple[Any, ...], outer_tenant: str = DEFAULT_TENANT) -> Select:
    """Return a request that wants a worker, from what the extension read."""
    (
        kind,
        _,
        name,
        hashes,
        isl_tokens,
        block_size,
        overlaps,
        priority,
        lease,
        prefilled_elsewhere,
        traceparent,
        (output, (session, no_lineage, overlaps_unknown, parent), terms),
    ) = read
    model, tenant, role, request_id, attempt_id = name
    expected, bound, output_class, estimates = output
    caller, fairness_id, deadline_ms, *targets_us = terms
    request = SelectionRequest(
        model=model,
        isl_tokens=isl_tokens,
        prompt=Prompt(hashes, block_size, None, NO_OVERLAPS if overlaps is None else PackedOverlaps(overlaps)),
        tenant=tenant or outer_tenant,
        role=_ROLES[role],
        request_id=request_id,
        attempt_id=attempt_id,
        priority=priority,
        caller=caller,
        fairness_id=fairness_id,
        deadline_seconds=deadline_of(deadline_ms),
        targets=targets_of(*targets_us),
        expected_output_tokens=expected,
        max_output_tokens=bound,
        output_class=output_class,
        estimates_prefill=estimates,
        charge_prefill=not prefilled_elsewhere,
        session=session,
        by_lineage=not no_lineage,
        overlaps_unknown=overlaps_unknown,
        parent_session=parent,
    )
    return Select(request, kind == _SELECT_AND_RESERVE, lease, traceparent)


def columns_of(decision: Decision) -> tuple[str, int, str, int, float, float, int, int, int, float]:
    """Return a decision without its explanation, as the extension writes it."""
    rank, spec = decision.rank, decision.spec
    return (
        rank.worker_id,
        rank.dp_rank,
        spec.http_endpoint,
        decision.overlap_blocks,
        decision.effective_overlap_blocks,
        decision.cost,
        decision.uncached_tokens,
        spec.block_size,
        decision.session,
        decision.saved_seconds,
    )
