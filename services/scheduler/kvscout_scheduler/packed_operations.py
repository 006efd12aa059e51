"""The operations of a Lifecycle stream as bytes, results as bytes: what is usual never becomes protobuf objects.

::

    message ──extension──▶ query, booking, prefill complete, free ──▶ scheduler ──extension──▶ results
                  └─ other kinds, rare fields, what is wrong ──▶ operations.py, which words errors

Hashes stay packed, overlaps stay the extension's columns. What comes out is what the plain path says.
"""

from __future__ import annotations

from typing import Any

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.identity import current_identity
from kvscout_common.raw_messages import parse_message
from kvscout_common.wire_fields import fields_of
from kvscout_common.worker import DEFAULT_TENANT, Role
from kvscout_common.worker_proto import role_from_proto
from kvscout_scheduler import native_load, translate
from kvscout_scheduler.booking import FreeOutcome
from kvscout_scheduler.decision import Decision
from kvscout_scheduler.operations import Elsewhere, Operations, refuse, select_result
from kvscout_scheduler.overlaps import NO_OVERLAPS, Overlaps, PackedOverlaps
from kvscout_scheduler.request import Prompt, RequestKey, SelectionRequest
from kvscout_scheduler.scheduler import Scheduler

_PLAIN, _SELECT_AND_RESERVE, _PREFILL_COMPLETE, _FREE = 0, 3, 5, 7
"""Numbers of an operation's fields; 0: it is left to the plain path."""

_ROLES: tuple[Role, ...] = tuple(map(role_from_proto, range(4)))
_OUTCOMES: dict[FreeOutcome, int] = {each: translate.outcome_to_proto(each).outcome for each in FreeOutcome}

Name = tuple[str, str, int, str, int]
"""Model, tenant ("" = that of the stream), role, request id, attempt id."""


class PackedOperations:
    """Carries out the operations of one stream.

    Args:
        scheduler: Decides.
        tenant: Of operations that name none; "" = the default one.
        caller_tenant: What the caller is bound to; "*" = all.
        plain: Carries out what is left to it.
        elsewhere: Knows of other replicas; None = there are none.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tenant: str,
        caller_tenant: str,
        plain: Operations,
        elsewhere: Elsewhere | None,
    ) -> None:
        self._scheduler = scheduler
        self._tenant = tenant or DEFAULT_TENANT
        self._caller_tenant = caller_tenant
        self._plain = plain
        self._elsewhere = elsewhere

    def carry_out(self, message: bytes, results: list[bytes]) -> bool:
        """Carries out the operations of one message, in order.

        Args:
            message: A serialised `LifecycleRequest`.
            results: Takes serialised `LifecycleResponse`s.

        Returns:
            False, and nothing is done: the plain path must take the message.

        Raises:
            InvalidArgument: An operation is no message.
            PermissionDenied: The caller's token is for another tenant.
        """
        if not native_available():
            return False
        operations = native_load.lifecycle_operations(message, self._caller_tenant)
        if operations is None:
            return False
        for operation in operations:
            kind = operation[0]
            if kind == _SELECT_AND_RESERVE:
                result = self._select_and_reserve(operation)
            elif kind == _PLAIN:
                result = self._query(operation[1]) or self._carry_out_plain(
                    parse_message(scheduler_pb2.LifecycleOperation, operation[1])
                )
            else:
                result = self._carry_out_named(*operation)
            if result:
                results.append(result)
        return True

    def _query(self, operation: bytes) -> bytes:
        """The result of a select of the usual shape; empty: it is something else."""
        try:
            fields = list(fields_of(operation))
        except ValueError:
            return b""
        match fields:
            case [(1, int(operation_id)), (2, bytes(message))] | [(2, bytes(message)), (1, int(operation_id))]:
                read = native_load.select_request(message)
            case _:
                return b""
        if read is None:
            return b""
        wanted = selection_of(read, self._tenant)
        current_identity().require_tenant(wanted.tenant)
        try:
            decision = self._plain.query(operation_id, wanted)
        except KvscoutError as error:
            return _packed(select_result(operation_id, error))
        return native_load.select_result(operation_id, columns_of(decision))

    def _select_and_reserve(self, operation: tuple[Any, ...]) -> bytes:
        """The result; empty: it waits."""
        operation_id, lease_seconds = operation[1], operation[9]
        outcome = self._plain.book(operation_id, selection_of(operation, self._tenant), lease_seconds)
        if outcome is None:
            return b""
        if isinstance(outcome, KvscoutError):
            return _packed(select_result(operation_id, outcome))
        return native_load.select_result(operation_id, columns_of(outcome))

    def _carry_out_named(self, kind: int, operation_id: int, name: Name) -> bytes:
        model, tenant, role, request_id, attempt_id = name
        key = RequestKey(tenant or self._tenant, model, _ROLES[role], request_id)
        if not model or not request_id or (self._elsewhere is not None and self._elsewhere.away(key)):
            return self._carry_out_plain(_message(kind, operation_id, key, attempt_id))
        try:
            if kind == _FREE:
                return native_load.free_result(operation_id, _OUTCOMES[self._scheduler.free(key, attempt_id)])
            return native_load.prefill_result(operation_id, self._scheduler.mark_prefill_complete(key, attempt_id))
        except KvscoutError as error:
            result = scheduler_pb2.LifecycleResult(id=operation_id)
            refuse(result, error)
            return _packed(result)

    def _carry_out_plain(self, operation: scheduler_pb2.LifecycleOperation) -> bytes:
        response = scheduler_pb2.LifecycleResponse()
        self._plain.carry_out([operation], response.results)
        return response.SerializeToString()


def selection_of(operation: tuple[Any, ...], outer_tenant: str = DEFAULT_TENANT) -> SelectionRequest:
    """A request that wants a worker, from what the extension read."""
    _, _, name, hashes, isl_tokens, block_size, overlaps, priority, expected, _, elsewhere = operation
    model, tenant, role, request_id, attempt_id = name
    return SelectionRequest(
        model=model,
        isl_tokens=isl_tokens,
        prompt=Prompt(hashes, block_size, None, NO_OVERLAPS if overlaps is None else PackedOverlaps(overlaps, _unpack)),
        tenant=tenant or outer_tenant,
        role=_ROLES[role],
        request_id=request_id,
        attempt_id=attempt_id,
        priority=priority,
        expected_output_tokens=expected,
        charge_prefill=not elsewhere,
    )


def columns_of(decision: Decision) -> tuple[str, int, str, int, float, float, int, int]:
    """A decision without its explanation, as the extension writes it."""
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
    )


def _unpack(message: bytes) -> Overlaps:
    return translate.overlaps_from_proto(types_pb2.Overlaps.FromString(message))


def _packed(result: scheduler_pb2.LifecycleResult) -> bytes:
    return scheduler_pb2.LifecycleResponse(results=[result]).SerializeToString()


def _message(kind: int, operation_id: int, key: RequestKey, attempt_id: int) -> scheduler_pb2.LifecycleOperation:
    ref = translate.key_to_proto(key, attempt_id)
    if kind == _FREE:
        return scheduler_pb2.LifecycleOperation(id=operation_id, free=ref)
    return scheduler_pb2.LifecycleOperation(id=operation_id, prefill_complete=ref)
