"""Operations as bytes, results as bytes: what is usual never becomes protobuf objects.

::

    message ──extension──▶ select, booking, prefill complete, free ──▶ Operation ──▶ Outcome ──extension──▶ result
                  └─ other kinds, rare fields, what is wrong ──▶ operation_messages.py, which words errors

Hashes stay packed, overlaps stay the extension's columns. What comes out is what protobuf objects would say.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvscout.v1 import scheduler_pb2, types_pb2
from kvscout_common.errors import KvscoutError
from kvscout_common.hashing import native_available
from kvscout_common.registry.worker_proto import role_from_proto
from kvscout_common.rpc.raw_messages import parse_message
from kvscout_common.worker import DEFAULT_TENANT, Role
from kvscout_scheduler.load import native as native_load
from kvscout_scheduler.messages import translate
from kvscout_scheduler.messages.operation_messages import Codec, MessageCodec, Read
from kvscout_scheduler.values.decision import Decision
from kvscout_scheduler.values.operations import CompletePrefill, Free, Operation, Outcome, Select
from kvscout_scheduler.values.overlaps import NO_OVERLAPS, Overlaps, PackedOverlaps
from kvscout_scheduler.values.request import Prompt, SelectionRequest
from kvscout_scheduler.values.reservation import FreeOutcome, RequestKey

_PLAIN, _SELECT, _SELECT_AND_RESERVE, _PREFILL_COMPLETE = 0, 2, 3, 5
"""Numbers of an operation's fields; 0: it is left to protobuf."""
_PREFILL_COMPLETED, _FREED = 6, 8
"""Those of a result's."""

_ROLES: tuple[Role, ...] = tuple(map(role_from_proto, range(4)))


def codec_for(tenant: str, caller_tenant: str) -> Codec:
    """Return the codec of a stream: the extension's where it is built.

    Args:
        tenant: Of operations that name none; "" = the default one.
        caller_tenant: What the caller is bound to; "*" = all.
    """
    return PackedCodec(tenant, caller_tenant) if native_available() else MessageCodec(tenant)


class PackedCodec:
    """See `Codec`.

    Args:
        tenant: Of operations that name none; "" = the default one.
        caller_tenant: What the caller is bound to; "*" = all.
    """

    def __init__(self, tenant: str, caller_tenant: str) -> None:
        self._tenant = tenant or DEFAULT_TENANT
        self._caller_tenant = caller_tenant
        self._messages = MessageCodec(tenant)

    def read(self, message: bytes) -> Iterator[Read]:
        operations = native_load.lifecycle_operations(message, self._caller_tenant)
        return self._messages.read(message) if operations is None else map(self._operation, operations)

    def write(self, number: int, operation: Operation | KvscoutError, outcome: Outcome) -> bytes:
        if isinstance(outcome, FreeOutcome):
            return native_load.number_result(number, _FREED, translate.OUTCOMES[outcome])
        if isinstance(outcome, bool):
            return native_load.number_result(number, _PREFILL_COMPLETED, outcome)
        if isinstance(outcome, Decision) and outcome.explanation is None:
            return native_load.select_result(number, columns_of(outcome))
        return self._messages.write(number, operation, outcome)

    def _operation(self, read: tuple[Any, ...]) -> Read:
        kind = read[0]
        if kind == _PLAIN:
            return self._messages.operation(parse_message(scheduler_pb2.LifecycleOperation, read[1]))
        if kind in (_SELECT, _SELECT_AND_RESERVE):
            return read[1], select_of(read, self._tenant)
        number, (model, tenant, role, request_id, attempt_id) = read[1], read[2]
        if not model or not request_id:
            ref = scheduler_pb2.RequestRef(model=model, request_id=request_id)
            return self._messages.operation(scheduler_pb2.LifecycleOperation(id=number, free=ref))
        key = RequestKey(tenant or self._tenant, model, _ROLES[role], request_id)
        return number, CompletePrefill(key, attempt_id) if kind == _PREFILL_COMPLETE else Free(key, attempt_id, read[3])


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
        output,
    ) = read
    model, tenant, role, request_id, attempt_id = name
    expected, bound, output_class, estimates = output
    wanted = SelectionRequest(
        model=model,
        isl_tokens=isl_tokens,
        prompt=Prompt(hashes, block_size, None, NO_OVERLAPS if overlaps is None else PackedOverlaps(overlaps, _unpack)),
        tenant=tenant or outer_tenant,
        role=_ROLES[role],
        request_id=request_id,
        attempt_id=attempt_id,
        priority=priority,
        expected_output_tokens=expected,
        max_output_tokens=bound,
        output_class=output_class,
        estimates_prefill=estimates,
        charge_prefill=not prefilled_elsewhere,
    )
    return Select(wanted, kind == _SELECT_AND_RESERVE, lease, traceparent)


def columns_of(decision: Decision) -> tuple[str, int, str, int, float, float, int, int]:
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
    )


def _unpack(message: bytes) -> Overlaps:
    return translate.overlaps_from_proto(types_pb2.Overlaps.FromString(message))
